"""What each entry makes of the state before it."""

import math

import pytest
from log_making import ACCURACY, ENVIRONMENT, committing, evaluation, origin, ref

from tasks.foundation.contracts.log_entry import Body, Change, Head, Quarantine, Retire
from tasks.foundation.contracts.run_spec import KeepBest
from tasks.foundation.errors import RunLogError
from tasks.foundation.runlog.folding import fold

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
        # housekeeping leaves the base where it is
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
        # a quarantine moves the tip back and thereby the base
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
        # what is retired is the best no more: its files go
        (
            [*COMMITS, evaluation(TWO, accuracy=1.0), Retire(paths=(TWO.path,), deleted=())],
            AFTER_COMMITS | {"number": 5, "retained": [0, 20], "retired": [("00000010", 3)]},
        ),
        # and cannot become it
        (
            [*COMMITS, Retire(paths=(TWO.path,), deleted=()), evaluation(TWO, accuracy=1.0)],
            AFTER_COMMITS | {"number": 5, "retained": [0, 20], "retired": [("00000010", 3)]},
        ),
    ],
)
def test_folding(bodies: list[Body], wanted: dict[str, object]) -> None:
    assert short(folded(*bodies)) == wanted


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([], None),
        ([(ONE, ACCURACY, {"accuracy": 0.5}), (TWO, ACCURACY, {"accuracy": 0.6})], 10),
        ([(ONE, ACCURACY, {"accuracy": 0.6}), (TWO, ACCURACY, {"accuracy": 0.5})], 0),
        ([(ONE, LOSS, {"loss": 0.6}), (TWO, LOSS, {"loss": 0.5})], 10),
        ([(ONE, LOSS, {"loss": 0.5}), (TWO, LOSS, {"loss": 0.6})], 0),
        ([(ONE, ACCURACY, {"accuracy": 0.5}), (TWO, ACCURACY, {"accuracy": 0.5})], 0),  # a tie stays with the earlier
        ([(ONE, ACCURACY, {"accuracy": math.nan})], None),
        ([(ONE, ACCURACY, {"accuracy": 0.5}), (TWO, ACCURACY, {"accuracy": math.nan})], 0),
        ([(ONE, ACCURACY, {"loss": 0.5})], None),  # no such metric
        ([(ONE, LOSS, {"loss": math.inf}), (TWO, LOSS, {"loss": 9.0})], 10),
        ([(ONE, None, {"accuracy": 1.0})], None),  # nothing counts as best
        ([(ONE, ACCURACY, {"accuracy": 0.9}), (TWO, None, {"accuracy": 1.0})], 0),
        ([(ONE, ACCURACY, {"accuracy": 0.9}), (TWO, LOSS, {"loss": 5.0})], 10),  # another rule begins anew
        ([(ref(7, 1, "elsewhere"), ACCURACY, {"accuracy": 0.9})], None),  # not one of ours
    ],
)
def test_which_evaluation_is_the_best(evaluations: list[tuple], best: int | None) -> None:  # type: ignore[type-arg]
    head = folded(*COMMITS, *(evaluation(checkpoint, rule, **metrics) for checkpoint, rule, metrics in evaluations))
    assert (head.best.checkpoint.step if head.best else None) == best
    assert head.evaluated == tuple(dict.fromkeys(ref.path for ref, *_ in evaluations if ref in head.retained))
    assert head.base == 3


def test_a_run_has_one_origin_and_begins_with_it() -> None:
    with pytest.raises(RunLogError, match="one origin"):
        fold(folded(), origin())
    with pytest.raises(RunLogError, match="begins with its origin, not with checkpoint"):
        fold(None, committing(ONE))


def test_what_was_evaluated_stays_so_whatever_comes_late() -> None:
    """Neither a late evaluation of an older checkpoint nor a quarantine makes another one due again."""
    both = (evaluation(ONE, None, loss=1.0), evaluation(TWO, None, loss=0.5), evaluation(ONE, None, loss=1.0))
    head = folded(*COMMITS, *both)
    assert head.evaluated == (ONE.path, TWO.path)
    assert head.tip is not None
    damaged = fold(head, Quarantine(path=head.tip.path, reason="flipped"))
    assert set(damaged.evaluated) == {ONE.path, TWO.path} - {head.tip.path}
