"""One segment: the batches that it reads, its metrics, its end, and its refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BatonError, ModelError, NonFinite, StepFailed
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import Training
from tests.support.lab import Lab, differing, in_fresh_process, lab_of, spec_of

MODEL = """
OUTSIDE = []


class Outside(keras.layers.Layer):
    def call(self, x, training=False):
        if not OUTSIDE:
            OUTSIDE.append(tf.Variable(0.0, name="kept_outside"))
        if training:
            OUTSIDE[0].assign_add(1.0)
        return x


class Untraceable(layers.Subclassed):
    def train_step(self, data):
        if float(data[0][0, 0]) > 0:
            return {"loss": 1.0}
        return {}


class Poisoned(layers.Subclassed):
    def train_step(self, data):
        logs = super().train_step(data)
        weight = self.trainable_variables[0]
        weight.assign(weight * float("nan"))
        return {"loss": 0.5}


class MeanId(keras.metrics.Mean):
    def __init__(self):
        super().__init__(name="id")

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred[:, 0])


def compiled(model):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _with(layer):
    return compiled(keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)]))


def outside():
    return _with(Outside())


def python_code():
    remembered = []

    def remember(x):
        return remembered.append(1) or x

    def layer(x):
        return tf.ensure_shape(tf.numpy_function(remember, [x], x.dtype), x.shape)

    return _with(keras.layers.Lambda(layer))


def sampled():
    def noise(x):
        drawn = tf.random.log_uniform_candidate_sampler(tf.zeros([1, 1], tf.int64), 1, 2, True, 9)
        return x + tf.cast(drawn.sampled_candidates[0], x.dtype)

    return _with(keras.layers.Lambda(noise))


def compiled_with_xla():
    model = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    model.compile("sgd", model.loss, jit_compile=True)
    return model


def narrow():
    return compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]))


def same(example, *, seed):
    return example


def untraceable():
    return compiled(Untraceable())


def poisoned():
    return compiled(Poisoned())


def overflowing():
    # 1e30 becomes infinite, 1 stays 1.
    return _with(keras.layers.Lambda(lambda x: x * x))


def numbered():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Identity()(x) * 1.0 + keras.layers.Dense(6, kernel_initializer="zeros")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=[MeanId()])
    return model
"""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    PROCESS_STATE.forget()
    return lab_of(tmp_path, MODEL)


def batches(lab: Lab, spec: RunSpec, count: int) -> list[Any]:
    """The first x batches of a run, from the reader."""
    from baton.tasks.foundation.dataset.read import training_dataset

    dataset = training_dataset(
        lab.storage,
        lab.prepare(spec),
        seed=spec.train.seed,
        global_batch_size=spec.train.global_batch_size,
        window_shards=spec.data.window_shards,
        first_batch=0,
    )
    return [element[0] for element in dataset.take(count).as_numpy_iterator()]


def fast(lab: Lab) -> Callable[[], float]:  # noqa: ARG001 - all clocks have the same signature
    """A constant clock: inner loops run from one absolute step to the next."""
    return lambda: 0.0


def slow(lab: Lab) -> Callable[[], float]:  # noqa: ARG001
    """A clock that advances quickly: every inner loop is one step."""
    seconds = iter(range(0, 10**9, 100))
    return lambda: float(next(seconds))


def by_progress(lab: Lab) -> Callable[[], float]:
    """Each inner loop takes ten seconds."""
    return lambda: 10.0 * sum(isinstance(event, Training) for event in lab.recorder.events)


@pytest.mark.slow
def test_metrics_cover_the_batches_between_absolute_steps(lab: Lab) -> None:
    spec = spec_of("numbered", form="numbered")
    start = lab.begin(spec).tip
    assert start is not None
    ids = [batch[:, 0].mean() for batch in batches(lab, spec, 11)]
    expected = {4: np.mean(ids[:4]), 8: np.mean(ids[4:8])}
    for borders in ((11,), (3, 7, 11), (1, 2, 4, 5, 8, 11)):
        at, rows = start, {}
        for border in borders:
            if border == 7:
                PROCESS_STATE.forget()
            result = lab.train(spec, at, border)
            at = result.staged
            rows |= {row.step: row.metrics["id"] for row in result.history}
        assert rows == pytest.approx(expected, rel=1e-6)


def test_inner_loops_do_not_change_bits(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional", checkpoint__every_seconds=None)
    start = lab.begin(spec).tip
    assert start is not None
    runs = {}
    for clock in (fast, slow):
        lab.recorder.events.clear()
        result = lab.train(spec, start, 11, clock=clock(lab))
        steps = [event.step for event in lab.recorder.events if isinstance(event, Training)]
        runs[clock] = (result, steps)
    # The first loop of a segment is one step, which measures how long a step takes.
    assert runs[fast][1] == [1, 4, 8, 11]
    assert runs[slow][1] == list(range(1, 12))
    assert differing(*(lab.tensors(spec, result.staged) for result, _ in runs.values())) == []
    assert runs[fast][0].history == runs[slow][0].history


def test_segment_ends_after_segment_seconds(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional", train__segment_seconds=15.0)
    start = lab.begin(spec).tip
    assert start is not None
    timed = lab.train(spec, start, 11, clock=by_progress(lab))
    assert timed.exit_reason == "segment_seconds"
    assert timed.staged.step == 4
    rest = lab.train(spec, timed.staged, 11, clock=fast(lab))
    assert rest.exit_reason == "segment_end"
    straight = lab.train(spec, start, 11, clock=fast(lab))
    assert differing(lab.tensors(spec, rest.staged), lab.tensors(spec, straight.staged)) == []
    assert timed.history + rest.history == straight.history


def test_segment_trains_at_least_one_inner_loop(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("plain", train__segment_seconds=1e-9)
    start = lab.begin(spec).tip
    assert start is not None
    assert lab.train(spec, start, 11, clock=slow(lab)).staged.step == 1


def test_result_describes_the_segment(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("plain")
    start = lab.begin(spec).tip
    assert start is not None
    ticks = iter(range(10**6))
    used: list[float] = []

    def clock() -> float:
        used.append(float(next(ticks)))
        return used[-1]

    result = lab.train(spec, start, 5, clock=clock)
    assert (result.staged.step, result.examples, result.exit_reason) == (5, 40, "segment_end")
    assert result.staged.base == 1
    assert sum(result.seconds.values()) == used[-1] - used[0]
    assert set(result.seconds) == {"build", "restore", "compile", "train", "input wait", "stage"}
    assert len(result.staged.attempt) == 32
    assert lab.log(spec).head() is not None
    assert lab.log(spec).head().tip == start  # type: ignore[union-attr]


def assert_nothing_is_staged(lab: Lab, spec: RunSpec, before: set[Path]) -> None:
    assert {path for path in lab.home(spec).root.rglob("*") if path.is_file()} == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("clock", [fast, pytest.param(slow, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_loss_that_is_not_finite_stops_the_run(lab: Lab, clock: Callable[[Lab], Callable[[], float]]) -> None:
    spec = spec_of("overflowing", form="divergent", data__validation_fraction=0.0, train__seed=2)
    start = lab.begin(spec).tip
    assert start is not None
    bad = next(index for index, batch in enumerate(batches(lab, spec, 11)) if (batch > 1e20).any())
    assert bad == 5  # within an inner loop, if the clock allows long ones
    at = lab.train(spec, start, bad, clock=clock(lab)).staged  # the steps before it are good
    before = {path for path in lab.home(spec).root.rglob("*") if path.is_file()}  # type: ignore[attr-defined]
    head = lab.log(spec).head()
    for begin in (start, at):
        with pytest.raises(NonFinite) as stopped:
            lab.train(spec, begin, 11, clock=clock(lab))
        assert f"the loss is not finite at step {bad + 1}, in segment 1" in str(stopped.value)
        assert stopped.value.exit_code == 1
    assert_nothing_is_staged(lab, spec, before)
    assert lab.log(spec).head() == head
    # That trainer was dropped: the good steps give the same bits again.
    assert lab.train(spec, start, bad).staged.state_digest == at.state_digest


def test_weight_that_is_not_finite_stops_the_run(lab: Lab) -> None:
    spec = spec_of("poisoned")
    start = lab.begin(spec).tip
    assert start is not None
    before = {path for path in lab.home(spec).root.rglob("*") if path.is_file()}  # type: ignore[attr-defined]
    with pytest.raises(NonFinite) as stopped:
        lab.train(spec, start, 3)
    assert "step 3, in segment 1: model/poisoned/dense/kernel holds NaN or infinity" in str(stopped.value)
    assert_nothing_is_staged(lab, spec, before)


def refusals(folder: str, replicas: int, begun: bool) -> dict[str, str]:
    """The error of each untrainable model on `replicas` replicas, from init-or-restore or from training."""
    from baton.tasks.init_or_restore import model_requirements

    lab, errors = Lab(Path(folder), Path(folder) / "code"), {}
    for build in ("outside", "untraceable"):
        spec = spec_of(build, run=f"{build}-{replicas}", replicas=replicas)
        try:
            if begun:
                with (
                    patch.object(model_requirements, "require_train_step"),
                    patch.object(model_requirements, "require_test_step"),
                ):
                    start = lab.begin(spec).tip
                assert start is not None
                lab.train(spec, start, 3)
            else:
                lab.begin(spec)
        except BatonError as fault:
            errors[build] = f"{type(fault).__name__} {fault.exit_code}: {fault}"
        head = lab.log(spec).head()
        assert (head is not None) == begun
        assert head is None or (head.tip is not None and head.tip.step == 0)
    return errors


def assert_refused(errors: dict[str, str]) -> None:
    assert errors["outside"].startswith("ModelError 2: model.py:outside: train_step uses variables that no layer")
    assert "kept_outside" in errors["outside"]
    assert "as attributes of a layer or of the model" in errors["outside"]
    assert errors["untraceable"].startswith("ModelError 2: model.py, line ")
    assert "model.py:untraceable: train_step cannot be traced: " in errors["untraceable"]


@pytest.mark.parametrize("begun", [False, True])
def test_untracked_state_is_refused(lab: Lab, begun: bool) -> None:
    assert_refused(refusals(str(lab.root), 1, begun))


def label_failure(folder: str, replicas: int) -> str:
    lab = Lab(Path(folder), Path(folder) / "code")
    # A transform may change the labels, so they are not tried before step 0.
    spec = spec_of("narrow", replicas=replicas, data__transform="model.py:same")
    start = lab.begin(spec).tip
    assert start is not None
    with pytest.raises(StepFailed) as stopped:
        lab.train(spec, start, 3, clock=fast(lab))
    assert stopped.value.exit_code == 1
    return str(stopped.value)


def assert_label_is_named(message: str) -> None:
    assert message.startswith("model.py:narrow: train_step failed between step 0 and step 1, in segment 1: Invalid")
    assert "= 2 is not in [0, 2)" in message
    assert message.endswith("Set data.classes to have labels checked when the data is prepared")
    assert "\n" not in message
    assert len(message) < 500


def test_label_out_of_range_is_reported(lab: Lab) -> None:
    assert_label_is_named(label_failure(str(lab.root), 1))


def failures(folder: str) -> list[Any]:
    lab = Lab(Path(folder), Path(folder) / "code")
    with pytest.raises(ModelError) as refused:
        lab.begin(spec_of("compiled_with_xla", replicas=2))
    assert lab.log(spec_of("compiled_with_xla")).head() is None
    found = [str(refused.value), label_failure(folder, 2)]
    return [*found, *(refusals(folder, 2, begun) for begun in (False, True))]


@pytest.mark.slow
def test_steps_fail_on_two_replicas_as_on_one(lab: Lab) -> None:
    of_xla, of_labels, *refused = in_fresh_process(failures, folder=str(lab.root))
    assert "compiled with jit_compile=True, which cannot be used: 2 replicas" in of_xla
    assert "hint: remove jit_compile=True" in of_xla
    assert_label_is_named(of_labels)
    for errors in refused:
        assert_refused(errors)


def test_new_run_with_hidden_random_state_is_refused(lab: Lab) -> None:
    with pytest.raises(ModelError) as refused:
        lab.begin(spec_of("sampled"))
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("model.py:sampled: train_step draws random numbers from TensorFlow's own state")
    assert lines[1].startswith("  LogUniformCandidateSampler (model.py, line ")
    assert lab.log(spec_of("sampled")).head() is None


@pytest.mark.parametrize(("build", "op"), [("python_code", "PyFunc"), ("sampled", "LogUniformCandidateSampler")])
def test_state_outside_of_variables_is_warned_about(lab: Lab, build: str, op: str) -> None:
    from baton.tasks.init_or_restore import model_requirements

    spec = spec_of(build)
    # An earlier version began the run.
    with (
        patch.object(model_requirements, "require_train_step"),
        patch.object(model_requirements, "require_test_step"),
    ):
        start = lab.begin(spec).tip
    assert start is not None
    lab.train(spec, start, 3)
    assert len(lab.recorder.warnings) == 1
    assert f"model.py:{build}: " in lab.recorder.warnings[0]
    assert op in lab.recorder.warnings[0]
    assert "a resumed run can differ" in lab.recorder.warnings[0]


def test_model_error_is_raised_before_any_write(lab: Lab) -> None:
    with pytest.raises(ModelError, match="has no function missing"):
        lab.begin(spec_of("missing"))
    assert not (lab.root / "storage" / "missing").exists()


def test_step_may_return_a_loss_per_example(tmp_path: Path) -> None:
    lab = lab_of(
        tmp_path,
        """
class Each(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        x, y = data
        return {"loss": keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)}


def build():
    x = keras.Input((6,))
    model = Each(x, keras.layers.Dense(3)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
""",
    )
    spec = spec_of("build")
    start = lab.begin(spec).tip
    assert start is not None
    result = lab.train(spec, start, 3)
    (worker,) = result.workers
    assert (worker.steps, worker.examples, len(worker.losses)) == (3, 24, 1)
