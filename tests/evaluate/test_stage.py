"""Evaluation against NumPy: each example once, on any number of replicas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import ModelError, StepFailed
from tests.support.lab import Lab, in_fresh_process, lab_of, spec_of

MODEL = """
class Ids(keras.metrics.Metric):
    \"\"\"Count, sum and sum of squares of what numbers the examples.\"\"\"

    def __init__(self, **settings):
        super().__init__(name="ids", **settings)
        self.sums = self.add_variable((3,), "zeros", name="sums")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = ops.cast(ops.round(y_pred[:, 0]), "float32")
        self.sums.assign_add(ops.stack([ops.sum(ops.ones_like(ids)), ops.sum(ids), ops.sum(ids * ids)]))

    def result(self):
        return {"count": self.sums[0], "sum": self.sums[1], "squares": self.sums[2]}


def numbered():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Identity()(x) * 1.0 + keras.layers.Dense(6, kernel_initializer="zeros")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=[Ids()])
    return model


class Untrained(layers.Subclassed):
    def train_step(self, data):
        return {"loss": ops.sum(self(data[0], training=True))}


def narrow():
    model = Untrained()
    model.out = keras.layers.Dense(2)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def linear(use_ema: bool = False, mixed: bool = False, accumulates: int | None = None, several: bool = False):
    if mixed:
        keras.mixed_precision.set_global_policy("mixed_float16")
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3, name="out", dtype="float32")(x))
    optimizer = keras.optimizers.Adam(
        0.05, use_ema=use_ema, ema_momentum=0.7, gradient_accumulation_steps=accumulates
    )
    if several:
        optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer))
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
    )
    return model
"""
BATCHES = (4, 40)  # full batches and a remainder; fewer examples than a batch


def lab_at(folder: str) -> Lab:
    return Lab(Path(folder), Path(folder) / "code")


def examples(lab: Lab, spec: RunSpec) -> list[Any]:
    """The validation examples, one by one."""
    from baton.tasks.foundation.dataset.evaluation_sets import set_batches

    dataset = set_batches(lab.storage, lab.prepare(spec), on="validation", batch_size=1)
    return [[part[0] for part in element] for element in dataset.as_numpy_iterator()]


def truth(lab: Lab, spec: RunSpec, weights: dict[str, Any]) -> dict[str, float]:
    """Metrics of the linear model, computed with NumPy."""
    x, y, weight = (np.asarray(part) for part in zip(*examples(lab, spec), strict=True))
    logits = x.astype(np.float64) @ weights["kernel"] + weights["bias"]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]
    right = logits.argmax(axis=1) == y
    return {
        "loss": float((losses * weight).mean()),
        "accuracy": float(right.mean()),
        "weighted": float((right * weight).sum() / weight.sum()),
    }


def saved(lab: Lab, spec: RunSpec, checkpoint: Any, pattern: str) -> dict[str, Any]:
    """Kernel and bias from a checkpoint's files."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(lab.folder(spec, checkpoint) / "ckpt"))
    found = {}
    for name in ("kernel", "bias"):
        key = next(key for key in sorted(reader.get_variable_to_shape_map()) if pattern.format(name) in key)
        found[name] = reader.get_tensor(key)
    return found


def run_of(build: str, replicas: int, batch: int, **changes: Any) -> RunSpec:
    name = f"{build}-{replicas}-{batch}-{len(changes)}"
    form = "numbered" if build == "numbered" else "weighted"
    changes |= {"data__options__examples": 63}  # 11 of them for validation
    changes = {"train__steps": 3} | changes
    return spec_of(build, run=name, form=form, replicas=replicas, train__global_batch_size=batch, **changes)


def counts(lab: Lab, replicas: int) -> list[list[dict[str, float]]]:
    """Return what was counted of the examples' numbers, and what is to be counted, for each batch size."""
    results = []
    for batch in BATCHES:
        spec = run_of("numbered", replicas, batch)
        metrics = lab.evaluate(spec, lab.begin(spec).tip)
        ids = np.asarray([x[0] for x, _ in examples(lab, spec)], np.float64)
        counted = {"ids/count": len(ids), "ids/sum": float(ids.sum()), "ids/squares": float((ids**2).sum())}
        results.append([metrics, counted])
    return results


def linear(lab: Lab, replicas: int) -> list[dict[str, float]]:
    """Return metrics and expected values of the linear model."""
    spec = run_of("linear", replicas, BATCHES[-1])
    head = lab.train_and_commit(spec, 3)
    return [lab.evaluate(spec, head.tip), truth(lab, spec, saved(lab, spec, head.tip, "model/out/{}/"))]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return lab_of(tmp_path, MODEL)


def averages(lab: Lab, replicas: int, **options: Any) -> list[dict[str, float]]:
    options = {"use_ema": True, **options}
    spec = run_of("linear", replicas, 4, train__steps=5, model__options=options)
    head = lab.train_and_commit(spec, 5)
    before = lab.tensors(spec, head.tip)
    metrics = lab.evaluate(spec, head.tip)
    assert lab.tensors(spec, head.tip) == before
    averaged = truth(lab, spec, saved(lab, spec, head.tip, "out_{}_average"))
    return [metrics, averaged, truth(lab, spec, saved(lab, spec, head.tip, "model/out/{}/"))]


def assert_averaged(metrics: dict[str, float], averaged: dict[str, float], plain: dict[str, float]) -> None:
    assert {name: metrics[name] for name in averaged} == pytest.approx(averaged, rel=2e-5)
    assert averaged["loss"] != pytest.approx(plain["loss"], rel=1e-3)


@pytest.mark.slow
def test_ema_averages_are_evaluated(lab: Lab) -> None:
    """`test_optimizers.py` has more of them."""
    assert_averaged(*averages(lab, 1, mixed=True, several=True, accumulates=2))


def on_replicas(folder: str, replicas: int) -> list[Any]:
    lab = lab_at(folder)
    return [each(lab, replicas) for each in (counts, linear, averages)]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_example_counts_once_on_replicas(lab: Lab, replicas: int) -> None:
    """With full batches and a remainder, with fewer examples than a batch; and of averages."""
    counted, plain, averaged = in_fresh_process(on_replicas, folder=str(lab.root), replicas=replicas)
    assert len(counted) == len(BATCHES)
    for metrics, expected in (*counted, plain):
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-5)
    # Sample weights matter here, and no batch size or replica count divides the examples.
    assert plain[1]["weighted"] != pytest.approx(plain[1]["accuracy"], rel=1e-3)
    assert all(counted[0][1]["ids/count"] % number for number in range(2, 9))
    assert_averaged(*averaged)


@pytest.mark.slow
def test_best_checkpoint_is_in_the_log(lab: Lab) -> None:
    spec = run_of("linear", 1, 4, checkpoint__keep_best={"metric": "accuracy", "mode": "max"}, train__seed=3)
    found: dict[float, str] = {}
    lab.begin(spec)
    for border in (1, 15, 30):
        head = lab.train_and_commit(spec, border)
        value = lab.evaluate(spec, head.tip)["accuracy"]
        found.setdefault(value, head.tip.path)
        after = lab.log(spec).head()
        assert after is not None
        assert after.best is not None
        assert after.evaluated[-1] == head.tip.path
        assert (after.best.metric, after.best.mode) == ("accuracy", "max")
        assert after.best.value == max(found)
        assert after.best.checkpoint.path == found[max(found)]
        assert after.base == head.base
    assert len(found) > 1


def test_unknown_metric_is_refused_before_training(lab: Lab) -> None:
    spec = run_of("linear", 1, 4, checkpoint__keep_best={"metric": "acuracy", "mode": "max"})
    with pytest.raises(ModelError) as refused:
        lab.begin(spec)
    assert "checkpoint.keep_best.metric = 'acuracy' is not a metric of the model" in str(refused.value)
    assert "it has: accuracy, loss, weighted" in str(refused.value)
    assert not list((lab.root / "storage").glob(spec.run))


def test_unknown_metric_is_refused_by_the_stage(lab: Lab) -> None:
    spec = run_of("linear", 1, 4)
    head = lab.begin(spec)
    wrong = run_of("linear", 1, 4, checkpoint__keep_best={"metric": "acuracy", "mode": "max"})
    wrong = wrong.model_copy(update={"run": spec.run})
    with pytest.raises(ModelError, match="it has: accuracy, loss, weighted"):
        lab.evaluate(wrong, head.tip)
    assert lab.log(spec).head() == head


def test_model_without_test_step_is_refused_before_training(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    with pytest.raises(ModelError) as refused:
        lab.begin(spec_of("adversaries", form="alone"))
    assert "give the model a test_step, or set data.validation_fraction to 0" in str(refused.value)
    spec = spec_of("adversaries", form="alone", data__validation_fraction=0.0)
    assert lab.begin(spec).tip is not None


def test_label_out_of_range_is_named(lab: Lab) -> None:
    spec = spec_of("narrow")
    head = lab.begin(spec)
    with pytest.raises(StepFailed) as stopped:
        lab.evaluate(spec, head.tip)
    assert "model.py:narrow: test_step failed on the validation examples: InvalidArgumentError" in str(stopped.value)
    assert "= 2 is not in [0, 2)" in str(stopped.value)
    assert str(stopped.value).endswith("Set data.classes to have labels checked when the data is prepared")
    assert lab.log(spec).head() == head
