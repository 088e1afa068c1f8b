"""No template, whatever it asks for, takes more than its limits; what templates really do is not in their way."""

from __future__ import annotations

import resource
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from luthier.errors import RowError, TemplateError
from luthier.presets.named_templates import named_template, template_names
from luthier.records import Message, Text
from luthier.rendering.template import ChatTemplate
from luthier.rendering.text_references import Alphabet
from luthier.templating import OverLimit, RenderUsage, TemplateLimits, TemplateSettings
from luthier.templating.sandbox import Sandbox, plain_environment

sys.path.insert(0, str(Path(__file__).parent))
from bombs import BOMBS, HARMLESS, PARSE_BOMBS, REFUSED_ROW

# A fifth of the limits of a run, so that all of them take a fifth of the time; which limit stops what is the same.
LIMITS = TemplateLimits(
    max_seconds=0.6, max_steps=100_000, max_output_chars=3_000_000, max_memory_mb=100, max_source_chars=100_000
)
ROW = (Message(role="user", parts=(Text(text="so"),)), Message(role="assistant", parts=(Text(text="no"),)))


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_soon_with_the_limit_and_its_place(name: str) -> None:
    began, memory = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TemplateError, RowError) if name in REFUSED_ROW else TemplateError) as refused:
        template = ChatTemplate(BOMBS[name], settings=TemplateSettings(limits=LIMITS))
        template.record(ROW, alphabet=Alphabet())
    if isinstance(refused.value, TemplateError):
        assert refused.value.message.startswith("chat template, ")
        assert refused.value.hint
    assert time.thread_time() - began < 5
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1e3 < 500


@pytest.mark.parametrize("name", PARSE_BOMBS)
def test_what_is_too_much_to_read_is_a_template_error(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(TemplateError):
        ChatTemplate(PARSE_BOMBS[name], settings=TemplateSettings(limits=LIMITS))
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("source", HARMLESS)
def test_what_stays_within_its_limits_is_not_in_their_way(source: str) -> None:
    assert (
        plain_environment(datetime(2026, 1, 1), LIMITS).compiled(source).render(words="so it is " * 9).startswith("ok")
    )


@pytest.mark.parametrize("name", template_names())
def test_named_templates_need_a_hundredth_of_the_limits(name: str) -> None:
    limits = TemplateLimits(max_steps=5_000, max_output_chars=160_000, max_source_chars=20_000)
    template = ChatTemplate(
        named_template(name) or "", special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        settings=TemplateSettings(limits=limits),
    )  # fmt: skip
    assert "no" in template.render(ROW * 10)


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("max_steps", "{% for i in range(9999) %}{% endfor %}"),
        ("max_output_chars", "{{ 'a' * 99999 }}"),
        ("max_seconds", "{% for i in range(9999) %}{% set a = range(999) | list | sort %}{% endfor %}"),
        ("max_source_chars", "{# " + "a" * 9999 + " #}"),
    ],
)
def test_a_refusal_names_the_key_that_lifts_it(key: str, source: str) -> None:
    low = {"max_steps": 100, "max_output_chars": 1000, "max_seconds": 0.01, "max_source_chars": 1000}
    with pytest.raises(TemplateError) as refused:
        ChatTemplate(source, settings=TemplateSettings(limits=TemplateLimits(**{key: low[key]}))).render(ROW)
    assert f"template.limits.{key}" in (refused.value.hint or "")
    if key != "max_seconds":
        ChatTemplate(source).render(ROW)


def test_a_template_is_read_once_and_each_environment_keeps_its_own_limits_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = "{% for i in range(200) %}{% endfor %}{{ strftime_now('%Y') }}{# read once #}"
    first = ChatTemplate(source, settings=TemplateSettings(now=datetime(2020, 2, 29)))
    read: list[str] = []
    for name in ("compile", "parse"):
        monkeypatch.setattr(Sandbox, name, lambda self, source, **_: read.append(source))
    second = ChatTemplate(source, settings=TemplateSettings(now=datetime(2021, 2, 28)))
    assert read == []
    assert (first.render(ROW), second.render(ROW), first.render(ROW)) == ("2020", "2021", "2020")
    for limits in (TemplateLimits(max_steps=100), TemplateLimits(max_source_chars=20)):
        with pytest.raises(TemplateError):
            ChatTemplate(source, settings=TemplateSettings(limits=limits)).render(ROW)
    assert first.record(ROW, alphabet=Alphabet()).sketch == "2020"


def test_a_large_row_is_put_aside_where_a_small_one_stops_the_run() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        settings=TemplateSettings(limits=TemplateLimits(max_output_chars=500_000)),
    )
    large = (Message(role="user", parts=(Text(text="so " * 200_000),)),)
    with pytest.raises(RowError) as refused:
        template.render(large)
    assert refused.value.reason == "template_limit"
    assert template.render(ROW) == "sono"
    tool: dict[str, object] = {}
    for _ in range(100_000):
        tool = {"of": tool}
    with pytest.raises(RowError) as refused:  # tools that are too deep to be measured
        template.render(large, [tool])
    assert refused.value.reason == "template"


def test_memory_is_looked_at() -> None:
    meter = RenderUsage(TemplateLimits(max_memory_mb=20))
    kept = []
    with pytest.raises(OverLimit) as refused:
        for _ in range(100):
            meter.make(5_000_000, "a test")
            kept.append(bytearray(5_000_000))
    assert refused.value.key == "max_memory_mb"
    assert refused.value.depends_on_machine


def test_a_template_with_a_clock_is_told_with_its_date() -> None:
    fixed = TemplateSettings(now=datetime(2020, 2, 29))
    assert "2020-02-29" in (fixed.clock_note("{{ strftime_now('%Y') }}", frozenset(), frozenset()) or "")
    assert ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", settings=fixed).render(ROW) == "2020-02-29"
    said = {
        (now, form): "time of day" in (TemplateSettings(now=now).clock_note(form, frozenset(), frozenset()) or "")
        for now in (None, datetime(2020, 2, 29))
        for form in ("{{ strftime_now('%d %b %Y') }}", "{{ strftime_now('%H:%M') }}")
    }
    assert sum(said.values()) == 1 and said[None, "{{ strftime_now('%H:%M') }}"]
    assert "date_string" in (fixed.clock_note("{{ date_string }}", {"date_string"}, frozenset()) or "")
    assert fixed.clock_note("{{ content }}", {"content"}, frozenset()) is None


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{% if a %}{% set b = 1 %}{{ b }}{% endif %}{{ c }}", {"a", "c"}),
        ("{% if a %}{% set b = 1 %}{% endif %}{{ b }}", {"a", "b"}),
        ("{% if a %}{% set b = 1 %}{% elif c %}{% set b = 2 %}{% else %}{% set b = 3 %}{% endif %}{{ b }}", {"a", "c"}),
        ("{% if b is not defined %}{% set b = 1 %}{% endif %}{{ b }}", {"b"}),
        ("{% for x in a %}{% if x %}{% set b = 1 %}{% endif %}{% endfor %}{{ b }}", {"a", "b"}),
        ("{% for x in a %}{% if b %}{% set b = x %}{{ loop.index }}{{ b }}{% endif %}{% endfor %}", {"a", "b"}),
        ("{% macro m(a) %}{{ a }}{{ b }}{% endmacro %}{{ m(c) }}", {"b", "c"}),
        ("{% set a %}{{ a }}{% endset %}{% with b = b %}{{ a }}{{ b }}{% endwith %}", {"b"}),
    ],
)
def test_a_variable_is_read_where_nothing_has_set_it_yet(source: str, variables: set[str]) -> None:
    """What a template is given under any other name changes nothing that it prints."""
    template = ChatTemplate(source)
    assert template.variables == variables
    for name in {*"abcx"} - variables:
        for others in ({}, {key: [1, 0] for key in variables}):
            given = [ChatTemplate(source, kwargs={**others, **more}).render(ROW) for more in ({}, {name: "Z"})]
            assert given[0] == given[1], name
