from io import StringIO

from rich.console import Console

from luthier.cli import RateMeter, describe, preparing
from luthier.preparation.resolver import Progress


def report(read, *, tokens=0, share=None, split="train", lost=0):
    return Progress(
        split=split, source="a", read=read, encoded=read - lost, reused=0, lost=lost, num_tokens=tokens, share=share
    )


def test_rates_are_those_of_the_last_seconds():
    meter = RateMeter()
    meter.add(report(1), 0.0)
    assert meter.rates() == ""
    for second in range(1, 30):
        meter.add(report(1 + 100 * max(0, second - 15), tokens=150_000 * max(0, second - 15)), float(second))
    assert meter.rates() == "100 rows/s, 150.0k tokens/s"


def test_rows_from_the_store_have_no_rate_of_tokens():
    meter = RateMeter()
    meter.add(report(0), 0.0)
    meter.add(report(5_000), 2.0)
    assert meter.rates() == "2,500 rows/s"


def test_a_terminal_is_shown_rows_losses_rates_and_time_left():
    console = Console(file=StringIO(), force_terminal=True, width=140)
    with preparing(console, wanted=True) as show:
        show(report(10, tokens=100, share=0.1))
        show(report(1_000, tokens=2_000_000, share=0.5, lost=3))
        show(report(7, split="eval"))
    shown = console.file.getvalue()
    assert "preparing eval: 7 rows" in shown
    assert describe(report(1_000, lost=3)) == "preparing train: 1,000 rows, 997 encoded, 3 lost"


def test_nothing_is_shown_where_nobody_looks_on():
    for terminal, wanted in ((False, True), (True, False)):
        console = Console(file=StringIO(), force_terminal=terminal)
        with preparing(console, wanted=wanted) as show:
            show(report(10))
        assert console.file.getvalue() == ""
