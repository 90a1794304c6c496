"""How each kind of entry changes the state."""

import math

import pytest

from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Change,
    Commit,
    Finish,
    Head,
    Origin,
    Quarantine,
    Retire,
    Rewind,
)
from baton.tasks.foundation.contracts.run_spec import KeepBest
from baton.tasks.foundation.errors import RunLogError
from baton.tasks.foundation.log.fold import fold
from tests.support.small_logs import ACCURACY, ENVIRONMENT, committing, evaluation, on_test, origin, ref

ONE, TWO, THREE = ref(0), ref(10, 1), ref(20, 2)
LOSS = KeepBest(metric="loss", mode="min")


def folded(*bodies: Body) -> Head:
    head = fold(None, origin())
    for body in bodies:
        head = fold(head, body)
    return head


def short(head: Head) -> dict[str, object]:
    return {
        "number": head.number,
        "base": head.base,
        "commits": head.commits,
        "tip": head.tip.step if head.tip else None,
        "retained": [kept.step for kept in head.retained],
        "retired": [(old.path.split("-")[0].removeprefix("checkpoints/"), old.at_commit) for old in head.retired],
        "quarantined": [gone.step for gone in head.quarantined],
        "best": head.best.checkpoint.step if head.best else None,
    }


START: dict[str, object] = {
    "number": 0,
    "base": 0,
    "commits": 0,
    "tip": None,
    "retained": [],
    "retired": [],
    "quarantined": [],
    "best": None,
}
COMMITS = [committing(ONE), committing(TWO), committing(THREE)]
AFTER_COMMITS = START | {"number": 3, "base": 3, "commits": 3, "tip": 20, "retained": [0, 10, 20]}


@pytest.mark.parametrize(
    ("bodies", "wanted"),
    [
        ([], START),
        ([committing(ONE)], START | {"number": 1, "base": 1, "commits": 1, "tip": 0, "retained": [0]}),
        (COMMITS, AFTER_COMMITS),
        # retiring does not move the base
        ([*COMMITS, Change(environment=ENVIRONMENT)], AFTER_COMMITS | {"number": 4}),
        ([*COMMITS, evaluation(TWO, accuracy=0.5)], AFTER_COMMITS | {"number": 4, "best": 10}),
        (
            [*COMMITS, Retire(paths=(ONE.path,), deleted=())],
            AFTER_COMMITS | {"number": 4, "retained": [10, 20], "retired": [("00000000", 3)]},
        ),
        (
            [*COMMITS, Retire(paths=(ONE.path,), deleted=()), Retire(paths=(TWO.path,), deleted=(ONE.path,))],
            AFTER_COMMITS | {"number": 5, "retained": [20], "retired": [("00000010", 3)]},
        ),
        # a quarantine moves the tip back, and the base with it
        (
            [*COMMITS, Quarantine(path=THREE.path, reason="x")],
            AFTER_COMMITS | {"number": 4, "base": 4, "tip": 10, "retained": [0, 10], "quarantined": [20]},
        ),
        (
            [committing(ONE), Quarantine(path=ONE.path, reason="x")],
            START | {"number": 2, "base": 2, "commits": 1, "quarantined": [0]},
        ),
        (
            [*COMMITS, evaluation(THREE, accuracy=1.0), Quarantine(path=THREE.path, reason="x")],
            AFTER_COMMITS | {"number": 5, "base": 5, "tip": 10, "retained": [0, 10], "quarantined": [20]},
        ),
        # a retired checkpoint stops being the best, because its files are deleted
        (
            [*COMMITS, evaluation(TWO, accuracy=1.0), Retire(paths=(TWO.path,), deleted=())],
            AFTER_COMMITS | {"number": 5, "retained": [0, 20], "retired": [("00000010", 3)]},
        ),
        # and cannot become the best
        (
            [*COMMITS, Retire(paths=(TWO.path,), deleted=()), evaluation(TWO, accuracy=1.0)],
            AFTER_COMMITS | {"number": 5, "retained": [0, 20], "retired": [("00000010", 3)]},
        ),
    ],
)
def test_entries_change_the_head(bodies: list[Body], wanted: dict[str, object]) -> None:
    assert short(folded(*bodies)) == wanted


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([], None),
        ([(ONE, ACCURACY, {"accuracy": 0.5}), (TWO, ACCURACY, {"accuracy": 0.6})], 10),
        ([(ONE, ACCURACY, {"accuracy": 0.6}), (TWO, ACCURACY, {"accuracy": 0.5})], 0),
        ([(ONE, LOSS, {"loss": 0.6}), (TWO, LOSS, {"loss": 0.5})], 10),
        ([(ONE, LOSS, {"loss": 0.5}), (TWO, LOSS, {"loss": 0.6})], 0),
        ([(ONE, ACCURACY, {"accuracy": 0.5}), (TWO, ACCURACY, {"accuracy": 0.5})], 0),  # a tie keeps the earlier
        ([(ONE, ACCURACY, {"accuracy": math.nan})], None),
        ([(ONE, ACCURACY, {"accuracy": 0.5}), (TWO, ACCURACY, {"accuracy": math.nan})], 0),
        ([(ONE, ACCURACY, {"loss": 0.5})], None),  # no such metric
        ([(ONE, LOSS, {"loss": math.inf}), (TWO, LOSS, {"loss": 9.0})], 10),
        ([(ONE, None, {"accuracy": 1.0})], None),  # without a keep_best rule
        ([(ONE, ACCURACY, {"accuracy": 0.9}), (TWO, None, {"accuracy": 1.0})], 0),
        ([(ONE, ACCURACY, {"accuracy": 0.9}), (TWO, LOSS, {"loss": 5.0})], 10),  # another rule starts over
        ([(ref(7, 1, "elsewhere"), ACCURACY, {"accuracy": 0.9})], None),  # not in this run
    ],
)
def test_best_evaluation_is_kept(evaluations: list[tuple], best: int | None) -> None:  # type: ignore[type-arg]
    head = folded(*COMMITS, *(evaluation(checkpoint, rule, **metrics) for checkpoint, rule, metrics in evaluations))
    assert (head.best.checkpoint.step if head.best else None) == best
    assert set(head.evaluated) == {ref.path for ref, *_ in evaluations if ref in head.retained}
    assert head.base == 3


def test_log_starts_with_its_only_origin() -> None:
    with pytest.raises(RunLogError, match="already has an origin"):
        fold(folded(), origin())
    with pytest.raises(RunLogError, match="must be an origin, not checkpoint"):
        fold(None, committing(ONE))


def test_late_evaluation_keeps_evaluated() -> None:
    """A late evaluation of an older checkpoint or a quarantine does not make another evaluation due."""
    both = (evaluation(ONE, None, loss=1.0), evaluation(TWO, None, loss=0.5), evaluation(ONE, None, loss=1.0))
    head = folded(*COMMITS, *both)
    assert head.evaluated == (ONE.path, TWO.path)
    assert head.tip is not None
    damaged = fold(head, Quarantine(path=head.tip.path, reason="flipped"))
    assert set(damaged.evaluated) == {ONE.path, TWO.path} - {head.tip.path}


def rewind(to: Commit, *, at: int, skip: int = 5) -> Rewind:
    return Rewind(to=to.checkpoint, blown_up_at=at, reason="NaN", skip_batches=skip)


def within(commit: Commit) -> Commit:
    return commit.model_copy(update={"exit_reason": "interval"})


def test_rewind_drops_later_checkpoints() -> None:
    first, second, third = COMMITS
    before = folded(first, second, within(third), evaluation(THREE, accuracy=0.9))
    assert before.borders == (ONE.path, TWO.path)
    assert before.best is not None
    head = fold(before, rewind(second, at=23))
    assert short(head) == START | {
        "number": 5, "base": 5, "commits": 3, "tip": 10, "retained": [0, 10], "retired": [("00000020", 3)],
    }  # fmt: skip
    assert (head.skipped_batches, head.rewinds, head.blown_up_at) == (5, 1, 23)
    assert head.borders == (ONE.path, TWO.path)
    assert head.evaluated == ()


def test_rewinds_are_counted_until_commit_passes() -> None:
    first, second, _ = COMMITS
    head = folded(first, second, rewind(second, at=23), rewind(first, at=12))
    assert (head.rewinds, head.blown_up_at, head.skipped_batches) == (2, 23, 10)
    head = fold(head, committing(ref(20, 4)))
    assert (head.rewinds, head.blown_up_at) == (2, 23)
    head = fold(head, committing(ref(23, 5)))
    assert (head.rewinds, head.blown_up_at, head.skipped_batches) == (0, None, 10)


def test_accepted_change_moves_base_not_tip() -> None:
    head = folded(*COMMITS, Change(environment=ENVIRONMENT, identity={"seed": 1}, accepted=("seed",)))
    assert short(head) == AFTER_COMMITS | {"number": 4, "base": 4}
    assert head.identity == {"seed": 1}


def test_fork_keeps_skipped_batches() -> None:
    head = fold(None, Origin(identity={}, environment=ENVIRONMENT, skipped_batches=7))
    assert head.skipped_batches == 7


def test_borders_are_dropped_with_checkpoints() -> None:
    first, second, third = COMMITS
    head = folded(first, second, third, Retire(paths=(ONE.path,), deleted=()))
    assert head.borders == (TWO.path, THREE.path)
    assert fold(head, Quarantine(path=THREE.path, reason="r")).borders == (TWO.path,)


def test_metrics_on_the_test_set_decide_nothing() -> None:
    before = folded(*COMMITS, evaluation(TWO, accuracy=0.5))
    head = fold(before, on_test(THREE, accuracy=0.99))
    assert head.tested == (THREE.path,)
    assert (head.best, head.evaluated, head.base) == (before.best, before.evaluated, before.base)
    assert fold(head, on_test(THREE, accuracy=0.1)).tested == (THREE.path,)
    assert fold(head, on_test(ref(7, 1, "elsewhere"), accuracy=0.1)).tested == (THREE.path,)


def test_tested_checkpoints_are_forgotten_when_they_go() -> None:
    head = folded(*COMMITS, on_test(TWO, loss=1.0), on_test(THREE, loss=1.0))
    assert fold(head, Retire(paths=(TWO.path,), deleted=())).tested == (THREE.path,)
    assert fold(head, Quarantine(path=THREE.path, reason="flipped")).tested == (TWO.path,)
    assert fold(head, rewind(COMMITS[1], at=23)).tested == (TWO.path,)


def test_checkpoints_that_were_read_are_known() -> None:
    first, second, third = COMMITS
    last = committing(ref(30, 3))
    head = folded(first, second, third, last.model_copy(update={"read": (TWO.path, "checkpoints/gone")}))
    assert head.read == (TWO.path,)
    newer = fold(head, evaluation(THREE, loss=1.0).model_copy(update={"read": (THREE.path, ONE.path)}))
    assert newer.read == (ONE.path, TWO.path, THREE.path), "in the order of commits, not of reads"
    again = fold(newer, on_test(THREE, loss=1.0).model_copy(update={"read": (TWO.path,)}))
    assert (again.read, again.base, again.tip) == (newer.read, head.base, head.tip)
    assert fold(newer, Retire(paths=(TWO.path,), deleted=())).read == (ONE.path, THREE.path)
    assert fold(newer, Quarantine(path=THREE.path, reason="flipped")).read == (ONE.path, TWO.path)
    assert fold(newer, rewind(second, at=33)).read == (ONE.path, TWO.path)


def test_quarantine_of_an_older_one_leaves_the_tip() -> None:
    before = folded(*COMMITS, evaluation(TWO, accuracy=1.0), Finish(checkpoint=THREE, reason="EarlyStopping"))
    head = fold(before, Quarantine(path=TWO.path, reason="flipped"))
    assert short(head) == AFTER_COMMITS | {"number": 6, "retained": [0, 20], "quarantined": [10]}
    assert head.finished == before.finished
    assert head.borders == (ONE.path, THREE.path)
    assert fold(before, Quarantine(path=THREE.path, reason="flipped")).finished is None


def test_best_starts_over_on_another_validation_set() -> None:
    before = folded(*COMMITS, evaluation(TWO, accuracy=0.5))
    for key, best in (("data.validation", None), ("train.seed", before.best)):
        assert fold(before, Change(environment=ENVIRONMENT, identity={}, accepted=(key,))).best == best
