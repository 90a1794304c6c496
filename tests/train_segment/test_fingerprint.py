"""The same code has the same fingerprint in every process; what is read during tracing changes it, and is refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.flows.proof.compare import causes_of, same_step
from baton.tasks.foundation.contracts.log_entry import Commit, Environment, TracedStep
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import IdentityChanged
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, lab_of, spec_of

MODEL = """
import itertools

import numpy as np

TRACES = itertools.count()


class Counting(keras.layers.Layer):
    def call(self, x):
        return x * (1.0 + next(TRACES))


class Growing(keras.layers.Layer):
    def call(self, x):
        for _ in range(1 + next(TRACES)):
            x = x * 0.5
        return x


class Reading(keras.layers.Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, x):
        numbers = np.load("numbers.npy")
        words = [f"w{each}" for each in numbers.astype(int)]
        keys = tf.constant(words[:1])
        match self.kind:
            case "array":
                factor = tf.gather(numbers, [1])
            case "tensor":
                with tf.init_scope():
                    tensor = tf.constant(np.repeat(numbers, 200))
                factor = tf.gather(tensor, [1])
            case "words":
                factor = tf.strings.to_number(tf.strings.substr(words, 1, 1))[1:2]
            case "table":
                with tf.init_scope():
                    values = tf.constant(numbers.astype("int64"))
                    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], values), -1)
                factor = tf.cast(table.lookup(tf.constant(["b"])), tf.float32)
            case "number":
                factor = float(numbers[1])
        return x * factor


def reading(kind):
    return compiled(Reading(kind))


def growing():
    return compiled(Growing())


def counting():
    return compiled(Counting())


def compiled(layer):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), layer, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    PROCESS_STATE.forget()
    yield lab_of(tmp_path, MODEL)
    PROCESS_STATE.forget()


def traced(lab: Lab, build: str) -> list[TracedStep]:
    """The fingerprints of two segments, the second traced as in a new process."""
    spec = spec_of(build)
    lab.relay(spec, 2)
    lab.relay(spec, 4, cold=True)
    return committed(lab, spec)


def committed(lab: Lab, spec: RunSpec) -> list[TracedStep]:
    bodies = [entry.body for entry in lab.log(spec).entries()]
    commits = [body for body in bodies if isinstance(body, Commit) and body.checkpoint.step > 0]
    return [body.traced for body in commits if body.traced is not None]


@pytest.mark.slow
def test_step_that_counts_its_traces_is_refused(lab: Lab) -> None:
    with pytest.raises(IdentityChanged) as refused:
        traced(lab, "counting")
    found = str(refused.value)
    assert found.startswith(
        "model.py:counting: the train step computes with other values than the one that committed step 2, from the "
        "same code and settings: "
    )
    assert re.search(r": [0-9]+\.0, model\.py, line \d+: return x \* \(1\.0 \+ next\(TRACES\)\)\n", found)
    assert "hint: let the code read what it read then" in found
    assert refused.value.exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        pytest.param("array", "[1.0, 2.0], model.py, line", marks=pytest.mark.nightly),
        ("tensor", "float32[400], model.py, line"),
        ("words", "['w1', 'w2'], model.py, line"),
        ("table", "table of 2 entries, model.py, line"),
        pytest.param("number", "2.0, model.py, line", marks=pytest.mark.nightly),
    ],
)
def test_other_values_are_refused_until_accepted(
    lab: Lab, kind: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lab.code)
    spec = spec_of("reading", model__options={"kind": kind})
    np.save("numbers.npy", np.float32([1, 3]))
    lab.relay(spec, 2)
    np.save("numbers.npy", np.float32([1, 2]))
    with pytest.raises(IdentityChanged) as refused:
        lab.relay(spec, 4, cold=True)
    assert shown in str(refused.value).replace("b'", "'")
    if kind == "table":
        tip = lab.relay(spec, 4, cold=True, accept=("model.code",)).tip
        assert tip is not None
        assert tip.step == 4
        lab.relay(spec, 6, cold=True)
        assert lab.recorder.warnings == []
        before, one, same = committed(lab, spec)
        assert before != one == same, "the same code has the same fingerprint"
        assert len(one.fingerprint) == len(one.circumstances) == 32
        np.save("numbers.npy", np.float32([1, 3]))
        with pytest.raises(IdentityChanged, match="the one that committed step 6"):
            lab.relay(spec, 8, cold=True)


@pytest.mark.slow
def test_step_with_other_operations_is_warned_about(lab: Lab) -> None:
    one, other = traced(lab, "growing")
    assert one.circumstances == other.circumstances
    assert one.fingerprint != other.fingerprint
    (warning,) = lab.recorder.warnings
    assert "this process traced another train step than the one that committed step 2" in warning
    assert "make it a constant or a variable" in warning


def test_proof_names_another_traced_step_as_the_cause() -> None:
    one, other = (TracedStep(fingerprint=each, circumstances="here", structure="s", contents="0:") for each in "ab")
    elsewhere = TracedStep(fingerprint="c", circumstances="there", structure="s", contents="0:")
    assert same_step([one, one, elsewhere])
    assert not same_step([one, elsewhere, other])
    (cause,) = causes_of(same_examples=True, repeatable=False, operations="", source="digits", same_step=False)
    assert cause.startswith("the processes traced different train steps from the same code")


def test_number_of_a_replica_does_not_count() -> None:
    import tensorflow as tf

    from baton.tasks.train_segment.fingerprint import traced_step

    environment = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})

    def fingerprint(name: str, value: int) -> str:
        function = tf.function(lambda: tf.constant(value, name=name)).get_concrete_function()
        return traced_step(function, environment=environment, identity={}).step.fingerprint

    for name in ("replica_id_in_sync_group", "cond/replica_id_in_sync_group_1"):
        assert fingerprint(name, 0) == fingerprint(name, 1)
    assert fingerprint("rate", 0) != fingerprint("rate", 1)
