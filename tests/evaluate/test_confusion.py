"""The confusion matrix counts every validation example once, and changes nothing."""

import base64
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tasks.evaluate.evaluator import MOST_CLASSES, Confusion, Counts, Evaluator, labels_of
from tasks.evaluate.report.page import write_report
from tasks.evaluate.stage import as_people_see_them
from tasks.foundation.contracts.dataset import DatasetManifest
from tasks.foundation.contracts.home_files import ConfusionMatrix, confusion_path
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import RunLogError, StorageError
from tasks.foundation.machine.devices import acquire
from tasks.foundation.model.randomness import StepDraws
from tasks.foundation.state.warm_state import PROCESS_STATE
from tasks.foundation.storage.local import LocalStorage
from tests.evaluate.test_stage import MODEL, examples, lab_at, run_of, saved
from tests.support.lab import Lab, in_fresh_process, lab_of, spec_of

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


def matrices(folder: str, replicas: int) -> list[list[Any]]:
    """For batches with and without a remainder: the matrix, the true one, the metrics with and without it, digests."""
    lab, results = lab_at(folder), []
    for batch in (4, 40):
        spec = run_of("linear", replicas, batch)
        tip = lab.train_and_commit(spec, 3).tip
        assert tip is not None
        metrics = [lab.evaluate(spec, tip, confusion_matrix=wanted) for wanted in (False, True, False)]
        weights = saved(lab, spec, tip, "model/out/{}/")
        x, y, _ = (np.asarray(part) for part in zip(*examples(lab, spec), strict=True))
        truth = expected(y, (x @ weights["kernel"] + weights["bias"]).argmax(axis=1), 3)
        warm = PROCESS_STATE.kept
        assert warm is not None
        results.append([read(lab, spec, tip).counts, truth, metrics, [warm.state.digest().root, tip.state_digest]])
    return results


def read(lab: Lab, spec: Any, tip: Any) -> ConfusionMatrix:
    path = confusion_path(tip.path)
    return ConfusionMatrix.from_json(lab.home(spec).read(path), where=path, error=RunLogError)


def assert_counted(results: list[list[Any]]) -> None:
    for counts, truth, metrics, digests in results:
        assert [list(row) for row in counts] == [list(row) for row in truth]
        assert metrics[0] == metrics[1] == metrics[2]
        assert digests[0] == digests[1]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return lab_of(tmp_path, MODEL)


def test_matrix_of_a_run_and_its_report(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DatasetManifest, "class_names", ("a", "b", "c"))
    assert_counted(matrices(str(lab.root), 1))
    spec = run_of("linear", 1, 4)
    write_report(lab.log(spec), title="x")
    page = lab.home(spec).read("report/index.html").decode()
    matrix = read(lab, spec, lab.log(spec).require_head().tip)
    counts = matrix.counts
    assert matrix.class_names == ("a", "b", "c")
    right, total = sum(counts[each][each] for each in range(3)), len(examples(lab, spec))
    assert "<h2>Confusion matrix</h2>" in page
    assert "Validation examples at step 3: a row for each label, a column for each predicted class." in page
    assert f"{right} of {total} are predicted right." in page
    assert page.index("<h2>Evaluations on") < page.index("<h2>Confusion matrix") < page.index("<h2>Environment")


IMAGES = """
import numpy as np

def load(form, examples=40):
    draw = np.random.default_rng(3)
    for number in range(examples):
        yield draw.integers(0, 256, (6, 4, 3), dtype=np.uint8), np.int64(number % 3)
"""
MODEL_OF_IMAGES = """
def images():
    x = keras.Input((6, 4, 3))
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(x))
    model = keras.Model(x, keras.layers.Dense(3, name="out")(flat))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""


def test_samples_show_examples_as_they_are_and_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DatasetManifest, "class_names", ("cat", "dog", "<owl>"))
    lab = lab_of(tmp_path, MODEL_OF_IMAGES)
    (lab.code / "data.py").write_text(IMAGES, encoding="utf-8")
    spec = spec_of("images", train__steps=3, evaluate__samples=5)
    tip = lab.train_and_commit(spec, 3).tip
    assert tip is not None
    before = lab.evaluate(spec, tip)
    assert lab.evaluate(spec, tip, confusion_matrix=True) == before == lab.evaluate(spec, tip)
    warm = PROCESS_STATE.kept
    assert warm is not None
    assert warm.state.digest().root == tip.state_digest
    weights = saved(lab, spec, tip, "model/out/{}/")
    x, y = (np.asarray(part[:5]) for part in zip(*examples(lab, spec), strict=True))
    predicted = (x.reshape(5, -1) / np.float32(255) @ weights["kernel"] + weights["bias"]).argmax(axis=1)
    samples = read(lab, spec, tip).samples
    assert [(each.label, each.predicted) for each in samples] == list(zip(y.tolist(), predicted.tolist(), strict=True))
    shown = [tf.io.decode_png(base64.b64decode(each.png)).numpy() for each in samples]
    np.testing.assert_array_equal(shown, x)
    write_report(lab.log(spec), title="x")
    page = lab.home(spec).read("report/index.html").decode()
    table = page[page.index("<h2>Predictions</h2>") : page.index("<h2>Environment")]
    assert table.count('<img alt="the example" src="data:image/png;base64,') == 5
    assert table.count("&lt;owl&gt;") == int((y == 2).sum() + (predicted == 2).sum())


def test_texts_are_shown_and_other_inputs_are_not() -> None:
    texts = tf.constant([["good\nfilm"], ["its token=abcdefgh12345678"]])
    assert as_people_see_them(texts) == [("text", "good\nfilm"), ("text", "its token=***")]
    for other in ({"a": texts}, tf.constant([["a", "b"]]), tf.zeros((2, 6)), tf.zeros((2, 4, 4, 5))):
        assert as_people_see_them(other) == []
    ((kind, _),) = as_people_see_them(tf.zeros((1, 300, 100)))
    assert kind == "png"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_matrix_on_replicas(lab: Lab, replicas: int) -> None:
    assert_counted(in_fresh_process(matrices, folder=str(lab.root), replicas=replicas))


@pytest.mark.slow
def test_home_that_refuses_it_is_warned_of(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run_of("linear", 1, 4)
    tip = lab.train_and_commit(spec, 3).tip
    create = LocalStorage.create

    def refuse(storage: LocalStorage, path: str, data: bytes) -> None:
        if path.startswith("confusion/"):
            raise StorageError("the disk is full")
        create(storage, path, data)

    monkeypatch.setattr(LocalStorage, "create", refuse)
    metrics = lab.evaluate(spec, tip, confusion_matrix=True)
    assert metrics == lab.evaluate(spec, tip)
    assert "the confusion matrix was not saved: the disk is full" in lab.recorder.warnings
    write_report(lab.log(spec), title="x")
    assert b"Confusion matrix" not in lab.home(spec).read("report/index.html")
