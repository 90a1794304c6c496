"""An evaluation of the state that training keeps changes no bit of it, and gives the metrics of a separate model."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.errors import StepFailed
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, in_fresh_process, lab_of, spec_of

FORMS = {"several": "dicts", "attention": "sequence", "weighted": "weighted"}
# On one replica, and on two: by day models whose evaluation changes most; the others at night.
AT_NIGHT = ("mixed", "counting", "tf_generator", "functional", "several", "own_tracker")
AT_NIGHT_ON_TWO = ("averaged", "own_step_compiled", "functional", "attention")

# Its test_step changes everything that a test_step can reach.
MODEL = """
class Restless(layers.Subclassed):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.seeds = keras.random.SeedGenerator(4)
        self.generator = tf.random.Generator.from_seed(8)
        self.tested = tf.Variable(0, dtype=tf.int64, trainable=False, name="tested")

    def train_step(self, data):
        # A checkpoint holds only variables that training uses.
        keras.random.uniform((), seed=self.seeds)
        self.generator.uniform(())
        self.tested.assign_add(0)
        return super().train_step(data)

    def test_step(self, data):
        x, y = data
        logits = self(x, training=True)
        self.tested.assign_add(1)
        noise = keras.random.uniform((), seed=self.seeds) + self.generator.uniform(())
        for weight in self.trainable_variables:
            weight.assign(weight * 0.5)
        slot = self.optimizer.variables[-1]
        slot.assign(slot + 1.0)
        return {**self.compute_metrics(x, y, logits), "noise": noise}


def restless():
    model = Restless()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Escaping(layers.Subclassed):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.bias = tf.Variable(0.0, trainable=False, name="escaping")

    def call(self, x, training=False):
        return super().call(x, training=training) + self.bias

    def test_step(self, data):
        def escape():
            self.bias.assign_add(1.0)

        tf.py_function(escape, [], [])
        return super().test_step(data)


def escaping():
    model = Escaping()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Phased(layers.Subclassed):
    shift = 0.0

    def call(self, x, training=False):
        return super().call(x, training=training) + self.shift * ops.arange(3, dtype="float32")


def phased():
    model = Phased()
    model.shift = 0.0
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Shift(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.shift = 5.0


def shifting():
    return [Shift()]
"""


def bytes_of(state: Any) -> dict[str, list[bytes]]:
    """Every variable of a train state, on every replica."""
    return {leaf.path: [part.numpy().tobytes() for part in leaf.components] for leaf in state.leaves}


def evaluated(folder: str, build: str, replicas: int, code: str | None = None) -> dict[str, Any]:
    """Train, evaluate the state in memory, and evaluate the same checkpoint with a restored state."""
    lab = Lab(Path(folder)) if code is None else Lab(Path(folder), Path(code))
    # Step 5 is one step after a logged row, so the metrics are not zero.
    spec = spec_of(build, form=FORMS.get(build, "plain"), replicas=replicas)
    tip = lab.train_and_commit(spec, 5).tip
    assert tip is not None
    warm = PROCESS_STATE.kept
    assert warm is not None
    before, digest = bytes_of(warm.state), warm.state.digest().root
    files = lab.folder(spec, tip)
    shutil.copytree(files, files.with_suffix(".copy"))
    shutil.rmtree(files)
    of_trained = [lab.evaluate(spec, tip), lab.evaluate(spec, tip)]
    shutil.move(files.with_suffix(".copy"), files)
    assert PROCESS_STATE.kept is warm
    after = bytes_of(warm.state)
    PROCESS_STATE.forget()
    of_restored = [lab.evaluate(spec, tip), lab.evaluate(spec, tip)]
    return {
        "changed": [path for path in before if before[path] != after[path]],
        "same digest": digest == warm.state.digest().root == tip.state_digest,
        "trained": of_trained,
        "restored": of_restored,
    }


def assert_same(found: dict[str, Any]) -> None:
    assert found["changed"] == []
    assert found["same digest"]
    assert found["trained"] == found["restored"]
    assert found["trained"][0] == found["trained"][1]


@pytest.mark.parametrize("build", ["averaged", *(pytest.param(each, marks=pytest.mark.nightly) for each in AT_NIGHT)])
@pytest.mark.slow
def test_evaluation_leaves_the_trained_state_as_it_is(tmp_path: Path, build: str) -> None:
    assert_same(evaluated(str(tmp_path), build, 1))


@pytest.mark.parametrize("build", [pytest.param("restless", marks=pytest.mark.nightly), "escaping"])
@pytest.mark.slow
def test_whatever_test_step_changes_is_put_back(tmp_path: Path, build: str) -> None:
    """On two replicas below."""
    lab = lab_of(tmp_path, MODEL)
    assert_same(evaluated(str(tmp_path), build, 1, str(lab.code)))


def evaluated_on_two_replicas(folder: str, own: list[str], of_zoo: list[str]) -> dict[str, Any]:
    code = str(lab_of(Path(folder), MODEL).code)
    return {build: evaluated(folder, build, 2, code) for build in own} | {
        build: evaluated(folder, build, 2) for build in of_zoo
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "of_zoo"),
    [(["restless"], []), pytest.param([], list(AT_NIGHT_ON_TWO), marks=pytest.mark.nightly)],
)
def test_evaluation_on_replicas_leaves_the_state_as_it_is(tmp_path: Path, own: list[str], of_zoo: list[str]) -> None:
    found = in_fresh_process(evaluated_on_two_replicas, folder=str(tmp_path), own=own, of_zoo=of_zoo)
    assert found.keys() == {*own, *of_zoo}
    for each in found.values():
        assert_same(each)


@pytest.mark.slow
def test_model_that_callbacks_changed_is_not_evaluated(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    spec = spec_of("phased", train__callbacks="model.py:shifting")
    tip = lab.train_and_commit(spec, 5).tip
    assert tip is not None
    trained = PROCESS_STATE.kept
    assert trained is not None
    metrics = lab.evaluate(spec, tip)
    assert PROCESS_STATE.kept is trained
    PROCESS_STATE.forget()
    assert lab.evaluate(spec, tip) == metrics


@pytest.mark.slow
def test_failed_evaluation_drops_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import baton.tasks.evaluate.evaluator

    lab, spec = Lab(tmp_path), spec_of("plain")
    tip = lab.train_and_commit(spec, 5).tip
    assert tip is not None
    expected = lab.train(spec, tip, 11).staged
    PROCESS_STATE.forget()
    lab.train(spec, lab.begin(spec).tip, 5)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        fail = StepFailed("fails while the averages are in use")
        patch.setattr(baton.tasks.evaluate.evaluator, "take_metrics", lambda *_: (_ for _ in ()).throw(fail))
        with pytest.raises(StepFailed):
            lab.evaluate(spec, tip)
    assert PROCESS_STATE.kept is None
    assert lab.train(spec, tip, 11).staged.state_digest == expected.state_digest
