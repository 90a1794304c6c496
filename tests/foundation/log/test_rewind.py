"""The checkpoint that a rewind returns to, the batches it skips, and the limit of tries."""

import pytest

from baton.tasks.foundation.contracts.log_entry import Commit, Rewind
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp, NonFinite, StaleWriter
from baton.tasks.foundation.log.appends import commit, rewind
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
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
    """Rewind after a blow-up at `step`; return the tip's step, the batches to skip, and all skipped batches."""
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


def test_rewinds_to_newest_border_and_skips_batches(log: RunLog) -> None:
    commit_within(log, 33)
    assert blown_up(log, 35) == (30, 5 + 5, 10)
    assert [ref.step for ref in head_of(log).retained] == [0, 10, 20, 30]


def test_border_at_blow_up_is_not_used(log: RunLog) -> None:
    assert blown_up(log, 30) == (20, 10 + 5, 15)


def test_each_rewind_goes_further_back_up_to_limit(log: RunLog) -> None:
    assert blown_up(log, 35) == (30, 10, 10)
    assert blown_up(log, 34) == (20, 19, 29)
    assert blown_up(log, 32) == (10, 27, 56)
    before = head_of(log)
    with pytest.raises(NonFinite, match=r"3 rewinds in a row have not got past it \(train.rewind_tries\)") as error:
        blown_up(log, 31)
    assert error.value.step == 31
    assert head_of(log) == before


def test_passing_blow_up_resets_the_count(log: RunLog) -> None:
    blown_up(log, 35)
    train(log, 40)
    assert blown_up(log, 45) == (40, 10, 20)
    assert head_of(log).rewinds == 1


def test_no_earlier_border_stops_the_run(store: Storage) -> None:
    log = begin(store)
    with pytest.raises(BlowUp, match="no checkpoint on a segment border before it is retained"):
        rewind(log, BlowUp("loss", step=0), base=1, spec=SPEC, attempt="a")


def test_stale_writer_does_not_rewind(log: RunLog) -> None:
    base = head_of(log).base
    train(log, 40)
    before = head_of(log)
    with pytest.raises(StaleWriter):
        rewind(log, NonFinite("NaN", step=35), base=base, spec=SPEC, attempt="z")
    assert head_of(log) == before
