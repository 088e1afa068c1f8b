"""What is said where more rows are lost than a run allows, or all of them."""

from __future__ import annotations

import pytest

from luthier.errors import BudgetError, RowDropped, RowError
from luthier.ledger import Ledger


def lost(kept: int, *errors: RowError) -> BudgetError:
    ledger = Ledger()
    for _ in range(kept):
        ledger.keep()
    for error in errors:
        ledger.lose(error)
    with pytest.raises(BudgetError) as caught:
        ledger.check(max_drop=0.05)
    assert caught.value.hint
    return caught.value


OBJECTIVE = RowError("objective", "a row of kind conversation: train it with objective sft")
TOO_LONG = RowDropped("too_long", "90 tokens, data.max_length is 64")


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (OBJECTIVE, "objective"),
        (TOO_LONG, "data.max_length"),
        (RowError("missing_column", "format alpaca needs 'output'"), "columns"),
        (RowError("bad_json", "line ends in a text"), "docs/errors.md"),
    ],
)
def test_where_no_row_is_left_the_reason_comes_first_and_no_more_may_be_lost(error: RowError, way_out: str) -> None:
    found = lost(0, *[error] * 60)
    assert found.message.startswith("all 60 rows are lost for one reason: ") and str(error) in found.message
    assert found.key != "data.max_drop"
    assert way_out in (found.hint or "") and "max_drop" not in str(found)


def test_of_several_reasons_the_most_frequent_is_led_out_of() -> None:
    found = lost(0, OBJECTIVE, TOO_LONG, TOO_LONG)
    assert "2 too_long, 1 objective" in found.message and "data.max_length" in (found.hint or "")
    assert "max_drop" not in str(found)


def test_where_rows_are_left_more_may_be_lost() -> None:
    found = lost(1, TOO_LONG)
    assert "1 of 2 rows are lost" in found.message
    assert "data.max_length" in (found.hint or "") and "data.max_drop" in (found.hint or "")
