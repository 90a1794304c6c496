"""One train state in a process: built once, and never taken for another one."""

import gc
import weakref
from pathlib import Path

import keras
import pytest

from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, differing, lab_of, spec_of

MODEL = """
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


class Counts(Draws):
    def __init__(self):
        super().__init__()
        self.counts = CountsCalls()

    def call(self, x, training=False):
        return super().call(self.counts(x), training=training)


def counts():
    model = Counts()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class CountsTraces(layers.Subclassed):
    traces = 0

    def call(self, x, training=False):
        if training:
            self.traces = self.traces + 1
        return super().call(x, training=training)


def counts_traces():
    model = CountsTraces()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "changes"),
    [
        pytest.param("draws", {}, marks=pytest.mark.nightly),
        pytest.param("draws_in_its_step", {}, marks=pytest.mark.nightly),
        ("counts", {"train__accumulate": 2}),
        pytest.param("draws", {"train__callbacks": "callbacks.py:halves"}, marks=pytest.mark.nightly),
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


@pytest.mark.slow
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


def test_first_segment_has_one_model_which_leaves_memory(tmp_path: Path) -> None:
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
        warm = PROCESS_STATE.kept
        assert warm is not None
        model = weakref.ref(warm.state.model)
        del warm
        PROCESS_STATE.forget()
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_python_code_runs_as_in_a_new_process(tmp_path: Path) -> None:
    lab, spec = lab_of(tmp_path, MODEL), spec_of("counts_traces")
    start = lab.begin(spec).tip
    assert start is not None
    digest = lab.train(spec, start, 5).staged.state_digest
    warm = PROCESS_STATE.kept
    assert warm is not None
    assert warm.state.model.traces == 1
    PROCESS_STATE.forget()
    assert lab.train(spec, start, 5).staged.state_digest == digest
