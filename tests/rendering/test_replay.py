"""A row that is replayed from a recording gets exactly what running the template for it would give."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from chat import CHATML, CONTROL, assistant, conversation, message, renderer, user
from hypothesis import given
from hypothesis import strategies as st

from luthier.config.choices import HistoryRendering, TrainOn
from luthier.errors import RowError, TemplateError
from luthier.presets import tokenizer_folder
from luthier.presets.named_templates import named_template, named_templates, stop_tokens
from luthier.records import Conversation, Message, Piece, Text, TextPiece, Thinking, ToolCall
from luthier.rendering import ControlTokens
from luthier.rendering.blueprint import build_blueprint
from luthier.rendering.paths import cut_paths
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy, Weights
from luthier.rendering.template import ChatTemplate
from luthier.rendering.text_references import RowString
from luthier.templating import TemplateLimits, TemplateSettings
from tests.conftest import reason_is

# Templates that look at content in every way that stock templates do.
TEMPLATES = {
    "chatml": CHATML,
    "embedded": (Path(tokenizer_folder("tiny-qwen3")) / "chat_template.jinja").read_text(encoding="utf-8"),
    "trims": CHATML.replace("message.content", "(message.content | trim)"),
    "splits thoughts": CHATML.replace(
        "message.content",
        "(message.content.split('</think>')[-1].lstrip('\n') if '</think>' in message.content else message.content)",
    ),
    "strips what it joined": CHATML.replace("message.content", "(' ' + message.content + ' \n').strip()"),
    "tests the beginning": CHATML.replace(
        "message.content", "('tool: ' + message.content if message.content.startswith('<tool') else message.content)"
    ),
    "leaves out what is empty": "{% for message in messages if message.content %}" + CHATML.split("%}", 1)[1],
    "numbers long ones": CHATML.replace("message.content", "(message.content[:5] ~ (message.content | length))"),
    "looks at the last one": CHATML.replace(
        "message.content", "(message.content ~ ('!' if messages[-1].content == 'ab' else ''))"
    ),
    "compares two": CHATML.replace(
        "message.content", "('again' if loop.previtem.content == message.content else message.content)"
    ),
    "finds in a literal": CHATML.replace("message.content", "(message.content if message.content in 'abc' else 'no')"),
    "marks as safe": CHATML.replace("message.content", "(message.content | safe)"),
    "upper case": CHATML.replace("message.content", "(message.content | upper)"),
    "reverses": CHATML.replace("message.content", "message.content[::-1]"),
    "looks it up": CHATML.replace("message.content", "({'ab': 'known'}.get(message.content, message.content))"),
}  # fmt: skip
COMPILED: dict[str, ChatTemplate] = {}
WORDS = st.text(alphabet="ab \n<>", max_size=5) | st.sampled_from(
    ["<think>a</think>\n\nb", "<tool>", "ab", "<|im_end|>"]
)


def rows(texts: list[str]) -> Conversation:
    roles = itertools.cycle((user, assistant))
    return conversation(*(role(text) for role, text in zip(roles, texts, strict=False)))


def outcome(one: Renderer, row: Conversation) -> object:
    try:
        return [[piece for piece in path if getattr(piece, "text", True)] for path in one.render(row).paths]
    except RowError as error:
        return error.reason


@pytest.mark.parametrize("name", TEMPLATES)
@given(rows_of_texts=st.lists(st.lists(WORDS, min_size=2, max_size=4), min_size=2, max_size=4))
def test_replayed_rows_are_what_the_template_prints_for_them(name: str, rows_of_texts: list[list[str]]) -> None:
    template = COMPILED.setdefault(name, ChatTemplate(TEMPLATES[name]))
    replaying = Renderer(template, CONTROL, TargetPolicy())
    running = Renderer(template, CONTROL, TargetPolicy(), replay=False)
    for texts in rows_of_texts:
        assert outcome(replaying, rows(texts)) == outcome(running, rows(texts))


ODD_WORDS = [
    *("Yes.", "ok", "OK", "in", "name", "arguments", "</think>", "<think>a</think>b", "assistant\n", "<|im_end|>", "{"),
    *("1", "null", " ", "\nx", "x ", "\n\n", "", "San Francisco", "San Francisco is nice", "tool_call", "<tool_call>"),
]
SPOILING = {
    "prints a thought behind the answer": "{{ m.content }}<think>{{ m.reasoning_content }}</think>",
    "prints answers twice beside calls": "{{ m.content }}{% if m.tool_calls %}{{ m.content }}{% endif %}",
    "adds words": "{{ 'Sure! ' if m.role == 'assistant' and m.content }}{{ m.content }}",
    "lower case": "{{ m.content | lower }}",
    "prints no blank answers": "{{ m.content if m.content.strip() else 'nothing' }}",
}


def test_a_row_above_a_limit_of_the_template_is_refused_whatever_rows_of_its_shape_came_before() -> None:
    settings = TemplateSettings(limits=TemplateLimits(max_output_chars=250_000))
    one = Renderer(ChatTemplate(TEMPLATES["chatml"], settings=settings), CONTROL, TargetPolicy())
    short, long = rows(["so", "no"]), rows(["so", "no " * 90_000])
    for row in (short, short, long, long, short, long):
        assert (outcome(one, row) == "template_limit") == (row is long)


def odd_rows(number: int, seed: int) -> list[Conversation]:
    rng = random.Random(seed)

    def word() -> str:
        return rng.choice(ODD_WORDS)

    def row(kind: int) -> Conversation:
        thoughts = [Thinking(text=word())] if kind == 1 else []
        if kind < 2:
            return conversation(user(word()), assistant(*thoughts, word()))
        call = ToolCall(name="find", arguments={"what": word(), "of": [word(), 1]})
        return conversation(user(word()), assistant(word(), call), message("tool", word()), assistant(word()))

    return [row(rng.randrange(3)) for _ in range(number)]


@pytest.mark.parametrize("name", ["qwen3", "hermes", "llama3", *SPOILING])
def test_what_comes_of_a_row_does_not_depend_on_the_rows_before_it(name: str) -> None:
    if name in SPOILING:
        calls = "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
        source = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n" + SPOILING[name] + calls + "<|im_end|>\n{% endfor %}"
        )
        source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    else:
        source = named_template(name) or ""
        source = source.replace("<|eot_id|>", "<|im_end|>").replace("<|eom_id|>", "<|im_end|>")

    def became(one: Renderer, row: Conversation) -> object:
        try:
            return one.render(row).paths
        except RowError as error:
            return error.reason

    template, rows = ChatTemplate(source), odd_rows(60, seed=len(name))

    def together(several: list[Conversation]) -> list[object]:
        one = Renderer(template, CONTROL, TargetPolicy())
        return [became(one, row) for row in several]

    alone = [became(Renderer(template, CONTROL, TargetPolicy()), row) for row in rows]
    assert together(rows) == alone
    assert together(rows[::-1]) == alone[::-1]
    num_refused = sum(isinstance(what, str) for what in alone)
    assert num_refused > 0 if name in SPOILING else num_refused < len(rows)


PRINTING = [
    *(
        "n",
        "x ~ n",
        "f | tojson",
        "f | tojson(indent=2)",
        "f",
        "f.of | join(', ')",
        "'%s' % n",
        "'{}'.format(x)",
        "n | e",
    ),
    *("n | string | trim", "n if n is number and n is integer and x is float and n is not string else 'no'"),
    *("n if n is not none and n is not iterable and x is not mapping and n is not boolean else 'no'", "f.of | first"),
    *(
        "f.items() | map('last') | list | tojson",
        "n | default(1)",
        "(n | string)[:1]",
        "f.of | select('number') | list",
    ),
]
ASKING = [
    *(
        "n + 1",
        "1 - x",
        "n > 3",
        "3 > x",
        "n == 4",
        "n in [1, 2, 3]",
        "'yes' if n else 'no'",
        "range(n) | list",
        "f.of[:n]",
    ),
    *(
        "'abcdef'[:n]",
        "'%d' % n",
        "'{:03d}'.format(n)",
        "x | int",
        "x | round(1)",
        "n | abs",
        "{1: 'one', 2: 'two'}[n]",
    ),
    *(
        "f.of | sort",
        "f.of | sum",
        "f.of | max",
        "n is even",
        "n is divisibleby 3",
        "n | string | length",
        "n.real",
        "-n",
    ),
    *(
        "n is eq 3",
        "'a' * n",
        "not x",
        "n // 2",
        "f.of | unique | list",
        "f.of.index(n)",
        "loop.cycle(1, 2) + n",
        "n | upper",
    ),
    *("n | default('none', true)", "(n | tojson).startswith('1')", "n is sameas 3", "n | string | replace('1', 'one')"),
    *("[n, 2] == [1, 2]", "n | float", "n is in [3, 4]", "n.foo is defined", "f.of | batch(n) | list", "'a'.center(n)"),
    *(
        "f.of | select('>', 3) | list",
        "f.of | select | list",
        "'%5s' % n",
        "'text'[n]",
        "f.of[n]",
        "[7, 8, 9].count(n)",
    ),
    *(
        "{'a': n, 'b': 2} | dictsort(by='value')",
        "'a\nb' | indent(n)",
        "f.of | slice(n) | list",
        "f.get(n)",
        "n is true or n > 2",
    ),
]


def is_followed(template: ChatTemplate, rows: list[Conversation], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the template is recorded for the first row alone. Each row that is rendered must be what it prints."""
    recorded, record = [], ChatTemplate.record
    monkeypatch.setattr(ChatTemplate, "record", lambda *args, **kwargs: recorded.append(1) or record(*args, **kwargs))
    one, counts = Renderer(template, CONTROL, TargetPolicy(train_on=TrainOn.LAST_ASSISTANT)), []
    for row in rows:
        before = len(recorded)
        try:
            expected = template.render(row.messages, row.tools)
        except RowError as error:
            assert outcome(one, row) == error.reason
            continue
        try:
            (path,) = one.render(row).paths
        except RowError as error:  # printed in a way that can be followed in no row
            assert error.reason == "untraceable"
            continue
        assert printed(path) == expected
        counts.append(len(recorded) - before)
    return len(counts) == len(rows) and not any(counts[1:])


def printed(path: tuple[Piece, ...]) -> str:
    return "".join(piece.text if isinstance(piece, TextPiece) else piece.token for piece in path)


@pytest.mark.parametrize("expression", PRINTING + ASKING)
def test_numbers_of_calls_are_followed_unless_the_template_asks_which_they_are(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        "{% set f = m.tool_calls[0].function.arguments %}"
        f"{{% set n = f.n %}}{{% set x = f.x %}}[{{{{ {expression} }}}}]{{% endif %}}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = []
    numbers = [(4, 2.5), (3, 0.0), (2, -1e-7), (1, 1e22), (0, 3.0), (11, -2.25), (-12, 10.0), (4003, 0.1)]
    for n, x in numbers:
        call = ToolCall(name="find", arguments={"n": n, "x": x, "of": [n, 2, 7], "deep": {"is": True, "none": None}})
        rows.append(conversation(user("How many?"), assistant(call), message("tool", "7"), assistant("Seven.")))
    assert is_followed(template, rows, monkeypatch) == (expression in PRINTING)


def random_tool(rng: random.Random) -> dict[str, object]:
    values: list[object] = ['what it\'s "for"', "é\n\\<|im_end|>", 3, 2.5, -1e-7, True, None, [], {}, ["a", {"b": 1}]]
    properties = {
        f"p{rng.randrange(50)}": {"type": "string", "of": rng.choice(values)} for _ in range(rng.randrange(4))
    }
    parameters: dict[str, object] = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": f"f{rng.randrange(10**6)}", "description": f"does {rng.random()}", "parameters": parameters}
    return {"type": "function", "function": function}


WRITING = [
    *(
        "tools | tojson",
        "tools[0] | tojson",
        "tools | map('tojson') | join(', ')",
        "tools | tojson(indent=2)",
        "tools | length",
    ),
    *(
        "tools[-1] | tojson(ensure_ascii=true)",
        "tools | tojson(separators=(',', ':'))",
        "tools[0] | tojson(indent=4) | trim",
    ),
    *("{'tools': tools} | tojson(indent=1)", "'yes' if tools[0] is mapping and tools is iterable and tools else 'no'"),
    *("tools[0] | tojson | e", "(tools[0] | tojson)[1:-1]", "tools[:2] | tojson", "'%s' % (tools | tojson)"),
]
READING = [
    *("tools", "tools[0]", "tools[0].function.name", "tools[0]['function'] | tojson", "tools | tojson(sort_keys=true)"),
    *(
        "tools[0] | items | list",
        "tools[0] | length",
        "tools[0] | tojson | length",
        "'no' if 'x' in tools[0] else 'yes'",
    ),
    *("tools[0].keys() | list", "tools | map(attribute='function') | list | tojson", "tools[0] == tools[-1]"),
    *("tools | selectattr('type', 'eq', 'function') | list | tojson", "(tools[0] | tojson).split('name') | length"),
    *(
        "tools[0] is iterable",
        "tools[0] is sequence",
        "tools[0] is defined and tools[0].missing is defined",
        "tools[0] | list",
    ),
    *("tools[0].owner is defined", "tools[0].text is mapping", "tools | map(attribute='sample') | first is string"),
    *("tools[0] | attr('owner') is defined", "'{0.text}'.format(tools[0])", "tools[0]._use is defined"),
    *("tools | string", "tools | join", "'%s' % tools[0]", "dict(tools[0], x=1) | tojson", "tools[0] | tojson | upper"),
]


@pytest.mark.parametrize("expression", WRITING + READING)
def test_tools_are_followed_unless_the_template_looks_into_them(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, rng = ChatTemplate(f"<|im_start|>system\n{{{{ {expression} }}}}<|im_end|>\n{CHATML}"), random.Random(1)
    found = [(random_tool(rng), random_tool(rng)) for _ in range(8)]
    rows = [conversation(user("How?"), assistant("So."), tools=tools) for tools in found]
    assert is_followed(template, rows, monkeypatch) == (expression in WRITING)


@pytest.mark.parametrize("name", [facts.name for facts in named_templates() if facts.tools])
def test_rows_are_the_same_whether_their_tools_and_numbers_are_followed_or_not(name: str) -> None:
    template = ChatTemplate(named_template(name) or "", special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    facts = next(each for each in named_templates() if each.name == name)
    tokens = frozenset((*facts.tokens, "<s>", "</s>"))
    control = ControlTokens(tokens=tokens, special=tokens, stops=stop_tokens(name, template.special_tokens))
    following, recording = Renderer(template, control, TargetPolicy()), Renderer(template, control, TargetPolicy())
    recording._recordings.follows_numbers = recording._recordings.follows_tools = False
    rng, rendered = random.Random(name), 0
    often = random_tool(rng)
    for number in range(24):
        tools = (often,) if number % 2 else tuple(random_tool(rng) for _ in range(rng.randrange(1, 3)))
        call = ToolCall(
            name="find", arguments={"n": rng.randrange(-99, 10**6), "x": rng.random(), "of": [number, {"a": 0}]}
        )
        row = conversation(user("How?"), assistant(call), message("tool", "7"), assistant("Seven."), tools=tools)
        expected = outcome(recording, row)
        assert outcome(following, row) == expected
        rendered += not isinstance(expected, str)
    assert rendered == 24


IN_ANSWERS = {
    "numbers in a list of calls": "{{ m.tool_calls | tojson }}",
    "numbers in a message": "{{ m | tojson }}",
    "numbers beside the text of another message": "{{ {'u': messages[0].content, 'n': n} | tojson }}",
    "tools": "{{ tools | tojson }}{{ m.content }}",
    "tools beside a message": "{{ [m, tools] | tojson }}",
}


@pytest.mark.parametrize("name", IN_ANSWERS)
def test_what_is_followed_belongs_to_whom_it_belongs_otherwise(name: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}{% set n = m.tool_calls[0].function.arguments.n %}" + IN_ANSWERS[name] + "{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    following, recording = (Renderer(template, CONTROL, TargetPolicy()) for _ in range(2))
    recording._recordings.follows_numbers = recording._recordings.follows_tools = False
    found: list[dict[str, object]] = [{"type": "function", "function": {"name": "find"}}, {}, {}, {"n": 1}, {"x": {}}]
    for number, tool in enumerate(found):
        calls = ToolCall(name="find", arguments={"n": number}), ToolCall(name="look", arguments={"n": 7}, train=False)
        row = conversation(user("How?"), assistant("So", *calls), tools=(tool,))
        assert outcome(following, row) == outcome(recording, row)


def test_tools_in_an_answer_are_read_in_each_row() -> None:
    one = renderer(CHATML.replace("message.content", "(tools | tojson ~ message.content)"))
    found: list[dict[str, object]] = [{"name": "find"}, {}, {}, {"name": "find"}, {}]
    rows = [conversation(user("How?"), assistant("So."), tools=(tool,)) for tool in found]
    outcomes = [outcome(one, row) for row in rows]
    assert [each == "words_added" for each in outcomes] == [True, False, False, True, False]


def test_tools_that_json_does_not_tell_apart_are_of_two_shapes() -> None:
    odd = [None, float("nan"), float("inf"), (1,), [1], {1: 2}, {"1": 2}, {True: 1}, "\ud800", [[[[]]]], 1, 1.0, True]
    template = ChatTemplate("{{ tools | tojson }}" + CHATML)
    one = Renderer(template, CONTROL, TargetPolicy())
    for value in [*odd, 2**70, *odd[::-1]]:
        row = conversation(user("How?"), assistant("So."), tools=({"x": value},))
        (path,) = one.render(row).paths
        assert printed(path) == template.render(row.messages, row.tools)


def nested(depth: int) -> dict[str, object]:
    tool: dict[str, object] = {}
    for _ in range(depth):
        tool = {"of": tool}
    return tool


UNUSUAL_TOOLS: dict[str, object] = {
    "is a list": ["a"],
    "is a text": "a",
    "is over the limit of a template": {"name": "x" * 3_000_000},
    "is long": {"name": "x" * 200_000},
    "is deep": nested(300),
    "is too deep": nested(700),
    "is far too deep": nested(3_000),
}


@pytest.mark.parametrize("name", UNUSUAL_TOOLS)
def test_an_unusual_tool_has_one_outcome_whatever_came_before(name: str) -> None:
    template = ChatTemplate("{{ 'no' if tools[0] is mapping else 'yes' }}{{ tools | tojson }}" + CHATML)
    usual, tool = {"type": "function", "function": {"name": "find"}}, UNUSUAL_TOOLS[name]
    row = conversation(user("How?"), assistant("So."), tools=(tool,))  # type: ignore[arg-type]
    alone, later = (Renderer(template, CONTROL, TargetPolicy()) for _ in range(2))
    for _ in range(3):
        later.render(conversation(user("How?"), assistant("So."), tools=(usual,)))
    expected = outcome(alone, row)
    assert [outcome(later, row) for _ in range(12)] == [expected] * 12
    if "over" in name or "too" in name:
        assert expected in ("template_limit", "template")
    else:
        assert printed(later.render(row).paths[0]) == template.render(row.messages, row.tools)


def test_the_text_of_tools_that_many_rows_have_is_fixed() -> None:
    one, tools = renderer("{{ tools | tojson }}" + CHATML), (random_tool(random.Random(1)),)
    row = conversation(user("How?"), assistant("So."), tools=tools)
    references = [one.fill(row).blueprint.references.values() for _ in range(12)]
    assert [any(each == RowString(-1) for each in of_row) for of_row in references] == [True] * 8 + [False] * 4


@pytest.mark.parametrize("name", ["embedded", "looks at the last one", "strips what it joined"])
@given(texts=st.lists(WORDS, min_size=2, max_size=8), thoughts=st.booleans())
def test_pieces_and_runs_that_paths_share_are_those_that_each_has_alone(
    name: str, texts: list[str], thoughts: bool
) -> None:
    row = rows(texts)
    if thoughts and name == "embedded":
        row = replace(row, messages=tuple(with_thought(each) for each in row.messages))
    one = Renderer(COMPILED.setdefault(name, ChatTemplate(TEMPLATES[name])), CONTROL, TargetPolicy(), replay=False)
    try:
        together = one.fill(row).blueprint
    except RowError:
        return
    ((known,),) = one._blueprints.values()
    weights = Weights(row.messages, one.policy)
    learned = [path for path in known.paths if any(not span.is_history for span in path.spans)]
    alone = [cut_paths([(path, weights)], CONTROL)[0] for path in learned]
    assert list(together.paths) == alone
    apart = build_blueprint([tuple(map(replace, path)) for path in alone], [], together.references, CONTROL)
    assert apart.branches == together.branches


def with_thought(each: Message) -> Message:
    return replace(each, parts=(Thinking(text="hm"), *each.parts)) if each.role == "assistant" else each


def test_rows_of_one_shape_share_a_recording_unless_the_template_asks_what_tells_them_apart() -> None:
    one = renderer(TEMPLATES["splits thoughts"])
    first, second, third = (one.fill(rows([text, "hi"])) for text in ("plain", "other", "<think>a</think>b"))
    assert first.blueprint is second.blueprint
    assert third.blueprint is not first.blueprint


def test_a_replay_that_goes_wrong_is_noticed() -> None:
    one = renderer()
    one.fill(rows(["hi", "there"]))
    ((known,),) = one._blueprints.values()
    template = one.template
    assert template is not None
    template._plain = type(template)(
        CHATML.replace("'<|im_end|>", "' <|im_end|>")
    )._plain  # what inference runs is another one
    assert known.replays == 0
    with pytest.raises(TemplateError, match="prints something else"):
        one.fill(rows(["hi", "you"]))


def test_shapes_tell_apart_what_strings_do_not_say() -> None:
    calls = [ToolCall(name="f", arguments=arguments) for arguments in ({"a": "x"}, {"a": 1}, {"a": True}, {"b": "x"})]
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    one = renderer(template)
    texts = {
        "".join(getattr(piece, "text", "") for piece in one.render(conversation(user("go"), assistant(call))).paths[0])
        for call in calls
    }
    assert (
        len(texts) == 4 and any('{"a": 1}' in text for text in texts) and any('{"a": true}' in text for text in texts)
    )


GLM = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM_CONTROL = ControlTokens(
    tokens=frozenset({"<|user|>", "<|assistant|>", "<|tool|>"}),
    special=frozenset({"<|user|>", "<|assistant|>", "<|tool|>"}),
    stops=frozenset({"<|user|>", "<|tool|>"}),
)


def trained(path: tuple[object, ...]) -> list[str]:
    return [getattr(piece, "token", "") or piece.text for piece in path if piece.weight]  # type: ignore[attr-defined]


def test_where_the_next_header_is_the_stop_the_last_turn_gets_it_too() -> None:
    row = conversation(user("a"), assistant("b"), user("c"), assistant("d"))
    (path,) = renderer(GLM, GLM_CONTROL).render(row).paths
    assert trained(path) == ["b", "<|user|>", "d", "<|user|>"]
    unstopped = renderer(GLM, GLM_CONTROL, TargetPolicy(train_stop=False))
    (path,) = unstopped.render(row).paths
    assert trained(path) == ["b", "d"]


def test_an_answer_before_any_question_is_context_where_the_template_cannot_ask_for_it() -> None:
    row = conversation(assistant("a"), user("b"), assistant("c"))
    assert [trained(path) for path in renderer().render(row).paths] == [["a", "<|im_end|>", "c", "<|im_end|>"]]
    demanding = renderer("{% if messages[0].role != 'system' %}{% endif %}" + CHATML)
    filled = demanding.fill(row)
    assert [trained(path) for path in filled.blueprint.rendered(filled.values, row.address).paths] == [
        ["c", "<|im_end|>"]
    ]
    assert filled.notes == (("answer before any question, not learned", 1),)
    with pytest.raises(RowError, match="no element 0"):
        demanding.render(conversation(assistant("a", train=True), user("b"), assistant("c")))
    with pytest.raises(RowError, match="before any question"):
        demanding.render(conversation(assistant("a"), user("b")))


def test_an_unfinished_answer_ends_with_its_text_and_teaches_no_stop() -> None:
    row = conversation(user("a"), assistant("b"), user("c"), assistant("d "))
    one = renderer()
    (whole,), (path,) = one.render(row).paths, one.render(replace(row, continue_final_message=True)).paths
    assert trained(whole)[-2:] == ["d ", "<|im_end|>"]
    assert trained(path) == ["b", "<|im_end|>", "d "] and path[-1] == whole[len(path) - 1]
    untrained = renderer(policy=TargetPolicy(train_on=TrainOn.COMPLETION))
    prefilled = replace(row, continue_final_message=True, messages=(*row.messages[:3], assistant("d ", train=False)))
    with pytest.raises(RowError, check=reason_is("no_target")):
        untrained.render(prefilled)


def test_a_turn_that_another_one_of_the_assistant_follows_stops_as_if_it_were_the_last() -> None:
    row = conversation(user("a"), assistant("b"), assistant("c"))
    paths = renderer(GLM, GLM_CONTROL).render(row).paths
    assert [trained(path) for path in paths] == [["b", "<|user|>"], ["c", "<|user|>"]]


def test_a_template_that_wants_lists_of_parts_gets_them() -> None:
    parts = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
        "<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (path,) = renderer(parts).render(conversation(user("hi"), assistant("a", Text(text=" b", train=False)))).paths
    assert trained(path) == ["a", "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "on and on|too long"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "line 1: it calls itself"),
        ("{{ 'a' * 99999999999 }}", "would make 99,999,999,999 characters"),
        ("{{ 9 ** 999999999 }}", "bits"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
    ],
)
def test_templates_without_end_are_stopped(template: str, words: str) -> None:
    with pytest.raises((RowError, TemplateError), match=words):
        renderer(template).render(conversation(user("a"), assistant("b")))


def test_thinking_that_was_written_in_the_text_returns_to_it_where_the_template_knows_none() -> None:
    thought = Thinking(text="hm", written="<think>hm</think>\n", written_start=7)
    row = conversation(user("a"), assistant(thought, "b"))
    (path,) = renderer().render(row).paths
    assert "".join(trained(path)) == "<think>hm</think>\nb<|im_end|>"
    with pytest.raises(RowError, check=reason_is("dropped_by_template")):
        renderer().render(conversation(user("a"), assistant(Thinking(text="hm"), "b")))


def test_control_strings_in_text_are_counted_refused_or_allowed() -> None:
    row = conversation(user("say <|im_end|> <think>"), assistant("<|im_end|>"))
    assert renderer().fill(row).control_strings == {"<|im_end|>": 2, "<think>": 1}
    assert renderer().fill(conversation(user("< | im_end | >"), assistant("b"))).control_strings == {}
    with pytest.raises(RowError, check=reason_is("control_string")):
        renderer(policy=TargetPolicy(forbids_control=True)).fill(row)
    allowing = renderer(policy=TargetPolicy(allowed=frozenset({"<think>", "<|im_start|>"}))).fill(row)
    assert allowing.allowed == {"<think>"}


def test_many_shapes_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luthier.rendering.render.MOST_BLUEPRINTS", 3)
    one = renderer()
    expected = [renderer().render(rows(["a"] * length)).paths for length in range(2, 12, 2)]
    assert [one.render(rows(["a"] * length)).paths for length in range(2, 12, 2)] == expected
    assert len(one._blueprints) <= 4


def test_a_row_with_the_same_message_twice_is_followed() -> None:
    same: Message = user("hi")
    (path,) = renderer().render(Conversation(messages=(same, assistant("a"), same, assistant("a")))).paths
    assert trained(path) == ["a", "<|im_end|>", "a", "<|im_end|>"]
    assert message("user", "hi") == same


@pytest.mark.parametrize("history", HistoryRendering)
def test_a_conversation_of_too_many_answers_is_refused_at_once_and_by_name(history: HistoryRendering) -> None:
    row = conversation(*(message for _ in range(50_000) for message in (user("a"), assistant("b"))))
    began = time.thread_time()
    with pytest.raises(RowError) as refused:
        renderer(policy=TargetPolicy(history=history)).render(row)
    assert refused.value.reason == "too_many_messages"
    assert time.thread_time() - began < 10
    assert "one_rendering" not in refused.value.detail, "it would refuse the row, too"


def test_a_refusal_for_too_many_answers_names_one_rendering_where_that_lifts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("luthier.rendering.render.MOST_RENDERED", 100)
    row = conversation(*(message for _ in range(10) for message in (user("a"), assistant("b"))))
    with pytest.raises(RowError) as refused:
        renderer().render(row)
    assert refused.value.reason == "too_many_messages" and "one_rendering" in refused.value.detail
    (path,) = renderer(policy=TargetPolicy(history=HistoryRendering.ONE_RENDERING)).render(row).paths
    assert trained(path) == 10 * ["b", "<|im_end|>"]
