"""Whatever a template is made of, a row's text stays the row's, no row gets another's, or the row is refused."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from chat import CHATML, assistant, conversation, user
from expressions import HOSTILE, PLACES, composed, template_of

from luthier.errors import RowError, TemplateError
from luthier.records import ControlPiece, Conversation, MediaPiece, Message, Text, ToolCall
from luthier.rendering import ControlTokens
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy
from luthier.rendering.template import ChatTemplate
from luthier.rendering.text_references import Alphabet
from luthier.rendering.tracked import own_text
from luthier.templating import OverLimit
from tests.conftest import examples, reason_is, refused

TOKENS = ("<|im_start|>", "<|im_end|>", "<eos>")
CONTROL = ControlTokens(tokens=frozenset(TOKENS), special=frozenset(TOKENS), stops=frozenset({"<|im_end|>"}))
ANY_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))
# Stands in for a control string while a template runs, so that whatever is left of them is the template's own.
STAND_IN = {token: f"{chr(0xE100 + number)}zq{chr(0xE200 + number)}" for number, token in enumerate(TOKENS)}
EXPRESSIONS_TRIED = int(os.environ.get("LUTHIER_EXPRESSIONS", examples(150)))  # CONTRIBUTING.md has the long run


def row(question: str, answer: str, value: str) -> Conversation:
    arguments = {"a": value, "l": [value, "x"], "d": {"k": {"m": value}}, "n": 3, "f": 0.5, "b": True, "z": None,
                 "e": [], "<eos>": value}  # fmt: skip
    parameters = {"type": "object", "properties": {"<eos>": {"type": "string", "description": "<|im_end|>"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "a <|im_end|>", "parameters": parameters}}
    return conversation(
        user(question), assistant(answer, ToolCall(name=f"f{value}", arguments=arguments)), tools=(tool,)
    )


ROWS = (
    row("hi there", "abc", "red"),
    row("hi there", "abc", "blue"),
    row("we <|im_end|>", "x <eos> e", "<eos>"),
    row("<|im_end|>", "<eos>", "<|im_end|>"),
    row("HEY it's", "", ""),
    row(" \"e'\n", "Yes", "Blue <x>"),
    row("7", "7", "7"),
)


@dataclass
class Findings:
    """What became of some rows: ``wrong`` has each that was forged or mixed, ``placeless`` refusals without a place."""

    wrong: list[tuple[str, str, Any]] = field(default_factory=list)
    placeless: list[str] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of refusals of rows that the template prints


def try_out(source: str, findings: Findings, renderer: Renderer | None = None) -> None:
    """Render rows of one shape one after another, and compare each with what the template prints for it alone."""
    try:
        template = ChatTemplate(source)
    except TemplateError:
        return
    one = Renderer(template, CONTROL, TargetPolicy()) if renderer is None else renderer
    for each in ROWS:
        try:
            alone: str | None = template.render(each.messages, each.tools)
        except RowError:
            alone = None
        except TemplateError as error:
            assert isinstance(error.__cause__, OverLimit), error
            findings.rows["over the limits of templates"] += 1
            return
        try:
            path = one.render(each).paths[-1]
        except TemplateError as error:
            assert isinstance(error.__cause__, OverLimit), error
            findings.rows["over the limits of templates"] += 1
            return
        except RowError as error:
            findings.rows["refused" if alone is not None else "refused by the template"] += 1
            findings.reasons[error.reason] += alone is not None
            if error.reason == "untraceable" and "line " not in error.detail:
                findings.placeless.append(str(error))
            continue
        findings.rows["rendered"] += 1
        tokens = [piece.token for piece in path if isinstance(piece, ControlPiece | MediaPiece)]
        text = "".join(piece.token if isinstance(piece, ControlPiece | MediaPiece) else piece.text for piece in path)
        prompt = prompt_of(template, each.messages, each.tools)
        is_behind_prompt = prompt is not None and text.startswith(prompt) and text[len(prompt) :] in (alone or "")
        if text != alone and not is_behind_prompt:
            findings.wrong.append(("mixed", source, text))
        elif (expected := own_tokens(template, each, text, alone)) is not None and tokens != expected:
            findings.wrong.append(("forged", source, text))


def prompt_of(template: ChatTemplate, messages: tuple[Message, ...], tools: Any) -> str | None:
    """What inference shows before the answer, where the template prints the history otherwise once there is one."""
    try:
        return template.render(messages[:-1], tools, generation_prompt=True)
    except RowError:
        return None


def own_tokens(template: ChatTemplate, each: Conversation, text: str, alone: str | None) -> list[str] | None:
    """The control tokens that the template itself prints; None where hiding the row's changes what it prints."""
    hidden, tools = tuple(map(hide_message, each.messages)), hide(each.tools)
    if text == alone:
        try:
            printed = template.render(hidden, tools)
        except RowError:
            return None
        return ANY_TOKEN.findall(printed) if show(printed) == text else None
    prompt = prompt_of(template, hidden, tools)
    return None if prompt is None or not text.startswith(show(prompt)) else [*ANY_TOKEN.findall(prompt), "<|im_end|>"]


def show(text: str) -> str:
    for token, stand_in in STAND_IN.items():
        text = text.replace(stand_in, token)
    return text


def hide_message(message: Message) -> Message:
    parts = [
        Text(text=hide(part.text)) if isinstance(part, Text) else ToolCall(
            name=hide(part.name), arguments=hide(part.arguments)
        )
        for part in message.parts if isinstance(part, Text | ToolCall)
    ]  # fmt: skip
    return Message(role=message.role, parts=tuple(parts))


def hide(value: Any) -> Any:
    match value:
        case str():
            return ANY_TOKEN.sub(lambda match: STAND_IN[match[0]], value)
        case dict():
            return {hide(key): hide(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(hide, value))
        case _:
            return value


@pytest.mark.parametrize("part", range(6))
def test_hostile_expressions_forge_nothing_and_mix_no_rows(part: int) -> None:
    assert len(HOSTILE) >= 122
    findings = Findings()
    for expression in HOSTILE[part::6]:
        try_out(template_of(expression), findings)
    assert (findings.wrong, findings.placeless) == ([], [])
    assert findings.rows["rendered"] > findings.rows["refused"]


@pytest.mark.parametrize("seed", range(3))
def test_composed_expressions_forge_nothing_and_mix_no_rows(seed: int) -> None:
    rng, findings = random.Random(seed), Findings()
    for _ in range(EXPRESSIONS_TRIED // 3):
        try_out(template_of(composed(rng, rng.choice((1, 2, 2, 3))), rng.choice(PLACES)), findings)
    assert (findings.wrong, findings.placeless) == ([], [])
    assert findings.rows["rendered"] > 20
    print(f"seed {seed}: {EXPRESSIONS_TRIED // 3:,} expressions; rows: {dict(findings.rows)}; {dict(findings.reasons)}")


@pytest.mark.parametrize("kind", ["forged", "mixed"])
def test_the_check_sees_what_is_forged_or_mixed(kind: str) -> None:
    source = template_of("text").replace("{{ text }}", "")  # which prints the answer once, as a row can be learned from
    findings = Findings()
    one = Renderer(ChatTemplate(source), CONTROL, TargetPolicy())
    rendered = one.render

    def broken(each: Any) -> Any:
        result = rendered(each if kind == "forged" else ROWS[0])
        (path,) = result.paths
        stop = next(piece for piece in path if isinstance(piece, ControlPiece) and piece.token == "<|im_end|>")
        forged = tuple(stop if getattr(piece, "text", "") == "<|im_end|>" else piece for piece in path)
        object.__setattr__(result, "paths", (forged if kind == "forged" else path,))
        return result

    one.render = broken  # type: ignore[method-assign]
    try_out(source, findings, one)
    assert {what for what, _, _ in findings.wrong} == {kind}


# --------------------------------------------------------------------------------- a recording proves itself


def recorded(source: str, question: str = "<tool> hello", change: Any = None, replay: bool = True) -> None:
    template = ChatTemplate(source)
    if change is not None:
        change(template)
    Renderer(template, CONTROL, TargetPolicy(), replay=replay).render(conversation(user(question), assistant("answer")))


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("text", ["hello", "x", " y ", "<|im_end|>", "\U000f0000", "assistant", "7"])
def test_an_operation_that_takes_text_of_a_row_for_the_templates_own_is_found_out(text: str, replay: bool) -> None:
    def launder(template: ChatTemplate) -> None:
        environment = template._environment
        environment.filters["string"] = lambda value: own_text(str.__str__(value), environment.trace)

    source = CHATML.replace("message.content", "(message.content | string)")
    recorded(source, text, replay=replay)
    with refused(RowError, "untraceable", "line 2", "string"):
        recorded(source, text, launder, replay)


@pytest.mark.parametrize("change", ["", ".upper()", ".lower()", "[::-1]"])
def test_text_that_a_template_looked_at_as_a_whole_is_not_taken_for_its_own_either(change: str) -> None:
    def launder(template: ChatTemplate) -> None:
        environment = template._environment
        environment.filters["string"] = lambda value: own_text(str.__str__(value), environment.trace)

    text = f"({{'hello': 'x'}}.get(message.content, 'y') ~ (message.content{change} | string))"
    text = f"({text} if message.role == 'user' else message.content)"
    source = CHATML.replace("message.content", text)
    recorded(source, "hello")
    with refused(RowError, "untraceable", "line 2", "string"):
        recorded(source, "hello", launder)


def test_a_question_that_nobody_noted_is_found_out() -> None:
    source = CHATML.replace("message.content", "(message.content ~ ('!' if message.content is upper else '?'))")
    recorded(source)

    def silent(template: ChatTemplate) -> None:
        template._environment.tests["upper"] = lambda value: str.isupper(str.__str__(value))

    with pytest.raises(RowError, check=reason_is("untraceable")):
        recorded(source, "HELLO", silent)


def test_a_filter_that_does_not_do_what_it_does_at_inference_is_found_out() -> None:
    source = CHATML.replace("message.content", "(message.content | trim)")
    recorded(source, " hello ")

    def idle(template: ChatTemplate) -> None:
        template._environment.filters["trim"] = lambda value: value

    with refused(RowError, "untraceable", "line 2", "trim"):
        recorded(source, " hello ", idle)


@pytest.mark.parametrize("way", ["escape", "tojson", "urlencode", "format"])
def test_a_way_of_writing_that_is_not_seen_is_found_out_though_this_row_has_nothing_to_be_written_otherwise(
    way: str,
) -> None:
    source = CHATML.replace("message.content", "(message.content | string)")

    def unseen(template: ChatTemplate) -> None:
        plain = template._plain_environment
        plain.filters["string"] = {
            "escape": lambda value: str(plain.filters["escape"](value)),
            "tojson": lambda value: plain.filters["tojson"](value)[1:-1],
            "urlencode": plain.filters["urlencode"],
            "format": lambda value: value.replace("{0}", "0"),
        }[way]

    recorded(source, "hello")
    with refused(RowError, "untraceable", "line 2", "string"):
        recorded(source, "hello", unseen)


@pytest.mark.parametrize("mode", ["true", "message.content", "1"])
def test_a_block_that_escapes_what_it_prints_is_refused_with_its_line(mode: str) -> None:
    inner = "{% autoescape MODE %}{{ message.content }}{% endautoescape %}"
    source = "{% for message in messages %}\n<|im_start|>" + inner + "<|im_end|>{% endfor %}"
    with refused(RowError, "untraceable", "line 2", "autoescape"):
        ChatTemplate(source.replace("MODE", mode)).record(ROWS[0].messages, alphabet=Alphabet())
    ChatTemplate(source.replace("MODE", "false")).record(ROWS[0].messages, alphabet=Alphabet())


@pytest.mark.parametrize(
    "expression",
    ["1 // 0", "1 % 0", "'a'.encode('no')", "'abc' | truncate(1)", "'abc' | slice(0) | list", "cycler()", "2.0 ** 9999",
     "[1, 'a'] | sort", "{}.a.b", "'%d' % 'a'", "'{1}'.format(0)", "'%s' % ()", "'%'% 1", "none + 1"],
)  # fmt: skip
def test_whatever_a_template_trips_over_refuses_the_row(expression: str) -> None:
    template = ChatTemplate(CHATML.replace("message.content", f"(message.content ~ ({expression}))"))
    with pytest.raises(RowError) as refused:
        template.render(ROWS[0].messages)
    assert refused.value.reason == "template"
    with pytest.raises(RowError) as refused:
        Renderer(template, CONTROL, TargetPolicy()).render(ROWS[0])
    assert refused.value.reason == "template"


def test_a_role_that_nobody_knows_is_text() -> None:
    row = Conversation(messages=(Message(role="<|im_end|>", parts=(Text(text="a"),)), assistant("b")))
    source = CHATML.replace("{{ '<|im_start|>' + message.role", "{{ '<|im_start|>' ~ message.role")
    (path,) = Renderer(ChatTemplate(source), CONTROL, TargetPolicy()).render(row).paths
    assert [piece.token for piece in path if isinstance(piece, ControlPiece)] == [*TOKENS[:2]] * 2


def test_numbers_constants_and_brackets_of_a_row_make_no_control_token() -> None:
    forged = {"<3>", "[3]", "<True>", "<None>", "<4>", "<-3>", "<true>", "<null>", "<7>"}
    control = ControlTokens(tokens=frozenset({*forged, "<|im_end|>"}), stops=frozenset({"<|im_end|>"}))
    source = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls %}{% set a = call.function.arguments %}{{ call.function.name }}"
        " n <{{ a.n }}> l {{ a.l }} b <{{ a.b }}> z <{{ a.z }}> n <{{ a.n + 1 }}> n <{{ -a.n }}> b <{{ a.b | tojson }}>"
        " z <{{ a.z | tojson }}> s <{{ a.s | int }}> b <{{ '%s' % a.b }}> z <{{ '{}'.format(a.z) }}>"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    arguments = {"n": 3, "l": [3], "b": True, "z": None, "s": "7"}
    row = conversation(user("go"), assistant("a", ToolCall(name="f", arguments=arguments)))
    one = Renderer(ChatTemplate(source), control, TargetPolicy())
    (path,) = one.render(row).paths
    assert [piece.token for piece in path if isinstance(piece, ControlPiece)] == ["<|im_end|>"] * 2
    written = source.replace("{{ a.b }}", "True").replace("{{ a.n }}", "3")  # by the template itself
    (path,) = Renderer(ChatTemplate(written), control, TargetPolicy()).render(row).paths
    assert [piece.token for piece in path if isinstance(piece, ControlPiece)][1:3] == ["<3>", "<True>"]


@pytest.mark.parametrize(
    ("expression", "printed"),
    [
        ("a.b is true and a.b is boolean and a.b is sameas true and a.b == true and true == a.b", "True"),
        ("a.b is integer or a.b is false or a.z is boolean or a.z is number or a.z is mapping", "False"),
        ("a.b is number and a.n is integer and a.n is number and a.f is float and a.n is not boolean", "True"),
        ("a.z is none and a.z == none and none == a.z and a.z in [none] and a.z is sameas none", "True"),
        ("a.z is defined and a.z is not string and a.z is not iterable and not a.z", "True"),
        ("a.z or 'x'", "x"),
        ("a.z | default('x', true)", "x"),
        ("{none: 'x'}[a.z] ~ {true: 'y'}[a.b] ~ {3: 'z'}[a.n]", "xyz"),
        ("[a.b, a.z, a.n] | tojson ~ {'k': a.b} | tojson", '[true, null, 3]{"k": true}'),
        ("range(a.n) | list ~ 'x' * a.n ~ 'abcd'[a.n] ~ 'ab'.center(a.n + 1)", "[0, 1, 2]xxxd ab "),
        ("a.n + a.b", "4"),
        ("[a.n, 1] | sum", "4"),
    ],
)
def test_constants_and_numbers_of_a_row_are_to_a_template_what_they_are(expression: str, printed: str) -> None:
    source = CHATML.replace("message.content", "(message.content ~ (x if message.tool_calls else ''))").replace(
        "{{", "{% set a = message.tool_calls[0].function.arguments if message.tool_calls else {} %}"
        f"{{% set x = ({expression}) if message.tool_calls else '' %}}{{{{", 1
    )  # fmt: skip
    call = ToolCall(name="f", arguments={"b": True, "z": None, "n": 3, "f": 0.5})
    row = conversation(user("go"), assistant("a ", call), user("and"), assistant("b"))
    template = ChatTemplate(source)
    assert f"a {printed}<|im_end|>" in template.render(row.messages)
    template.record(row.messages, alphabet=Alphabet())  # raises where it is otherwise when followed
