"""The settings of an execution that come from the log, not from the run file."""

from pathlib import Path

import pytest

from flows.auditing.scratch import logged_settings
from flows.auditing.stretches import Stretch, stretches_of
from tasks.foundation.contracts.run_file import load_run_file
from tests.support.fake_run import FakeRun


def stretch_with(run: FakeRun, rows: tuple[int, ...]) -> Stretch:
    (found,) = stretches_of(run.log.entries()).auditable[-1:]
    return Stretch(start=found.start, before=found.before, commits=found.commits, rows=rows)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ((20, 40), ("train.log_every_steps=20",)),
        ((10, 20, 30, 40), ()),  # as the run file says
        ((20,), ()),  # 20, or the last one before a longer distance: too few rows to tell
        ((), ()),
        ((5, 10, 20), ()),  # it changed on the way
    ],
)
def test_distance_of_rows_is_that_of_the_log(tmp_path: Path, rows: tuple[int, ...], settings: tuple[str, ...]) -> None:
    run = FakeRun(tmp_path).train(40)
    spec = load_run_file(run.run_file(), ["train.log_every_steps=10"]).spec
    assert logged_settings(spec, stretch_with(run, rows)) == settings


def test_rows_of_a_stretch_come_from_its_commits(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(10, 20)
    assert [each.rows for each in stretches_of(run.log.entries()).auditable] == [(10,), (20,)]
