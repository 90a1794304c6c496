"""Some rows of the kill table of `hosts_chaos.py`, which has sixty."""

from pathlib import Path

import pytest

from tests.end_to_end.hosts_chaos import Case, Plan, hosts_chaos, kill_table
from tests.support.moments import MOMENTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("cases", "steps"),
    [
        ([Case("KILL", "worker", "commit"), Case("TERM", "worker", "evaluation")], 28),
        pytest.param([case for case in kill_table() if case.hosts == 3], 120, marks=pytest.mark.nightly),
    ],
    ids=["two-hosts", "three-hosts"],
)
def test_interrupted_hosts_lose_nothing(cases: list[Case], steps: int, tmp_path: Path) -> None:
    lines: list[str] = []
    tally = hosts_chaos(Plan(cases=cases, folder=tmp_path, steps=steps), lines.append)
    output = "\n".join([*lines, *tally.table()])
    assert tally.hits == len(cases), output
    assert not tally.bad, output


def test_kill_table_is_complete() -> None:
    table = kill_table()
    assert len(set(table)) == len(table) == 60
    assert len({(case.signal, case.target, case.moment) for case in table}) == 45
    for signal in ("TERM", "KILL", "STOP"):
        assert {case.moment for case in table if case.hosts == 3 and case.signal == signal} == set(MOMENTS)
