"""One row and its sample: everything that is checked of the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from luthier.check.verify_expected import ExpectedRow, expected_document, expected_row
from luthier.check.verify_learned import Home, Runs, find_home, supplied_faults, turn_faults
from luthier.check.verify_records import Check, Method, RowVerdict, Violation
from luthier.check.verify_runs import asked_besides, besides_faults, run_faults, whole_text_faults
from luthier.check.verify_server import TokenServer
from luthier.check.verify_structure import begin_faults, token_faults, tree_faults
from luthier.check.verify_tokens import ReferenceTokenizer, first_difference
from luthier.encoding.encoder import Encoder
from luthier.records import Conversation, Document, Feedback, Preference, Row, Sample

ALWAYS = (Check.HAS_TARGETS, Check.FINITE_WEIGHTS, Check.IDS_IN_VOCABULARY, Check.BRANCHES)
OF_TURNS = (Check.PROMPT_TOKENS, Check.COMPLETION_TOKENS)


def verify_row(row: Row, sample: Sample, encoder: Encoder) -> list[Violation]:
    """What is not true of a row's sample, given the run's encoder (of which only files and options are used).

    It loads the tokenizer anew; for many rows keep a `RowVerifier`.
    """
    return list(RowVerifier(encoder).verify(row, sample).violations)


class RowVerifier:
    """Recomputes rows with plain renders and whole encodes, and compares samples with them."""

    def __init__(self, encoder: Encoder, *, server: TokenServer | None = None) -> None:
        """Of ``encoder`` the tokenizer's files, the template and the options are used, never what it encodes.

        With a ``server``, each turn's context is also compared with the tokens that the server makes of it.
        """
        self.server = server
        self.tokenizer = ReferenceTokenizer(encoder.tokenizer)
        self.template = encoder.tokenizer.template
        self.kwargs = encoder.options.kwargs
        self.policy = encoder.renderer.policy

    def expected(self, row: Row) -> ExpectedRow | None:
        """What the row's sample should hold; None for kinds of row that are not recomputed.

        Raises `RowError` if the template refuses the row.
        """
        match row:
            case Conversation():
                assert self.template is not None, "a conversation has a sample, so there is a template"
                return expected_row(row, self.template, self.tokenizer, self.policy)
            case Document():
                return expected_document(row, self.tokenizer, self.policy)
            case Preference() | Feedback():
                return None
            case _:
                raise AssertionError(f"unknown kind of row {row!r}")

    def verify(self, row: Row, sample: Sample) -> RowVerdict:
        """Compare a sample with its row. Raises `RowError` if the template refuses the row."""
        faults = list(tree_faults(sample))
        if faults:
            return RowVerdict(
                method=Method.STRUCTURE_ONLY, applied=frozenset([Check.BRANCHES]), violations=tuple(faults)
            )
        faults += token_faults(sample, self.tokenizer)
        expected = self.expected(row)
        runs = Runs(
            segments=sample.segments(),
            address=str(row.address),
            tokenizer=self.tokenizer,
            loosely=expected is not None and expected.method is Method.READ_BY_TEMPLATE,
        )
        applied, notes = set(ALWAYS), Counter[str]()
        if expected is not None:
            faults += self._against(expected, sample, runs, applied, notes)
        return RowVerdict(
            method=Method.STRUCTURE_ONLY if expected is None else expected.method,
            applied=frozenset(applied),
            violations=tuple(faults),
            num_turns=0 if expected is None else len(expected.turns),
            num_targets=int(sample.target.sum()),
            longest_run=max(len(segment) for segment in runs.segments),
            control_strings={} if expected is None else expected.control_strings,
            notes=notes,
        )

    def _against(
        self, expected: ExpectedRow, sample: Sample, runs: Runs, applied: set[Check], notes: Counter[str]
    ) -> list[Violation]:
        faults: list[Violation] = []
        train_stop = self.policy.train_stop or expected.neutral is None
        homes = [find_home(turn, runs) for turn in expected.turns]
        for index in expected.not_reproduced:
            what = "no generation prompt is how this turn begins, so inference never shows this context"
            faults.append(runs.fault(Check.PROMPT_TOKENS, what, message=index))
        for turn, home in zip(expected.turns, homes, strict=True):
            faults += turn_faults(turn, home, runs, train_stop=train_stop)
        if expected.turns or expected.not_reproduced:
            applied.update(OF_TURNS)
        if any(turn.policy.learned for turn in expected.turns):
            applied.update([Check.STOP_TRAINED, Check.ANSWER_DECODES])
        besides = asked_besides(expected, runs, self.template)
        faults += besides_faults(expected, runs, besides)
        if besides.masks is not None:
            applied.add(Check.NOTHING_SUPPLIED_TRAINED)
            faults += supplied_faults(expected.turns, homes, runs, besides.masks)
        applied.update([Check.NO_FORGED_CONTROL, Check.DECODES])
        faults += run_faults(expected, runs)
        if self.tokenizer.bos_id is not None:
            applied.add(Check.SINGLE_BOS)
            opening = bool(len(expected.text_ids)) and int(expected.text_ids[0]) == self.tokenizer.bos_id
            faults += begin_faults(sample, opening, self.tokenizer)
        if expected.method is Method.WHOLE and expected.turns:
            applied.add(Check.HUGGING_FACE)
            for found in whole_text_faults(expected, homes, runs):
                if isinstance(found, Violation):
                    faults.append(found)
                else:
                    notes[found] += 1
        if self.server is not None and expected.neutral is not None:
            if expected.method is Method.WHOLE:
                applied.add(Check.SERVED_TOKENS)
                faults += self._served(self.server, expected, homes, runs, notes)
            else:  # a server cannot tell the row's control strings from the template's
                notes["not_asked"] += 1
        return faults

    def _served(
        self, server: TokenServer, expected: ExpectedRow, homes: Sequence[Home], runs: Runs, notes: Counter[str]
    ) -> Iterator[Violation]:
        neutral = expected.neutral
        assert neutral is not None, "a conversation"
        for turn, home in zip(expected.turns, homes, strict=True):
            kwargs = {**self.kwargs, **turn.kwargs}
            served = server.prompt_ids(neutral.messages[: turn.message], neutral.tools, kwargs)
            notes["prompts_asked"] += 1
            ours = runs.segments[home.run].input_ids[: len(turn.prompt)]
            if not np.array_equal(served, ours):
                index = first_difference(served, ours)
                what = f"the server's prompt has {len(served)} tokens, training's {len(ours)}; token {index} differs"
                yield runs.fault(
                    Check.SERVED_TOKENS, what, message=turn.message, run=home.run, index=index, expected=served
                )
