"""What metrics say of two texts (equal, alike, one inside the other, of the same words, of the same value), and how
sure a score of many is.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

import numpy as np
import regex  # which knows scripts, and can be told how long it may search
from numpy.typing import NDArray

from luthier.errors import UserError

# ----------------------------------------------------------------------------------------------------------------------
# Intervals of scores by drawing rows again: the percentile bootstrap (Efron 1979). G rows, S sums, R draws.
#
# A score of many answers is a function of sums over rows: a mean is that of (sum of values, their number), BLEU that of
# its counts of n-grams. Drawing G rows with replacement gives other sums, and so another score; the middle 95 % of such
# scores are the interval. The same seed draws the same rows, so that two models' scores can be subtracted draw by draw.


DRAWS, LEVEL, SEED = 1000, 0.95, 0
MOST_EXACT, SWAPS = 12, 4000
AT_ONCE = 2**22  # counts of drawn rows in memory at once, 32 MiB
Sums = NDArray[np.float64]
ScoreOf = Callable[[Sums], float]


def sums_by_row(parts_NS: Sums, rows: Sequence[str]) -> Sums:
    """Sums over the answers of each row, float64[G, S], since answers to one row are not independent of each other.

    ``[[1, 1], [0, 1], [1, 1]], ["a", "a", "b"] -> [[1, 2], [1, 1]]``
    """
    number_of = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    sums_GS = np.zeros((len(number_of), parts_NS.shape[1]))
    np.add.at(sums_GS, [number_of[row] for row in rows], parts_NS)
    return sums_GS


def drawn_sums(sums_GS: Sums) -> Sums:
    """The sums of G rows drawn with replacement, float64[R, S]; the same rows for the same G."""
    generator, size = np.random.Generator(np.random.PCG64(SEED)), len(sums_GS)
    found: list[Sums] = []
    at_once = max(1, AT_ONCE // size)
    for start in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - start)
        drawn_RG = generator.integers(size, size=(count, size))
        cells = (drawn_RG + size * np.arange(count)[:, None]).ravel()
        times_RG = np.bincount(cells, minlength=count * size).reshape(count, size)
        found.append(times_RG.astype(np.float64) @ sums_GS)
    return np.concatenate(found)


def middle(scores_R: Sums) -> tuple[float, float] | None:
    """The ends of the middle `LEVEL` of scores; those that are no number (nothing was counted) are left out."""
    numbers = scores_R[np.isfinite(scores_R)]
    if not len(numbers):
        return None
    low, high = np.quantile(numbers, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def interval(parts_NS: Sums, rows: Sequence[str], score_of: ScoreOf) -> tuple[float, float] | None:
    """The 95 % interval of ``score_of(sums)`` over rows; None for a single row, of which nothing can be said."""
    sums_GS = sums_by_row(parts_NS, rows)
    if len(sums_GS) < 2:
        return None
    return middle(np.array([score_of(sums) for sums in drawn_sums(sums_GS)]))


def paired(sums_a_GS: Sums, sums_b_GS: Sums, score_of: ScoreOf) -> tuple[tuple[float, float] | None, float]:
    """Of two models' sums over the same rows: the 95 % interval of B's score minus A's, and the chance of a difference
    at least as large if the two were alike.

    The chance is that of a permutation test (approximate randomisation, Noreen 1989): for each row the two models'
    answers change places or do not. Of up to `MOST_EXACT` rows all ways are tried, of more `SWAPS`.
    """
    size, drawn = sums_a_GS.shape[1], drawn_sums(np.concatenate([sums_a_GS, sums_b_GS], axis=1))
    differences = np.array([score_of(sums[size:]) - score_of(sums[:size]) for sums in drawn])
    whole_a, whole_b = sums_a_GS.sum(axis=0), sums_b_GS.sum(axis=0)
    seen = abs(score_of(whole_b) - score_of(whole_a)) * (1 - 1e-9)  # rounding makes no difference
    moved_RS = _moved(sums_b_GS - sums_a_GS)
    as_large = sum(abs(score_of(whole_b - moved) - score_of(whole_a + moved)) >= seen for moved in moved_RS)
    is_exact = len(sums_a_GS) <= MOST_EXACT
    chance = as_large / len(moved_RS) if is_exact else (as_large + 1) / (len(moved_RS) + 1)
    return middle(differences) if len(sums_a_GS) > 1 else None, float(chance)


def _moved(differences_GS: Sums) -> Sums:
    """What changes places in all when some rows do, float64[R, S]."""
    rows = len(differences_GS)
    if rows <= MOST_EXACT:
        ways_RG = (np.arange(2**rows)[:, None] >> np.arange(rows)) & 1
        return ways_RG.astype(np.float64) @ differences_GS
    generator, found = np.random.Generator(np.random.PCG64(SEED)), list[Sums]()
    at_once = max(1, AT_ONCE // rows)
    for start in range(0, SWAPS, at_once):
        ways_RG = generator.integers(2, size=(min(at_once, SWAPS - start), rows))
        found.append(ways_RG.astype(np.float64) @ differences_GS)
    return np.concatenate(found)


def mean_of(sums_S: Sums) -> float:
    """``(sum, count) -> sum / count``; no number where nothing was counted."""
    return float(sums_S[0] / sums_S[1]) if sums_S[1] else float("nan")


# ----------------------------------------------------------------------------------------------------------------------
# Two texts.


PATTERN_SECONDS = 2.0  # a pattern that needs longer for one text has no end
OfRow = Callable[[str, str], float | None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorpusScore:
    """A score of all answers together. ``signature`` says how it was computed, for others to compute the same.

    ``parts_NS``, float64[N, S], are what each answer adds to the sums that ``score_of`` makes the score of; with them
    the score has an interval.
    """

    score: float
    signature: str
    parts_NS: Sums | None = None
    score_of: ScoreOf | None = None


_ENDS_A_SENTENCE = regex.compile(r"[\p{Terminal_Punctuation}\s]")
_PAIRS = {"(": ")", "[": "]", "{": "}", "*": "*", "`": "`", "「": "」", "『": "』", "《": "》", "【": "】"}
_QUOTES = "\"'“”„‟‘’‚‛«»‹›"


def normalised(text: str) -> str:
    """``' "The  Answer." ' -> 'the answer'``: Unicode NFKC, case folded, white space as one blank, without marks that
    end a sentence or enclose the whole (quotes, brackets, ``**``). Other signs stay: ``-5``, ``c#``, ``.5``; so does a
    text of such marks alone."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-").split())
    start, end = 0, len(words)
    while True:
        before = start, end
        while end > start and _ENDS_A_SENTENCE.match(words, end - 1):
            end -= 1
        while start < end and words[start] in "¿¡ ":
            start += 1
        if end - start > 2:
            first, last = words[start], words[end - 1]
            if _PAIRS.get(first) == last or (first in _QUOTES and last in _QUOTES):
                start, end = start + 1, end - 1
        if (start, end) == before:
            return words[start:end] or words


def is_exact(expected: str, generated: str) -> float:
    return float(expected == generated)


def is_alike(expected: str, generated: str) -> float:
    """As `normalised` texts."""
    return float(normalised(expected) == normalised(generated))


def is_contained(expected: str, generated: str) -> float | None:
    """Whether the expected text is in the generated one, both `normalised`. An empty text has no say."""
    wanted = normalised(expected)
    return float(wanted in normalised(generated)) if wanted else None


_NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400}|(?=\.\d))(?:\.\d{1,400})?(?:[eE][-+]?\d{1,3}(?!\d))?"
)
_MINUS = str.maketrans("\u2212\ufe63\uff0d", "---")  # signs that look like a hyphen
_CHOICE = re.compile(r"(?<![\w'’])([A-Ja-j])(?![\w'’+#]|-\w)")  # of I'm and C++, none
_CHOICE_ALONE = re.compile(r"(?:[^\w+#]|_)*([A-J])(?:[^\w+#]|_)*", re.IGNORECASE)
_CHOOSING = re.compile(  # what stands before a letter that is chosen: "the answer is", "Option", "choice:"
    r"\b(?:answer|option|choice|letter)\b(?:\s+(?:is|would\s+be))?[\s:*_\"'“‘(\[$]*\Z", re.IGNORECASE
)
_IS = re.compile(r"\b(?:is|choose|chose|pick|select)[\s*_\"'“‘(\[$]*\Z", re.IGNORECASE)


def last_number(text: str) -> Decimal | None:
    """``"Of 1,200 there are 72.50 left." -> 72.5``, ``"1.5e3" -> 1500``, ``"\u22125" -> -5``; None without one. A comma
    between digits parts thousands."""
    found = [match[0] for match in _NUMBER.finditer(text.translate(_MINUS))]
    return Decimal(found[-1].replace(",", "")) if found else None


def is_same_number(expected: str, generated: str) -> float | None:
    """Whether the last numbers of both are equal. An expected text without a number has no say."""
    wanted = last_number(expected)
    return None if wanted is None else float(wanted == last_number(generated))


def is_same_choice(expected: str, generated: str) -> float | None:
    """Whether the generated text chooses the expected letter, from A to J: it is that letter, or the last such letter
    in it that stands alone (``"So it is (b)."``, ``"The answer is A because …"``; the article in ``"A cat"`` does not).
    A small letter in a text is one in brackets, or behind words like ``answer is``. An expected text that is no single
    letter has no say."""
    wanted = _CHOICE_ALONE.fullmatch(expected.strip())
    if wanted is None:
        return None
    alone = _CHOICE_ALONE.fullmatch(generated.strip())
    letters = [alone] if alone else [match for match in _CHOICE.finditer(generated) if _is_chosen(match)]
    return float(bool(letters) and letters[-1][1].upper() == wanted[1].upper())


def _is_chosen(letter: re.Match[str]) -> bool:
    """``(a)``, ``B``, ``the answer is A because``; not ``a cat``, ``A cat``, ``I think``."""
    text, before = letter.string, letter.string[max(0, letter.start() - 40) : letter.start()]
    behind = text[letter.end() : letter.end() + 2]
    is_chosen, is_word = _CHOOSING.search(before) is not None, behind[:1] == " " and behind[1:].islower()
    if letter[1].islower():
        return (before[-1:] == "(" and behind[:1] == ")") or (is_chosen and not is_word)
    if letter[1] == "A":
        return not is_word or is_chosen or _IS.search(before) is not None
    return letter[1] != "I" or not is_word or is_chosen


# --------------------------------------------------------------------------------------------------------------------
# Words


# Scripts that put no blanks between words; the sign for a long vowel belongs to two of them.
_UNSPACED = (
    r"[[\p{L}\p{N}]&&[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Bopomofo}\p{Yi}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tai_Le}"
    r"\p{New_Tai_Lue}\p{Tai_Tham}\p{Tai_Viet}\p{Javanese}\p{Balinese}\p{Tibetan}]]"
)
_UNSPACED_LETTER = regex.compile(rf"(?V1){_UNSPACED}")
_WORD = regex.compile(rf"(?V1){_UNSPACED}\p{{M}}*|[[\p{{L}}\p{{N}}\p{{M}}]--{_UNSPACED}]+")
_ASCII_WORD = re.compile("[a-z0-9]+")
_UNSEEN = regex.compile(r"\p{Cf}+")  # joiners inside of words


def words(text: str) -> list[str]:
    """Lower-case runs of letters, marks and digits; in scripts without blanks between words each letter with its marks.

    ``"It's 東京." -> ["it", "s", "東", "京"]``. Of ASCII text these are the words of the package rouge-score.
    """
    if text.isascii():  # the same, sooner
        return _ASCII_WORD.findall(text.lower())
    found: list[str] = _WORD.findall(_UNSEEN.sub("", unicodedata.normalize("NFKC", text).casefold()))
    return found


def is_unspaced(letter: str) -> bool:
    """Whether a letter is of a script that puts no blanks between words."""
    return _UNSPACED_LETTER.fullmatch(letter) is not None


class _Splitter:
    """`words` as rouge-score asks for them."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


def rouge(kind: str) -> OfRow:
    """ROUGE of one kind (``rougeL``), the F-measure of the package rouge-score over `words`, without stemming."""

    @cache
    def scorer() -> Any:
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer([kind], tokenizer=_Splitter())

    def of_row(expected: str, generated: str) -> float:
        return float(scorer().score(expected, generated)[kind].fmeasure)

    return of_row


def bleu(expected: Sequence[str], generated: Sequence[str], tokenize: str | None = None) -> CorpusScore:
    """BLEU by sacrebleu, with one of its ways to find words: ``13a`` (its default), ``zh``, ``char``, ``intl`` …

    Raises `UserError` for a way that it does not know.
    """
    from sacrebleu.metrics.bleu import BLEU

    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"sacrebleu finds no words by {tokenize!r}", hint=f"choose one of {', '.join(BLEU.TOKENIZERS)}")
    return _of_sacrebleu(BLEU(tokenize=tokenize), expected, generated)


def chrf(expected: Sequence[str], generated: Sequence[str]) -> CorpusScore:
    """chrF by sacrebleu."""
    from sacrebleu.metrics.chrf import CHRF

    return _of_sacrebleu(CHRF(), expected, generated)


def _of_sacrebleu(metric: Any, expected: Sequence[str], generated: Sequence[str]) -> CorpusScore:
    """The score with what each answer adds to it: as sacrebleu's own significance tests do it."""
    parts_NS = np.array(metric._extract_corpus_statistics(list(generated), [list(expected)]), dtype=np.float64)

    def score_of(sums_S: Sums) -> float:
        return float(metric._compute_score_from_stats(sums_S.tolist()).score)

    return CorpusScore(
        score=score_of(parts_NS.sum(axis=0)),
        signature=str(metric.get_signature()),
        parts_NS=parts_NS,
        score_of=score_of,
    )


# --------------------------------------------------------------------------------------------------------------------
# Parts of texts, and values


def by_pattern(pattern: str) -> OfRow:
    """Whether what a pattern finds first is the same in both texts: its first group that matched, or all without one.

    ``#### (-?\\d+)`` compares the final answers of GSM8K. An expected text in which nothing is found has no say.

    Raises `UserError` for a pattern that is none, and for one that needs more than `PATTERN_SECONDS` for a text.
    """
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise UserError(f"regex:{pattern} is no pattern: {error}", hint="write a Python regular expression") from error

    def found(text: str) -> str | None:
        try:
            match = compiled.search(text, timeout=PATTERN_SECONDS)
        except TimeoutError as error:
            what = f"regex:{pattern} needs more than {PATTERN_SECONDS:g} s for a text of {len(text):,} letters"
            hint = "write it without nested repetitions; answers are kept, and the same command measures them anew"
            raise UserError(what, hint=hint) from error
        return None if match is None else next((group for group in match.groups() if group is not None), match[0])

    def of_row(expected: str, generated: str) -> float | None:
        wanted = found(expected)
        return None if wanted is None else float(found(generated) == wanted)

    return of_row


_FENCE = re.compile(r"\s*```(?:json|JSON)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
_NO_JSON = object()


def is_same_json(expected: str, generated: str) -> float | None:
    """Whether both are the same JSON value, whatever the order of keys: numbers by their value, and ``true`` is not 1.

    A text may stand in a Markdown fence. An expected text that is no JSON has no say.
    """
    wanted = _value(expected)
    return None if wanted is _NO_JSON else float(same_value(wanted, _value(generated)))


def same_value(one: object, other: object) -> bool:
    """Whether two JSON values are the same; numbers are compared by value, and never with booleans. What is no JSON is
    never the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    numbers = (int, float, Decimal)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return one == other
    return one is not _NO_JSON and type(one) is type(other) and one == other


def calls_same_tools(expected: Mapping[str, object], generated: Mapping[str, object]) -> float | None:
    """Whether two messages call tools of the same names in the same order. Two that call none have no say."""
    wanted, found = _calls(expected), _calls(generated)
    return None if not wanted and not found else float([name for name, _ in wanted] == [name for name, _ in found])


def makes_same_calls(expected: Mapping[str, object], generated: Mapping[str, object]) -> float | None:
    """The same with the same arguments, which are compared as JSON values."""
    if (named := calls_same_tools(expected, generated)) is None:
        return None
    pairs = zip(_calls(expected), _calls(generated), strict=False)
    return float(bool(named) and all(same_value(_value(a), _value(b)) for (_, a), (_, b) in pairs))


def _calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The name and the arguments of each call."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


MOST_NESTED = 200  # levels of a JSON value; deeper ones are taken for no JSON


def _value(text: str) -> object:
    fenced = _FENCE.fullmatch(text)
    inner = text if fenced is None else fenced[1]
    try:
        value = json.loads(inner, parse_float=Decimal, parse_int=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError, InvalidOperation):
        return _NO_JSON
    return value if _depth_is_under(value, MOST_NESTED) else _NO_JSON


def _depth_is_under(value: object, limit: int) -> bool:
    level: list[object] = [value]
    while level and limit:
        limit -= 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return not level


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
