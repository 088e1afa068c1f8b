"""Whatever a template does with text, every row is rendered as if it were the only one, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jinja2
import pytest

from luthier.errors import RowError
from luthier.records import ControlPiece, Piece, TextPiece
from luthier.rendering import ControlTokens
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy
from luthier.rendering.template import ChatTemplate
from tests.oracles.chat_rows import Chat, as_conversation, assistant, hugging_face_render, user
from tests.oracles.operations import OPERATIONS

CONTROL = ControlTokens(
    tokens=frozenset({"<|im_start|>", "<|im_end|>"}),
    special=frozenset({"<|im_start|>", "<|im_end|>"}),
    stops=frozenset({"<|im_end|>"}),
)
WORDS = ("yes", "abc", " no ", "", "7", "Yes", "ye,s no", "a\nb", "eee e", "NO", "o", "é")


def template(operation: str) -> str:
    # only beside the question: what a template adds to an answer is refused, whatever it is
    return (
        "{% for message in messages %}{% set text = message.content %}{% set v = " + operation + " %}"
        "<|im_start|>{{ message.role }}\n{{ text }}{% if message.role == 'user' %} [{{ v }}]{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def chats(first: str) -> Iterator[Chat]:
    """Rows of one shape; the first one comes again at once, as the first replay is always checked."""
    for word in (first, first, *WORDS):
        yield [user(word), assistant("no doubt")]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_row_is_rendered_as_if_it_were_the_only_one(operation: str) -> None:
    for first in WORDS[:3]:
        renderer = Renderer(ChatTemplate(template(operation)), CONTROL, TargetPolicy())
        for chat in chats(first):
            check(renderer, operation, chat)


def check(renderer: Renderer, operation: str, chat: Chat) -> None:
    """The text is transformers', or the row is refused; where transformers' own render raises it must be refused."""
    try:
        expected = hugging_face_render(template(operation), chat)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
        expected = None
    try:
        path = renderer.render(as_conversation(chat)).paths[-1]
    except RowError as error:
        assert expected is None or error.reason == "untraceable" or not is_reproduced(operation, chat), error
    else:
        text = printed(path)
        if text != expected and expected is not None:  # the history is printed otherwise once there is an answer
            prompt = hugging_face_render(template(operation), chat[:-1], add_generation_prompt=True)
            assert text.startswith(prompt) and text[len(prompt) :] in expected and not is_reproduced(operation, chat)
        else:
            assert text == expected


def is_reproduced(operation: str, chat: Chat) -> bool:
    """Whether the generation prompt is how the turn begins; where all messages are counted it is not."""
    prompt = hugging_face_render(template(operation), chat[:-1], add_generation_prompt=True)
    return hugging_face_render(template(operation), chat).startswith(prompt)


def printed(path: Sequence[Piece]) -> str:
    return "".join(piece.token if isinstance(piece, ControlPiece) else text_of(piece) for piece in path)


def text_of(piece: Piece) -> str:
    assert isinstance(piece, TextPiece)
    return piece.text


def test_most_operations_are_followed_and_not_refused() -> None:
    refused = [operation for operation in OPERATIONS if is_refused(operation)]
    assert len(refused) <= len(OPERATIONS) // 4, refused


def is_refused(operation: str) -> bool:
    renderer = Renderer(ChatTemplate(template(operation)), CONTROL, TargetPolicy())
    try:
        renderer.render(as_conversation(next(chats("yes"))))
    except RowError as error:
        return error.reason == "untraceable"
    return False


def test_a_row_that_is_rendered_as_another_is_seen() -> None:
    renderer = Renderer(ChatTemplate(template("text | length")), CONTROL, TargetPolicy())
    with pytest.raises(AssertionError):
        check(renderer, "text | wordcount", next(chats("yes")))
