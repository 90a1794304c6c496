"""A loss that blows up stops the run, or rewinds it to a segment border and skips batches, as its log determines."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.log_entry import Commit, MetricRow, Rewind
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp, NonFinite
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.train_segment.callbacks import MEDIAN_ROWS, LossWatch
from tests.support.lab import Lab, differing, lab_of, spec_of

MODEL = """
def squaring():
    # 1e30 becomes infinite, 1 stays 1.
    model = keras.Sequential([keras.Input((6,)), keras.layers.Lambda(lambda x: x * x), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
BORDERS = (4, 8, 12, 16, 20)


def rows(*losses: float) -> list[MetricRow]:
    return [MetricRow(step=step, metrics={"loss": loss}) for step, loss in enumerate(losses, start=1)]


def test_loss_far_above_the_running_median_is_a_blow_up() -> None:
    watch = LossWatch(3.0, rows(1.0, 1.0, 2.0, 2.0, 2.0))
    watch.check(MetricRow(step=6, metrics={"loss": 6.0}))
    with pytest.raises(BlowUp, match=r"logged at step 7 is 6.1, more than train.blowup_factor = 3 times the median 2"):
        watch.check(MetricRow(step=7, metrics={"loss": 6.1}))


def test_without_rows_factor_or_loss_nothing_is_a_blow_up() -> None:
    LossWatch(2.0, rows(1.0, 1.0, 1.0, 1.0)).check(MetricRow(step=9, metrics={"loss": 99.0}))
    LossWatch(None, rows(*[1.0] * 30)).check(MetricRow(step=31, metrics={"loss": 99.0}))
    LossWatch(2.0, rows(*[1.0] * 30)).check(MetricRow(step=31, metrics={"error": 99.0}))


def test_old_losses_are_forgotten() -> None:
    watch = LossWatch(3.0, rows(*[100.0] * MEDIAN_ROWS, *[1.0] * MEDIAN_ROWS))
    with pytest.raises(BlowUp):
        watch.check(MetricRow(step=99, metrics={"loss": 4.0}))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    PROCESS_STATE.forget()
    return lab_of(tmp_path, MODEL)


def divergent(run: str, **changes: Any) -> RunSpec:
    """One example in 120 makes the loss of its batch infinite."""
    settings = {
        "data__options": {"form": "divergent", "examples": 120},
        "data__validation_fraction": 0.0,
        "train__on_blowup": "rewind",
        "train__rewind_skip_batches": 6,
        "train__log_every_steps": 2,
        "train__steps": 20,
    }
    return spec_of("squaring", run=run, **(settings | changes))


def rewinds(lab: Lab, spec: RunSpec) -> list[tuple[int, int, int]]:
    bodies = [entry.body for entry in lab.log(spec).entries()]
    return [(body.blown_up_at, body.to.step, body.skip_batches) for body in bodies if isinstance(body, Rewind)]


def bad_step(lab: Lab) -> int:
    """The step that trains on the first bad batch."""
    spec = divergent("stopping", train__on_blowup="stop")
    with pytest.raises(NonFinite) as stopped:
        lab.relay(spec, *BORDERS)
    return stopped.value.step


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The run "straight", which was rewound."""
    lab = lab_of(tmp_path_factory.mktemp("rewound"), MODEL)
    lab.relay(divergent("straight"), *BORDERS)
    return lab


def test_rewind_returns_to_a_border_and_skips_batches(rewound: Lab) -> None:
    bad = bad_step(rewound)
    spec = divergent("straight")
    border = (bad - 1) // 4 * 4
    assert rewinds(rewound, spec)[0] == (bad, border, bad - border + 6)
    head = rewound.log(spec).require_head()
    assert head.tip is not None
    assert head.tip.step == 20
    assert head.skipped_batches == sum(skipped for _, _, skipped in rewinds(rewound, spec))
    assert [row.step for row in history_of(rewound.log(spec).entries()).rows] == list(range(2, 21, 2))
    assert any(
        f"Rewound to step {border}, skipping {bad - border + 6} global batches" in warning
        for warning in rewound.recorder.warnings
    )


@pytest.mark.slow
def test_rewound_run_is_the_same_however_it_is_cut(rewound: Lab) -> None:
    """Commits by time between the borders change neither the border of the rewind nor the bits."""
    straight = divergent("straight")
    often = divergent("often", checkpoint={"every_seconds": 1e-9, "keep_last": 1})
    one = rewound.log(straight).require_head()
    PROCESS_STATE.forget()
    other = rewound.relay(often, *BORDERS)
    assert rewinds(rewound, straight) == rewinds(rewound, often) != []
    assert one.tip is not None
    assert other.tip is not None
    assert differing(rewound.tensors(straight, one.tip), rewound.tensors(often, other.tip)) == []
    assert history_of(rewound.log(straight).entries()).rows == history_of(rewound.log(often).entries()).rows
    committed = [entry.body for entry in rewound.log(often).entries() if isinstance(entry.body, Commit)]
    assert "interval" in {body.exit_reason for body in committed}


@pytest.mark.slow
def test_loss_above_the_median_can_rewind(lab: Lab) -> None:
    """With a factor, blow-ups are detected at log steps, and also after a cold start."""
    rewinds_of = {}
    for run, cold in (("warm", False), ("cold", True)):
        examples = {"form": "plain", "examples": 120}
        spec = divergent(run, data__options=examples, train__blowup_factor=1.0000001, train__rewind_tries=1)
        with suppress(BlowUp):  # both runs may use up all tries
            lab.relay(spec, *BORDERS[:2])
            lab.relay(spec, *BORDERS, cold=cold)
        rewinds_of[run] = rewinds(lab, spec)
    assert rewinds_of["warm"] == rewinds_of["cold"] != []
    assert all(blown_up_at > 10 for blown_up_at, _, _ in rewinds_of["warm"]), "a factor needs five rows"
