"""Where a rewind goes back to, what it skips, and that tries are bounded."""

import pytest

from tasks.foundation.contracts.log_entry import Commit, Rewind
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import BlowUp, NonFinite, StaleWriter
from tasks.foundation.runlog.commits import commit, rewind
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tests.support.small_logs import begin, head_of, stage, train

SPEC = RunSpec.model_validate(
    {
        "run": "r",
        "storage": "memory://r",
        "data": {"source": "digits"},
        "model": "model.py:build_model",
        "train": {"steps": 99, "global_batch_size": 1, "rewind_skip_batches": 5, "rewind_tries": 3},
    }
)


def blown_up(log: RunLog, step: int) -> tuple[int, int, int]:
    """A blow-up at a step: where it leads, what it skips, and how many batches are skipped in all."""
    fault = NonFinite(f"NaN at step {step}", step=step)
    entry = rewind(log, fault, base=head_of(log).base, spec=SPEC, attempt="a")
    assert isinstance(entry.body, Rewind)
    return entry.body.to.step, entry.body.skip_batches, entry.head.skipped_batches


def commit_within(log: RunLog, step: int) -> None:
    head = head_of(log)
    staged = stage(log.home, step, head.base, "w")
    assert head.tip is not None
    commit(log, Commit(checkpoint=staged, parent=head.tip.path, exit_reason="interval"))


@pytest.fixture
def log(store: Storage) -> RunLog:
    log = begin(store)
    for step in (10, 20, 30):
        train(log, step)
    return log


def test_back_to_the_newest_border_and_past_what_led_to_the_blow_up(log: RunLog) -> None:
    commit_within(log, 33)
    assert blown_up(log, 35) == (30, 5 + 5, 10)
    assert [ref.step for ref in head_of(log).retained] == [0, 10, 20, 30]


def test_a_border_at_the_blow_up_itself_is_no_way_back(log: RunLog) -> None:
    assert blown_up(log, 30) == (20, 10 + 5, 15)


def test_each_further_try_goes_further_back_and_tries_are_bounded(log: RunLog) -> None:
    assert blown_up(log, 35) == (30, 10, 10)
    assert blown_up(log, 34) == (20, 19, 29)
    assert blown_up(log, 32) == (10, 27, 56)
    before = head_of(log)
    with pytest.raises(NonFinite, match=r"3 rewinds in a row have not got past it \(train.rewind_tries\)") as told:
        blown_up(log, 31)
    assert told.value.step == 31
    assert head_of(log) == before


def test_getting_past_it_begins_the_count_anew(log: RunLog) -> None:
    blown_up(log, 35)
    train(log, 40)
    assert blown_up(log, 45) == (40, 10, 20)
    assert head_of(log).rewinds == 1


def test_without_a_border_before_it_the_run_stops(store: Storage) -> None:
    log = begin(store)
    with pytest.raises(BlowUp, match="no checkpoint on a segment border before it is retained"):
        rewind(log, BlowUp("loss", step=0), base=1, spec=SPEC, attempt="a")


def test_whoever_was_overtaken_does_not_rewind(log: RunLog) -> None:
    base = head_of(log).base
    train(log, 40)
    before = head_of(log)
    with pytest.raises(StaleWriter):
        rewind(log, NonFinite("NaN", step=35), base=base, spec=SPEC, attempt="z")
    assert head_of(log) == before
