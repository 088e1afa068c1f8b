"""What this package adds to Luthier: one row for each of its open tables.

`register` is named by the entry point in pyproject.toml. Luthier calls it once in each process, before it first reads a
table. Functions that need torch are named, not imported, so that mistakes in a run description are told without it.
"""

from __future__ import annotations

import luthier
from luthier_quiz.family import POSTCARD
from luthier_quiz.quizzes import QUIZ, same_letter

SCRIPT = """\
{%- for message in messages %}
{%- if message.role == 'system' %}[{{ message.content }}]
{% elif message.role == 'user' %}Q: {{ message.content }}
{% else %}A: {{ message.content }}{{ eos_token }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}A: {% endif %}"""


def register() -> None:
    """Add one row to each table."""
    luthier.register_format("quiz", QUIZ)
    luthier.register_template(luthier.NamedTemplate(name="script", models="this example's", source=SCRIPT))
    luthier.register_loss(
        luthier.Loss(
            name="focal",
            objectives=("sft", "pt"),
            function="luthier_quiz.losses:focal",
            numbers={"focal_gamma": 2.0},
            explained={"focal_gamma": "how much less a target counts that is likely already; 0 is ``cross_entropy``"},
            formula="-(1 - p)^focal_gamma log p",
            says="focal loss: unlikely targets count more",
            paper="1708.02002",
        )
    )
    luthier.register_objective(
        luthier.Objective(
            name="unlikelihood",
            rows=luthier.RowKind.VERDICT,
            default_loss="token_unlikelihood",
            losses="luthier_quiz.unlikelihood:make_losses",
        )
    )
    luthier.register_loss(
        luthier.Loss(
            name="token_unlikelihood",
            objectives=("unlikelihood",),
            function="luthier_quiz.unlikelihood:token_unlikelihood",
            numbers={"bad_weight": 1.0},
            explained={"bad_weight": "what the targets of bad answers count"},
            formula="good: -log p; bad: -bad_weight log(1 - p)",
            says="good answers become likelier, the tokens of bad ones less likely",
            paper="1908.04319",
        )
    )
    luthier.register_family(POSTCARD)
    luthier.register_metric("same_letter", same_letter)
