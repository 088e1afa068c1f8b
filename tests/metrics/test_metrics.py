"""Metrics say what the packages say whose names they bear, in every script, with intervals that hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

import luthier
from luthier import metrics as table
from luthier.errors import UserError
from luthier.metrics import (
    METRICS,
    Answered,
    RowLoss,
    chosen_metrics,
    measured,
    metrics_of_answers,
    names_in,
    pass_at,
    texts,
)
from luthier.metrics import texts as bootstrap
from luthier.metrics.texts import (
    by_pattern,
    calls_same_tools,
    drawn_sums,
    interval,
    is_same_json,
    makes_same_calls,
    mean_of,
    normalised,
    sums_by_row,
    words,
)
from tests.conftest import refused

PAIRS = [("The answer.", " the  ANSWER"), ("no", "yes"), ("4", "It is 4!"), ("x", "x")]


def answers(*pairs: tuple[str, str]) -> list[Answered]:
    """A row for each pair."""
    return [Answered(row=str(n), expected=one, generated=(other,)) for n, (one, other) in enumerate(pairs)]


def score(name: str, *pairs: tuple[str, str]) -> Any:
    return measured(chosen_metrics([name])[0], answers(*pairs)).get(name)


def test_metrics_of_rows_are_means_over_answers() -> None:
    chosen, _ = chosen_metrics(["exact", "normalised", "contains"])
    found: Any = measured(chosen, answers(*PAIRS))
    assert {name: told["mean"] for name, told in found.items()} == {"exact": 0.25, "normalised": 0.5, "contains": 0.75}
    assert measured(chosen, []) == {}


# --------------------------------------------------------------------------------------------------------------------
# Samples


def test_samples_of_a_row_are_told_by_their_best_and_by_the_chance_that_one_of_k_is_right() -> None:
    samples = [
        Answered(row="a", expected="x", generated=("x", "y", "y", "y")),
        Answered(row="b", expected="x", generated=("y", "y", "y", "y")),
    ]
    told: Any = measured(chosen_metrics(["exact"])[0], samples)["exact"]
    assert told["mean"] == told["pass@1"] == 0.125
    assert told["pass@2"] == pytest.approx(0.25) and told["pass@4"] == told["best"] == 0.5
    assert "best" not in score("exact", ("x", "x")), "of one sample it is the mean"


def test_samples_that_rightly_call_nothing_are_right_beside_one_that_calls() -> None:
    plain: dict[str, Any] = {"role": "assistant", "content": "Hi."}
    calls = plain | {"tool_calls": [{"function": {"name": "send", "arguments": "{}"}}]}
    one = Answered(
        row="1", expected="Hi.", generated=("Hi.",) * 4, message=plain, messages=(plain, plain, calls, plain)
    )
    asked = Answered(row="2", expected="", generated=("",) * 4, message=calls, messages=(calls, plain, plain, plain))
    silent = replace(one, row="3", messages=(plain,) * 4)
    for name in ("tool_names", "tool_calls"):
        told = measured(chosen_metrics([name])[0], [one, asked, silent])[name]
        assert told["mean"] == told["pass@1"] == 0.5 and told["pass@4"] == told["best"] == 1.0
        assert told["counted"] == 8, "of the third question no sample counts"


@pytest.mark.parametrize(("samples", "right"), [(5, 0), (5, 2), (5, 5), (8, 1)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_sample(samples: int, right: int) -> None:
    for k in range(1, samples + 1):
        chosen = list(combinations([True] * right + [False] * (samples - right), k))
        assert pass_at(k, samples, right) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_a_metric_that_is_not_of_right_and_wrong_has_no_pass_at_k() -> None:
    samples = [Answered(row="a", expected="one two", generated=("one two", "one"))]
    assert "pass@2" not in measured(chosen_metrics(["rouge1"])[0], samples)["rouge1"]


# --------------------------------------------------------------------------------------------------------------------
# Intervals


def test_an_interval_holds_the_true_mean_about_95_times_in_100() -> None:
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        values_N = generator.random(60)
        found = interval(np.stack([values_N, np.ones(60)], axis=1), [str(n) for n in range(60)], mean_of)
        assert found is not None and found[0] < values_N.mean() < found[1]
        held += found[0] <= 0.5 <= found[1]
    assert 180 <= held <= 198


def test_answers_to_one_row_are_drawn_together() -> None:
    """Ten copies of each answer say no more than one, so that their interval is as wide."""
    values_N = np.random.default_rng(0).random(30)
    once = np.stack([values_N, np.ones(30)], axis=1)
    copied, rows = np.repeat(once, 10, axis=0), [str(n // 10) for n in range(300)]
    assert interval(copied, rows, mean_of) == pytest.approx(interval(once, [str(n) for n in range(30)], mean_of))
    apart = interval(copied, [str(n) for n in range(300)], mean_of)
    assert apart is not None and apart[1] - apart[0] < 0.5 * (copied[:, 0].max() - copied[:, 0].min())


def test_draws_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = sums_by_row(np.arange(14.0).reshape(7, 2), list("aabcdef"))
    whole = drawn_sums(sums)
    monkeypatch.setattr(bootstrap, "AT_ONCE", 20)
    assert np.array_equal(drawn_sums(sums), whole) and whole.shape == (1000, 2)
    assert sums.tolist()[0] == [2.0, 4.0] and len(sums) == 6


def test_a_single_row_has_no_interval() -> None:
    assert "interval" not in score("exact", ("a", "a"))
    assert score("exact", ("a", "a"), ("a", "b"))["interval"] == [0.0, 1.0]


def test_a_single_row_that_counts_has_no_interval_beside_rows_that_do_not() -> None:
    silent = [Answered(row=f"s{n}", expected="no number", generated=("1",)) for n in range(5)]
    unasked = Answered(row="u", expected=None, generated=("1",))
    one = measured({"number": METRICS["number"]}, [Answered(row="a", expected="1", generated=("1",)), *silent, unasked])
    assert one["number"] == {"mean": 1.0, "counted": 1}
    two = [Answered(row=row, expected="1", generated=(got,)) for row, got in (("a", "1"), ("b", "2"))]
    alone, among = (measured({"number": METRICS["number"]}, [*two, *more])["number"] for more in ([], silent))
    assert among == {**alone, "counted": 2}, "rows without a say change nothing"


def test_the_interval_of_a_corpus_is_that_of_the_package_on_drawn_rows() -> None:
    """The scores that the package gives to the drawn rows themselves have the same middle."""
    sacrebleu = pytest.importorskip("sacrebleu")
    pairs = [(f"the cat {n} sat on the mat in a house", f"the cat sat on {n * 7} mats in a house") for n in range(8)]
    found = score("bleu", *pairs)
    generator = np.random.Generator(np.random.PCG64(bootstrap.SEED))
    drawn = generator.integers(8, size=(1000, 8))
    scores = [sacrebleu.corpus_bleu([pairs[n][1] for n in some], [[pairs[n][0] for n in some]]).score for some in drawn]
    assert found["interval"] == pytest.approx(np.quantile(scores, [0.025, 0.975]))
    assert found["interval"][0] < found["score"] < found["interval"][1]


def test_perplexity_is_that_of_all_targets_together() -> None:
    losses = [RowLoss(row="a", loss=1.0, targets=10), RowLoss(row="b", loss=2.0, targets=30)]
    told: Any = measured(chosen_metrics(["perplexity"])[0], [], losses)["perplexity"]
    assert told["score"] == pytest.approx(np.exp(70 / 40)) and told["signature"] == "loss:1.75|targets:40"
    assert told["interval"] == pytest.approx([np.exp(1), np.exp(2)])
    assert measured(chosen_metrics(None)[0], []) == {}


# --------------------------------------------------------------------------------------------------------------------
# Words, beside the packages


SCRIPTS = {
    "latin": ["The cat's 2 mats", "Straße, naïve café!", "un_der score", "x=1; y<2", ""],
    "cyrillic": ["Кот сидит на коврике", "Ёлка, мир и кот"],
    "han": ["猫坐在垫子上。", "东京是日本的首都", "我有2只猫 and a dog"],
    "kana": ["ネコが座る", "すし と ラーメン"],
    "thai": ["แมวนั่งบนเสื่อ", "กินข้าวแล้ว"],
    "arabic": ["القط يجلس على الحصيرة", "كَتَبَ الولد"],
    "devanagari": ["बिल्ली चटाई पर बैठी", "नमस्ते दुनिया"],
    "hangul": ["고양이가 매트에 앉았다", "안녕 세계"],
}


def some_pairs() -> Iterator[tuple[str, str]]:
    """Sentences of each script beside each other, shuffled and cut: 1,200 pairs."""
    generator = np.random.default_rng(1)
    everything = [text for texts_of in SCRIPTS.values() for text in texts_of]
    for one, other in [*product(everything, everything)] * 3:
        letters = list(other)
        cut = int(generator.integers(len(letters) + 1))
        yield one, "".join([*letters[cut:], " ", *letters[:cut]])


def test_ascii_texts_have_the_words_of_rouge_score() -> None:
    tokenizers = pytest.importorskip("rouge_score.tokenizers")
    own = tokenizers.DefaultTokenizer(use_stemmer=False)
    printable = "".join(map(chr, range(128)))
    generator = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(generator.choice(list(printable), size=int(generator.integers(40))))
        assert words(text) == own.tokenize(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's 東京.", ["it", "s", "東", "京"]),
        ("สวัสดี", ["ส", "วั", "ส", "ดี"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("cafe\u0301 CAFÉ", ["café", "café"]),
        ("می\u200cخواهم", ["میخواهم"]),
        ("abc東x", ["abc", "東", "x"]),
        ("안녕 세계", ["안녕", "세계"]),
        ("\u0301a", ["\u0301a"]),
    ],
)
def test_words_are_runs_of_letters_with_their_marks_and_single_letters_where_no_blanks_are(
    text: str, expected: list[str]
) -> None:
    assert words(text) == expected


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_rouge_in_every_script_is_that_of_rouge_score_for_the_same_words_spelt_in_ascii(kind: str) -> None:
    """Each word is replaced by a number of its own, which rouge-score's own tokenizer leaves whole."""
    scorers = pytest.importorskip("rouge_score.rouge_scorer")
    scorer, of_row = scorers.RougeScorer([kind]), METRICS[kind].of_row
    number: dict[str, str] = {}
    assert of_row is not None
    scores = []
    for one, other in some_pairs():
        spelt = [" ".join(number.setdefault(word, f"w{len(number)}") for word in words(text)) for text in (one, other)]
        scores.append(of_row(one, other))
        assert scores[-1] == pytest.approx(scorer.score(*spelt)[kind].fmeasure)
    assert 0 < np.mean(scores) < 1 and (kind == "rouge1" or min(scores) == 0)


def test_bleu_and_chrf_are_those_of_sacrebleu_with_its_signature() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    pairs = list(some_pairs())
    expected, generated = [one for one, _ in pairs], [other for _, other in pairs]
    for name, theirs in [
        ("bleu", sacrebleu.corpus_bleu(generated, [expected])),
        ("bleu:zh", sacrebleu.corpus_bleu(generated, [expected], tokenize="zh")),
        ("bleu:char", sacrebleu.corpus_bleu(generated, [expected], tokenize="char")),
        ("chrf", sacrebleu.corpus_chrf(generated, [expected])),
    ]:
        found = score(name, *pairs)
        assert found["score"] == pytest.approx(theirs.score, abs=1e-9) and 0 < theirs.score < 100
    assert "version:" in found["signature"] and "tok:zh" in score("bleu:zh", *pairs)["signature"]


def test_shares_are_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(0)
    expected, generated = generator.choice(["猫", "cat", "кот"], size=(2, 1000)).tolist()
    found = score("exact", *zip(expected, generated, strict=True))
    assert found["mean"] == pytest.approx(sklearn.accuracy_score(expected, generated))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("Straße", "STRASSE", True),
        ("ﬁn", "fin", True),
        ("“Yes.”", "yes", True),
        ("a\u00a0b\n", "a b", True),
        ("3.5", "35", False),
        ("-", "", False),
        ("?", "!", False),
        ("-5", "5", False),
        ("\u22125", "-5", True),
        ("C#", "C", False),
        (".5", "5", False),
        ("50%", "50", False),
        ("f(x)", "f(x", False),
        ("*.py", ".py", False),
        ("**Yes!**", "(yes)", True),
        ("¿Qué?", "qué", True),
        ("东京", "东京。", True),
        ("no", "on", False),
    ],
)
def test_texts_are_normalised_alike_in_every_script(one: str, other: str, equal: bool) -> None:
    assert (normalised(one) == normalised(other)) is equal


@pytest.mark.parametrize(
    "text", ["." * 60_000 + "x", "(" * 30_000 + ")" * 30_000, '"' * 60_000], ids=lambda text: text[:1]
)
def test_marks_that_a_model_repeats_without_end_are_normalised_at_once(text: str) -> None:
    begun = time.monotonic()
    assert normalised(text)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("metric", "expected", "generated", "value"),
    [
        ("contains", "...", "anything", 0),
        ("contains", "", "anything", None),
        ("contains", "-5", "x = 5", 0),
        ("contains", "Paris.", "It is Paris, I think", 1),
        ("number", "-5", "It is \u22125.", 1),
        ("number", "5", "\u22125", 0),
        ("number", "1e-5", "1e-6", 0),
        ("number", "1500", "1.5e3 m", 1),
        ("number", "1e-5", "0.00001", 1),
        ("number", "12", "12,000", 0),
        ("number", "3", "the 3rd", 1),
        ("number", "no", "3", None),
        ("choice", "A", "The answer is A because it is red", 1),
        ("choice", "A", "It is A since B is wrong. So it is A then", 1),
        ("choice", "A", "A cat", 0),
        ("choice", "A", "A cat sat on the Mat", 0),
        ("choice", "B", "So B. A cat is none.", 1),
        ("choice", "B", "So B. And I think that is it.", 1),
        ("choice", "B", "b", 1),
        ("choice", "b", "**B**", 1),
        ("choice", "B", "_B_", 1),
        ("choice", "B", "It must be (b), not (a cat)", 1),
        ("choice", "B", "the answer is b.", 1),
        ("choice", "A", "the answer is a cat", 0),
        ("choice", "C", "C++", 0),
        ("choice", "cat", "C", None),
    ],
)
def test_values_in_answers_are_found_as_people_write_them(
    metric: str, expected: str, generated: str, value: float | None
) -> None:
    of_row = METRICS[metric].of_row
    assert of_row is not None and of_row(expected, generated) == value


# --------------------------------------------------------------------------------------------------------------------
# Patterns and JSON


def test_a_pattern_compares_what_its_first_group_finds_first() -> None:
    of_row = by_pattern(r"#### (-?\d+)")
    assert of_row("so #### 42", "I think\n#### 42 and #### 7") == 1
    assert of_row("so #### 42", "#### 4") == of_row("#### 42", "42") == 0
    assert of_row("42", "#### 42") is None, "a row in which nothing is found has no say"
    assert by_pattern(r"\d+")("a 7", "b 7") == 1
    assert by_pattern("(a)|(b)")("b", "x") == 0 and by_pattern("(a)|(b)")("b", "b a") == 1


def test_rows_that_have_no_say_are_not_counted_and_the_others_are_told_by_their_number() -> None:
    found = score(r"regex:#### (-?\d+)", ("#### 1", "#### 1"), ("#### 1", "x"), ("x", "x"))
    assert (found["mean"], found["counted"]) == (0.5, 2)
    assert score(r"regex:#### (-?\d+)", ("x", "x")) is None


def test_a_pattern_that_is_none_is_refused_and_one_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UserError, "(a"):
        chosen_metrics(["regex:(a"])
    with refused(UserError, "argument"):
        chosen_metrics(["regex"])
    monkeypatch.setattr(texts, "PATTERN_SECONDS", 0.05)
    with refused(UserError, "0.05"):
        by_pattern(r"(x+x+)+y")("x" * 4000, "y")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": [1, 2]}', ' {"b":[1,2], "a":1.0}\n', True),
        ('{"a": 1}', '```json\n{"a": 1}\n```', True),
        ("[1, 2]", "[2, 1]", False),
        ('{"a": 1}', '{"a": 1, "b": 2}', False),
        ("1", "true", False),
        ("[0]", "[false]", False),
        ("0.1", "1e-1", True),
        ("9007199254740993", "9007199254740992", False),
        ('"1"', "1", False),
        ("null", "", False),
        ("null", "NaN", False),
        ('"é"', '"\\u00e9"', True),
        ("{}", "{", False),
        ("1e999999999", "1e999999998", False),
        ("1", "[" * 5000, False),
        ("1", "9" * 5000, False),
    ],
)
def test_json_is_compared_by_value(one: str, other: str, same: bool) -> None:
    assert is_same_json(one, other) == float(same)
    assert is_same_json(one, one) == 1


def test_arguments_that_are_no_json_are_the_same_as_none() -> None:
    deep, other = ({"tool_calls": [{"function": {"name": "f", "arguments": "[" * 300 + x}}]} for x in "12")
    assert calls_same_tools(deep, other) == 1 and makes_same_calls(deep, other) == 0


@pytest.mark.parametrize(
    "text", ["It is 4.", "[" * 100_000, "Infinity", "1e99999999999999999999999", "[" * 300 + "]" * 300]
)
def test_what_is_no_json_has_no_say(text: str) -> None:
    assert is_same_json(text, text) is None


# --------------------------------------------------------------------------------------------------------------------
# The table


def test_an_argument_goes_to_the_end_of_the_names() -> None:
    assert names_in("exact, regex:#### (a,b) ") == ["exact", "regex:#### (a,b) "]
    assert names_in("exact,chrf") == ["exact", "chrf"]
    with refused(UserError, "argument"):
        chosen_metrics(["exact:1"])
    with refused(UserError, "perplexity"):
        metrics_of_answers(["exact", "perplexity"])
    with refused(UserError, "tool_calls"):
        metrics_of_answers(["exact", "tool_calls"])
    with refused(UserError, "char", "zh"):
        chosen_metrics(["bleu:no_such_way"])


def test_a_metric_whose_package_is_missing_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    chosen, absent = chosen_metrics(None)
    assert set(absent) == {"bleu", "chrf", "rouge1", "rouge2", "rougeL"}
    assert {"exact", "normalised", "contains", "json"} <= chosen.keys() and "regex" not in chosen
    with refused(UserError, "bleu", "sacrebleu"):
        chosen_metrics(["exact", "bleu:zh"])
    with refused(UserError, "chrff", "chrf"):
        chosen_metrics(["chrff"])


def test_a_metric_of_ones_own_is_measured_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "_rows", dict(METRICS._rows))
    luthier.register_metric("same_length", lambda expected, generated: float(len(expected) == len(generated)))
    with pytest.raises(luthier.PluginError):
        luthier.register_metric("exact", lambda expected, generated: 1.0)
    assert score("same_length", ("ab", "cd"), ("a", "bc"))["mean"] == 0.5
    chosen, _ = chosen_metrics(["same_length"])
    METRICS._rows["same_length"] = replace(chosen["same_length"], package="no_such_package")
    with pytest.raises(UserError, match="no_such_package") as caught:
        chosen_metrics(["same_length"])
    assert caught.value.hint and METRICS.added_by("same_length") in caught.value.hint
    METRICS._rows["same_length"] = chosen["same_length"]
    luthier.register_metric(
        "longest", luthier.Metric(of_corpus=lambda one, other: luthier.CorpusScore(score=9.0, signature="mine"))
    )
    assert score("longest", ("a", "b"), ("a", "b")) == {"score": 9.0, "signature": "mine"}


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (lambda expected, generated: "good", "gives 'good', a str"),
        (lambda expected, generated: [1.0], "gives '[1.0]', a list"),
        (lambda expected, generated: 1 / 0, "failed ("),
        (luthier.Metric(of_corpus=lambda expected, generated: 1.0), "gives '1.0', a float"),  # type: ignore[arg-type, return-value]
        (luthier.Metric(of_corpus=lambda *_: luthier.CorpusScore(score=float("nan"), signature="mine")), "nan"),
        (luthier.Metric(with_argument=lambda _: luthier.Metric(of_row=lambda one, other: other)), "a str"),  # type: ignore[arg-type, return-value]
    ],
)
def test_what_is_no_number_of_a_metric_is_refused_with_its_name(
    metric: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METRICS, "_rows", dict(METRICS._rows))
    monkeypatch.setattr(METRICS, "_added_by", {})
    luthier.register_metric("mine", metric)
    with refused(luthier.PluginError, "the metric 'mine' of this program", told):
        score("mine:x" if isinstance(metric, luthier.Metric) and metric.with_argument else "mine", ("a", "b"))


def test_numbers_of_other_libraries_and_no_say_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "_rows", dict(METRICS._rows))
    given = iter([np.float32(0.5), True, None])
    luthier.register_metric("mine", lambda expected, generated: next(given))
    assert score("mine", ("a", "b"), ("c", "d"), ("e", "f"))["mean"] == 0.75
