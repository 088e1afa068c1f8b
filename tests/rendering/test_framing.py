"""What stands around a media item in texts that no template makes is what the model's own template writes there."""

from __future__ import annotations

import pytest

from luthier.encoding.measuring import framed_slots
from luthier.rendering import MediaSlots

SLOTS = MediaSlots(tokens={"image": "<img>", "video": "<vid>"}, inline={"image": "<img>", "video": "<vid>"})
CONTROL = frozenset({"<s>", "<turn>", "<end>", "<open>", "<more>", "<close>", "<img>", "<vid>"})
TURNS = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}HERE"
    "{% endif %}{% endfor %}<end>\n{% endfor %}"
)


def inline(written: str, *, slots: MediaSlots = SLOTS) -> str:
    """What stands for an image where a template writes it so."""
    return framed_slots(slots, TURNS.replace("HERE", written), {"bos_token": "<s>"}, CONTROL).inline["image"]


@pytest.mark.parametrize(
    "written, expected",
    [
        ("<img>", "<img>"),
        ("<open><img><close>", "<open><img><close>"),
        ("<open><more><img><close>", "<open><more><img><close>"),
        ("<open><img><close>\n", "<open><img><close>"),
        ("Picture 1: <open><img>", "<open><img>"),
        ("<more> <open><img>\n<close>", "<open><img>"),  # only what is right beside it
    ],
)
def test_control_tokens_right_around_an_item_go_with_it(written: str, expected: str) -> None:
    assert inline(written) == expected


def test_the_tokens_of_a_turn_are_no_items() -> None:
    """Nothing is between the turn's token and the item, and only the one is there without the other."""
    source = "{% for message in messages %}<turn>{% for part in message.content %}"
    source += "{{ part.text if part.type == 'text' else '<img>' }}{% endfor %}<end>{% endfor %}"
    assert framed_slots(SLOTS, source, {}, CONTROL).inline["image"] == "<img>"


def test_a_kind_that_the_template_takes_no_parts_of_stays_as_it_is() -> None:
    framed = framed_slots(SLOTS, TURNS.replace("HERE", "<open><img><close>"), {"bos_token": "<s>"}, CONTROL)
    assert framed.inline == {"image": "<open><img><close>", "video": "<vid>"}
    assert framed_slots(SLOTS, None, {}, CONTROL) is SLOTS
    assert framed_slots(SLOTS, "{{ messages[0].content }}", {}, CONTROL).inline == SLOTS.inline
    assert framed_slots(SLOTS, "{% if %}", {}, CONTROL).inline == SLOTS.inline


def test_marks_that_a_processor_replaces_with_the_token_are_left_to_it() -> None:
    swallowed = MediaSlots(
        tokens={"image": "<img>"}, inline={"image": "<img>"}, wrapped={"<img>": "<open><img><close>"}
    )
    assert inline("<open><img><close>", slots=swallowed) == "<img>"
