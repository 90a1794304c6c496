"""One train state in a process: built once, and never taken for another one."""

import gc
import shutil
import weakref
from pathlib import Path

import keras
import pytest

from tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, differing, lab_of, spec_of

MODEL = """
class Counted(layers.Subclassed):
    traces = 0

    def call(self, x, training=False):
        if training:
            self.traces = self.traces + 1
        return super().call(x, training=training)


def counted():
    model = Counted()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Draws(layers.Subclassed):
    def call(self, x, training=False):
        import random

        import numpy as np

        shift = random.random() + np.random.uniform() if training else 0.0
        return super().call(x, training=training) + shift * ops.arange(3, dtype="float32")


def draws():
    model = Draws()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class DrawsInItsStep(layers.OwnTracker, Draws):
    pass


def draws_in_its_step():
    model = DrawsInItsStep()
    model.compile("adam")
    return model


class CountsCalls(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def counts_calls():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3)(CountsCalls()(keras.layers.BatchNormalization()(x))))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""
CALLBACKS = """
import random

import keras


class Halves(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.drawn = random.random()

    def on_train_begin(self, logs=None):
        self.begun = random.random()
        weights = self.model.trainable_variables[0]
        weights.assign(weights * 0.5)

    def on_epoch_end(self, epoch, logs=None):
        self.logs = logs


def halves():
    return [Halves()]
"""


def alive() -> int:
    """Models in memory; garbage counts."""
    return sum(issubclass(type(each), keras.Model) for each in gc.get_objects())


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        ("draws", {}),
        ("draws_in_its_step", {}),
        ("counts_calls", {"train__accumulate": 2}),
        ("draws", {"train__callbacks": "callbacks.py:halves"}),
        ("draws_in_its_step", {"train__callbacks": "callbacks.py:halves"}),
    ],
    ids=["model", "own-step", "accumulate", "callbacks", "own-step-callbacks"],
)
def test_state_of_a_new_run_is_trained_as_it_is(tmp_path: Path, build: str, changes: dict[str, object]) -> None:
    lab, spec = lab_of(tmp_path, MODEL), spec_of(build, **changes)
    (lab.code / "callbacks.py").write_text(CALLBACKS, encoding="utf-8")
    start = lab.begin(spec).tip
    assert start is not None
    built = PROCESS_STATE.kept
    assert built is not None
    lab.folder(spec, start).rename(tmp_path / "kept")
    shared = lab.train(spec, start, 5).staged
    assert PROCESS_STATE.kept is built
    (tmp_path / "kept").rename(lab.folder(spec, start))
    PROCESS_STATE.forget()
    restored = lab.train(spec, start, 5).staged
    assert differing(lab.tensors(spec, restored), lab.tensors(spec, shared)) == []


def test_means_of_a_restored_checkpoint_are_read(tmp_path: Path) -> None:
    """A state that was restored for an evaluation has no means of a custom train_step; its checkpoint has them."""
    lab, spec = lab_of(tmp_path, MODEL), spec_of("draws_in_its_step", train__log_every_steps=11)
    tip = lab.train_and_commit(spec, 5).tip
    assert tip is not None
    straight = lab.train(spec, tip, 11)
    lab.begin(spec)
    lab.evaluate(spec, tip)
    again = lab.train(spec, tip, 11)
    assert [row.metrics for row in again.history] == [row.metrics for row in straight.history]
    assert again.staged.state_digest == straight.staged.state_digest


def test_first_segment_has_one_model_in_memory(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("plain")
    PROCESS_STATE.forget()
    gc.collect()
    gc.disable()  # a collection that happens to run would hide garbage
    try:
        before = alive()
        tip = lab.train_and_commit(spec, 5).tip
        assert tip is not None
        lab.evaluate(spec, tip)
        assert alive() - before == 1
    finally:
        gc.enable()


def test_forgotten_model_leaves_memory(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("plain")
    lab.train_and_commit(spec, 5)
    warm = PROCESS_STATE.kept
    assert warm is not None
    model = weakref.ref(warm.state.model)
    del warm
    gc.disable()
    try:
        PROCESS_STATE.forget()
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_evaluation_at_a_start_restores_for_training_too(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional")
    tip = lab.train_and_commit(spec, 5).tip
    assert tip is not None
    straight = lab.train(spec, tip, 11).staged
    lab.begin(spec)  # a second command
    lab.evaluate(spec, tip)
    shutil.rmtree(lab.folder(spec, tip))
    assert lab.train(spec, tip, 11).staged.state_digest == straight.state_digest


@pytest.mark.parametrize("build", ["counted", "draws"])
@pytest.mark.slow
def test_python_code_runs_as_in_a_new_process(tmp_path: Path, build: str) -> None:
    lab, spec = lab_of(tmp_path, MODEL), spec_of(build)
    start = lab.begin(spec).tip
    assert start is not None
    digests = {lab.train(spec, start, 5).staged.state_digest}
    trainer_state = PROCESS_STATE.kept
    assert trainer_state is not None
    assert getattr(trainer_state.state.model, "traces", 1) == 1
    PROCESS_STATE.forget()
    digests.add(lab.train(spec, start, 5).staged.state_digest)
    assert len(digests) == 1
