"""One interruption of each kind of `chaos.py`, which makes hundreds, and some kills within a commit."""

from pathlib import Path

import pytest

from tests.end_to_end.chaos import Plan, chaos
from tests.support.chaos_tally import Tally
from tests.support.interruptions import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_every_kind_of_interruption_loses_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    plan = Plan(seed=7, training=len(KINDS), moments=6, lanes=1, runs=("digits",), folder=tmp_path)
    tally = chaos(plan, lines.append)
    output = "\n".join([*lines, *tally.table()])
    assert tally.hits == len(KINDS) + 6, output
    assert not tally.bad, output
    assert tally.rows["SIGKILL at a call"].in_flight > 0, output
    assert tally.rows.keys() == {*KINDS, "SIGKILL at a call"}, output


def test_tally_reports_every_fault() -> None:
    tally = Tally(lambda _: None)
    for kind in ("one", "other"):
        with tally.row(kind) as row:
            row.hit += 1
    assert not tally.bad
    for name in ("lost", "gaps", "wrong", "differ", "other"):
        with tally.row("one") as row:
            setattr(row, name, 2)
        assert tally.bad
        assert tally.table()[-1].split()[:2] == ["all", "2"]
        assert "2" in tally.table()[-1].split()[2:]
        with tally.row("one") as row:
            setattr(row, name, 0)
    with tally.row("one") as row:
        row.missed = 5
    assert not tally.bad
