"""The format ``quiz``: ``{"q": "…", "choices": ["…", "…"], "right": 1}``; the right choice is the answer."""

from __future__ import annotations

import luthier


def convert_quiz(reading: luthier.Reading) -> luthier.Row:
    """The question with its choices, lettered; the answer is the letter and the text of the right one."""
    choices, right = reading.column("choices"), reading.column("right")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise luthier.RowError("bad_content", "a list of texts is needed", field=reading.field("choices"))
    if type(right) is not int or not 0 <= right < len(choices):
        detail = f"{right!r} is none of the {len(choices)} choices, which are counted from 0"
        raise luthier.RowError("bad_content", detail, field=reading.field("right"))
    lettered = [f"{chr(ord('a') + number)}) {choice}" for number, choice in enumerate(choices)]
    question = luthier.Text(text="\n".join([reading.text("prompt"), *lettered]))
    answer = luthier.Text(text=lettered[right])
    return reading.conversation(
        reading.with_system(
            [luthier.Message(role="user", parts=(question,)), luthier.Message(role="assistant", parts=(answer,))]
        )
    )


QUIZ = luthier.FormatRule(
    columns={"prompt": ("q",), "choices": ("choices",), "right": ("right",), "system": ("system",)},
    needs=(("prompt", "choices", "right"),),
    convert=convert_quiz,
    version="1",  # of what `convert_quiz` makes of a row: another one, and stored rows are encoded again
    detected=True,  # nothing else has these columns
)


def same_letter(expected: str, generated: str) -> float | None:
    """Whether an answer begins with the letter of the right choice; no say where the right answer has no letter."""
    if expected[1:2] != ")":
        return None
    return float(generated.strip()[:1] == expected[0])
