"""The same code has the same fingerprint in every process; Python state that is read during tracing changes it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from flows.proving.comparison import same_step
from flows.proving.diagnosis import causes_of
from tasks.foundation.contracts.log_entry import Commit
from tasks.foundation.contracts.segment import TracedStep
from tasks.train_segment import trainer
from tasks.train_segment.stage import forget_trainer
from tests.support.lab import Lab, lab_of, spec_of

MODEL = """
import itertools

TRACES = itertools.count()


class Counting(keras.layers.Layer):
    def call(self, x):
        return x * (1.0 + next(TRACES))


def counting():
    return compiled(Counting())


def honest():
    return compiled(keras.layers.Dropout(0.3))


def noisy():
    return compiled(keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x))))


def compiled(layer):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), layer, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    forget_trainer()
    yield lab_of(tmp_path, MODEL)
    forget_trainer()


def traced(lab: Lab, build: str) -> list[TracedStep]:
    """The fingerprints of two segments, each traced as in a new process."""
    spec = spec_of(build)
    lab.relay(spec, 2, 4, cold=True)
    bodies = [entry.body for entry in lab.log(spec).entries()]
    commits = [body for body in bodies if isinstance(body, Commit) and body.checkpoint.step > 0]
    return [body.traced for body in commits if body.traced is not None]


@pytest.mark.slow
def test_same_code_has_the_same_fingerprint(lab: Lab) -> None:
    one, other = traced(lab, "honest")
    assert one == other
    assert len(one.fingerprint) == len(one.circumstances) == 32
    assert lab.recorder.warnings == []


@pytest.mark.slow
def test_step_that_reads_changing_state_is_warned_about(lab: Lab) -> None:
    one, other = traced(lab, "counting")
    assert one.circumstances == other.circumstances
    assert one.fingerprint != other.fingerprint
    (warning,) = lab.recorder.warnings
    assert "this process traced another train step than the one that committed step 2" in warning
    assert "make it a constant or a variable" in warning


@pytest.mark.slow
def test_run_of_an_earlier_version_is_told_of_exact_draws(lab: Lab) -> None:
    spec = spec_of("noisy")
    earlier = TracedStep.model_validate_json('{"fingerprint": "f", "circumstances": "c"}')
    with patch.object(trainer, "traced_step", lambda *_function, **_settings: earlier):
        lab.relay(spec, 2, cold=True)
    lab.relay(spec, 4, 6, cold=True)
    (warning,) = lab.recorder.warnings
    assert warning.startswith("from step 2 on, the random operations of the train step draw as functions of train.seed")


@pytest.mark.slow
def test_two_models_have_different_fingerprints(lab: Lab) -> None:
    assert traced(lab, "honest")[0].fingerprint != traced(lab, "counting")[0].fingerprint


def test_proof_names_another_traced_step_as_the_cause() -> None:
    one, other = (TracedStep(fingerprint=each, circumstances="here") for each in "ab")
    elsewhere = TracedStep(fingerprint="c", circumstances="there")
    assert same_step([one, one, elsewhere])
    assert not same_step([one, elsewhere, other])
    (cause,) = causes_of(same_examples=True, repeatable=False, operations="", source="digits", same_step=False)
    assert cause.startswith("the processes traced different train steps from the same code")


def test_number_of_a_replica_does_not_count() -> None:
    import tensorflow as tf

    from tasks.train_segment.fingerprint import fingerprint

    def graph(name: str, value: int) -> Any:
        with tf.Graph().as_default() as made:
            tf.identity(tf.constant(value, name=name))
        return made.as_graph_def()

    for name in ("replica_id_in_sync_group", "cond/replica_id_in_sync_group_1"):
        assert fingerprint(graph(name, 0)) == fingerprint(graph(name, 1))
    assert fingerprint(graph("rate", 0)) != fingerprint(graph("rate", 1))
