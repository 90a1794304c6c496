"""The confusion matrix counts every validation example once, and changes nothing."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.evaluate.evaluator import MOST_CLASSES, Confusion, Counts, Evaluator, labels_of
from baton.tasks.evaluate.report.page import write_report
from baton.tasks.foundation.contracts.dataset import DatasetManifest
from baton.tasks.foundation.contracts.home_files import ConfusionMatrix, confusion_path
from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.errors import RunLogError, StorageError
from baton.tasks.foundation.machine.devices import acquire
from baton.tasks.foundation.model.randomness import StepDraws
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.storage.local import LocalStorage
from tests.evaluate.test_stage import MODEL, examples, lab_at, run_of, saved
from tests.support.lab import Lab, in_fresh_process, lab_of

losses = keras.losses
EXAMPLES, CLASSES = 23, 4


class OwnStep(keras.Model):
    """A model with its own test_step."""

    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


def compiled(loss: Any, outputs: int = CLASSES, kind: type[keras.Model] = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(3)
    x = keras.Input((6,))
    model = kind(x, keras.layers.Dense(outputs, name="out")(x))
    model.compile("sgd", loss)
    return model


def counted(model: keras.Model, x: Any, y: Any) -> Counts | None:
    """Count two full batches and a remainder on one replica."""
    labels = labels_of(model, (x, y))
    assert labels is not None
    draws = StepDraws(0, acquire(AcceleratorSpec(kind="cpu"), None))
    tally = Confusion(model, draws.accelerator.strategy, labels)
    evaluator = Evaluator(model, tally, reference="model.py:build", draws=draws)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    for _ in range(2):  # the second one begins anew
        counts = evaluator.evaluate((), full=lambda _: batches.take(2), full_batches=2, remainder=batches.skip(2))
    return counts


def expected(labels: Any, predicted: Any, classes: int) -> Counts:
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (np.asarray(labels), np.asarray(predicted)), 1)
    return tuple(tuple(int(number) for number in row) for row in counts)


def drawn(classes: int) -> tuple[Any, Any]:
    random = np.random.default_rng(5)
    return random.normal(size=(EXAMPLES, 6)).astype(np.float32), random.integers(0, classes, EXAMPLES)


@pytest.mark.parametrize(
    "loss",
    [
        "sparse_categorical_crossentropy",
        losses.SparseCategoricalCrossentropy(from_logits=True),
        losses.sparse_categorical_crossentropy,
        losses.CategoricalCrossentropy(from_logits=True),
        "categorical_crossentropy",
    ],
)
@pytest.mark.parametrize("column", [False, True])
def test_classes_are_counted(loss: Any, column: bool) -> None:
    (x, y), model = drawn(CLASSES), compiled(loss)
    truth = expected(y, model(x).numpy().argmax(axis=1), CLASSES)
    one_hot = labels_of(model, (x, x)) == "one-hot"
    given = np.eye(CLASSES, dtype=np.float32)[y] if one_hot else y[:, None] if column else y
    assert counted(model, x, given) == truth
    assert sum(map(sum, truth)) == EXAMPLES


@pytest.mark.parametrize(
    ("loss", "threshold"), [(losses.BinaryCrossentropy(from_logits=True), 0.0), ("binary_crossentropy", 0.5)]
)
def test_two_classes_with_one_output(loss: Any, threshold: float) -> None:
    (x, y), model = drawn(2), compiled(loss, 1)
    truth = expected(y, (model(x).numpy()[:, 0] > threshold).astype(int), 2)
    assert counted(model, x, y) == counted(model, x, y[:, None].astype(np.float32)) == truth


@pytest.mark.parametrize("loss", ["mse", {"out": "sparse_categorical_crossentropy"}, losses.Hinge(), None])
def test_other_losses_are_no_classifiers(loss: Any) -> None:
    assert labels_of(compiled(loss), drawn(CLASSES)) is None


def test_own_test_step_is_not_understood() -> None:
    assert labels_of(compiled("sparse_categorical_crossentropy", kind=OwnStep), drawn(CLASSES)) is None


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 1), None])
def test_labels_for_every_token_are_not_counted(shape: tuple[int, ...] | None) -> None:
    batch = (np.zeros((2, 6)), *([] if shape is None else [np.zeros(shape)]))
    assert labels_of(compiled("sparse_categorical_crossentropy"), batch) is None


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [("sparse_categorical_crossentropy", MOST_CLASSES + 1), ("binary_crossentropy", 3)],
)
def test_outputs_that_are_not_understood_have_no_matrix_and_no_pass(
    loss: str, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = drawn(2)
    monkeypatch.setattr(Confusion, "reset", lambda _: pytest.fail("a pass begins"))
    assert counted(compiled(loss, outputs), x, y) is None


def matrix(folder: str, replicas: int) -> list[Any]:
    """The matrix of full batches and a remainder, the true one, the metrics with and without it, digests."""
    lab, spec = lab_at(folder), run_of("linear", replicas, 4)
    tip = lab.train_and_commit(spec, 3).tip
    assert tip is not None
    metrics = [lab.evaluate(spec, tip, confusion_matrix=wanted) for wanted in (False, True, False)]
    weights = saved(lab, spec, tip, "model/out/{}/")
    x, y, _ = (np.asarray(part) for part in zip(*examples(lab, spec), strict=True))
    truth = expected(y, (x @ weights["kernel"] + weights["bias"]).argmax(axis=1), 3)
    warm = PROCESS_STATE.kept
    assert warm is not None
    return [read(lab, spec, tip).counts, truth, metrics, [warm.state.digest().root, tip.state_digest]]


def read(lab: Lab, spec: Any, tip: Any) -> ConfusionMatrix:
    path = confusion_path(tip.path)
    return ConfusionMatrix.from_json(lab.home(spec).read(path), where=path, error=RunLogError)


def assert_counted(counts: Any, truth: Any, metrics: Any, digests: list[str]) -> None:
    assert [list(row) for row in counts] == [list(row) for row in truth]
    assert metrics[0] == metrics[1] == metrics[2]
    assert digests[0] == digests[1]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return lab_of(tmp_path, MODEL)


def test_matrix_of_a_run_and_its_report(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DatasetManifest, "class_names", ("a", "b", "c"))
    assert_counted(*matrix(str(lab.root), 1))
    spec = run_of("linear", 1, 4)
    write_report(lab.log(spec), title="x")
    page = lab.home(spec).read("report/index.html").decode()
    found = read(lab, spec, lab.log(spec).require_head().tip)
    counts = found.counts
    assert found.class_names == ("a", "b", "c")
    right, total = sum(counts[each][each] for each in range(3)), len(examples(lab, spec))
    assert "<h2>Confusion matrix</h2>" in page
    assert "Validation examples at step 3: a row for each label, a column for each predicted class." in page
    assert f"{right} of {total} are predicted right." in page
    assert page.index("<h2>Evaluations on") < page.index("<h2>Confusion matrix") < page.index("<h2>Environment")
    # A home that refuses it is warned of.
    lab.home(spec).delete("confusion")
    create = LocalStorage.create

    def refuse(storage: LocalStorage, path: str, data: bytes) -> None:
        if path.startswith("confusion/"):
            raise StorageError("the disk is full")
        create(storage, path, data)

    monkeypatch.setattr(LocalStorage, "create", refuse)
    tip = lab.log(spec).require_head().tip
    assert lab.evaluate(spec, tip, confusion_matrix=True) == lab.evaluate(spec, tip)
    assert (
        "the confusion matrix was not saved, which no training needs; the report has none: the disk is full"
        in caplog.text
    )
    write_report(lab.log(spec), title="x")
    assert b"Confusion matrix" not in lab.home(spec).read("report/index.html")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_matrix_on_replicas(lab: Lab, replicas: int) -> None:
    assert_counted(*in_fresh_process(matrix, folder=str(lab.root), replicas=replicas))
