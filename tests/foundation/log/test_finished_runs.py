"""A run that callbacks finished stays finished until its tip moves or its callbacks change."""

import pytest

from baton.tasks.foundation.contracts.identity import CALLBACKS
from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Change,
    Entry,
    Finish,
    Finished,
    Head,
    Quarantine,
    Retire,
    Rewind,
)
from baton.tasks.foundation.errors import StaleWriter
from baton.tasks.foundation.log.appends import evaluation_due, finish
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.interleaving import Execution
from tests.support.rival_writers import SPEC, Scene, commits_on, in_memory, report_interleavings
from tests.support.small_logs import (
    ENVIRONMENT,
    assert_sound,
    begin,
    committing,
    evaluation,
    head_of,
    origin,
    ref,
    train,
)

ZERO, TEN = ref(0), ref(10, 1)
END = Finish(checkpoint=TEN, reason="EarlyStopping")


def folded(*bodies: Body) -> Head:
    head = fold(None, origin())
    for body in (committing(ZERO), committing(TEN, parent=ZERO.path), END, *bodies):
        head = fold(head, body)
    return head


@pytest.mark.parametrize(
    "body",
    [
        Retire(paths=(ZERO.path,), deleted=()),
        evaluation(TEN, accuracy=0.5),
        Change(environment=ENVIRONMENT),
        Change(environment=ENVIRONMENT, identity={"seed": 1}, accepted=("train.seed",)),
    ],
    ids=lambda body: body.kind,
)
def test_finished_run_stays_finished(body: Body) -> None:
    assert folded().finished == Finished(step=10, reason="EarlyStopping")
    assert folded().base == 2
    assert folded(body).finished == folded().finished


@pytest.mark.parametrize(
    "body",
    [
        committing(ref(20, 2), parent=TEN.path),
        Rewind(to=ZERO, blown_up_at=9, reason="up", skip_batches=3),
        Quarantine(path=TEN.path, reason="damaged"),
        Change(environment=ENVIRONMENT, identity={}, accepted=("train.seed", CALLBACKS)),
    ],
    ids=lambda body: body.kind,
)
def test_finished_run_continues(body: Body) -> None:
    assert folded(body).finished is None


def test_early_end_is_evaluated() -> None:
    head = folded()
    assert evaluation_due(head, SPEC)
    assert not evaluation_due(head.model_copy(update={"finished": None}), SPEC)
    assert not evaluation_due(folded(evaluation(TEN, accuracy=0.5)), SPEC)


def test_finish_is_logged_once_on_its_base() -> None:
    log = begin(MemoryStorage("finishing"))
    try:
        tip = train(log, 10).head.tip
        assert tip is not None
        for _ in range(2):
            finish(log, tip, base=2, reason="EarlyStopping", attempt="a")
        assert head_of(log).number == 3
        with pytest.raises(StaleWriter, match="step 10 was trained on top of log entry 1"):
            finish(log, tip, base=1, reason="EarlyStopping", attempt="a")
        assert_sound(log.home)
    finally:
        log.home.delete("")


@in_memory
def test_commit_and_finish_on_one_base(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    def ends(store: Storage) -> None:
        finish(RunLog(store), scene.parent, base=scene.base, reason="EarlyStopping", attempt="caller")

    def check(execution: Execution, entries: list[Entry]) -> None:
        committed = commits_on(entries, scene.base)
        assert 0 not in execution.faults, "a finish must not block a commit"
        if 1 in execution.faults:
            assert isinstance(execution.faults[1], StaleWriter)
            assert committed
        if committed:
            assert entries[-1].head.finished is None
        elif 1 in execution.results:
            assert entries[-1].head.finished == Finished(step=30, reason="EarlyStopping")
        assert sum(isinstance(entry.body, Finish) for entry in entries) <= 1

    count = scene.play_deaths(home, (scene.commits(0), ends), check, changes=3)
    report_interleavings(request, count, at_least=10)
