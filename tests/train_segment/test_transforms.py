"""Runs with transforms: the same bits however they are cut, and refused when the transforms change."""

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.dataset.transforms import transform_errors
from baton.tasks.foundation.errors import IdentityChanged, ModelError, StepFailed
from tests.support.lab import Lab, differing, in_fresh_process, lab_of

MODEL = """
def build():
    x = keras.Input((7,))
    y = keras.layers.Dense(5, activation="tanh")(x)
    model = keras.Model(x, keras.layers.Dense(3)(y))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model
"""
TRANSFORMS = '''
import keras
import tensorflow as tf

NOISE = keras.layers.GaussianNoise(0.2)


def augment(example, *, seed):
    """Append a random number, and add noise."""
    x, y = example
    x = tf.concat([x, tf.random.stateless_uniform([1], seed)], axis=0)
    return NOISE(x, training=True), tf.one_hot(y, 3)


def plain(example):
    x, y = example
    return tf.pad(x, [[0, 1]]), tf.one_hot(y, 3)


def mixup(batch, *, seed):
    x, y = batch
    share = tf.random.stateless_uniform([], seed)
    return share * x + (1 - share) * x[::-1], share * y + (1 - share) * y[::-1]
'''


def make_lab(folder: Path) -> Lab:
    folder.mkdir(exist_ok=True)
    lab = lab_of(folder, MODEL)
    (lab.code / "augment.py").write_text(TRANSFORMS, encoding="utf-8")
    return lab


def spec_of(replicas: int = 1, **data: Any) -> RunSpec:
    transforms = {
        "transform": "augment.py:augment",
        "batch_transform": "augment.py:mixup",
        "validation_transform": "augment.py:plain",
    }
    return RunSpec.model_validate(
        {
            "run": "augmented",
            "storage": "unused",
            "data": {"source": "data.py:load", "validation_fraction": 0.2, "shard_examples": 9} | transforms | data,
            "model": "model.py:build",
            "train": {"steps": 14, "global_batch_size": 8, "log_every_steps": 4},
            "accelerator": {"kind": "cpu", "replicas": replicas},
        }
    )


def trained(folder: str, replicas: int) -> list[Any]:
    """Train straight, and in two segments, the second like a new process; return digest, metrics, tensors of each."""
    from tests.support.lab import keep_trainer

    found = []
    for name, borders in (("straight", (14,)), ("cut", (5, 14))):
        lab, spec = make_lab(Path(folder) / name), spec_of(replicas)
        lab.relay(spec, borders[0])
        tip = lab.relay(spec, *borders, cold=True).tip
        assert tip is not None
        metrics = lab.evaluate(spec, tip)
        keep_trainer()
        tensors = {key: value[2].hex() for key, value in lab.tensors(spec, tip).items()}
        found.append({"digest": tip.state_digest, "metrics": metrics, "tensors": tensors})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_cut_run_has_the_bits_of_the_straight_one(tmp_path: Path, replicas: int) -> None:
    straight, cut = in_fresh_process(trained, folder=str(tmp_path), replicas=replicas)
    assert cut["digest"] == straight["digest"], differing(cut["tensors"], straight["tensors"])
    assert cut["metrics"] == straight["metrics"]


def test_changed_transform_is_refused_and_can_be_accepted(tmp_path: Path) -> None:
    from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall
    from baton.tasks.init_or_restore.stage import init_or_restore

    lab = make_lab(tmp_path)
    spec = spec_of(batch_transform=None)
    lab.begin(spec)
    changed = lab.copy_of_code("other", ("augment.py", "GaussianNoise(0.2)", "GaussianNoise(0.3)"))
    with pytest.raises(IdentityChanged, match=r"data\.transform\.values\.NOISE"):
        changed.begin(spec)
    commented = lab.copy_of_code("commented", ("augment.py", "Append a random number", "Append a number"))
    commented.begin(spec)
    without = spec_of(batch_transform="augment.py:mixup")
    with pytest.raises(IdentityChanged, match=r"data\.batch_transform"):
        lab.begin(without)
    call = InitOrRestoreCall(spec=spec, dataset=lab.prepare(spec), accept=("data.transform",))
    head = init_or_restore(call, changed.place(spec))
    assert head.identity["data.transform"]["function"] == "augment"
    assert json.loads(json.dumps(dict(head.identity)))["data.batch_transform"] is None


def test_failing_operation_names_the_transform_and_the_steps(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    spec = spec_of(batch_transform=None)
    check = 'x, y = example\n    tf.debugging.Assert(y < 2, ["y is two"])\n    x = tf.concat'
    failing = lab.copy_of_code("failing", ("augment.py", "x, y = example\n    x = tf.concat", check))
    head = failing.begin(spec)
    assert head.tip is not None
    expected = r"augment\.py:augment, augment\.py:plain failed between step 0 and .*assertion failed: \[y"
    with pytest.raises(StepFailed, match=expected):
        failing.train(spec, head.tip, 14)


@pytest.mark.parametrize(
    ("failed", "nodes", "blamed"),
    [
        ("augment", ["{{node Assert/Assert}}", "while/body/_1/while/IteratorGetNext"], True),
        ("augment on a replica", ["{{node Add}}", "MultiDeviceIteratorGetNextFromShard", "while/LoopCond/_3"], True),
        ("the batches", ["{{node while/body/_1/while/IteratorGetNext_1}}", "while/LoopCond/_62/_38"], True),
        ("the step", ["{{node while/loss/GatherV2}}", "while/body/_1/while/IteratorGetNext/_20"], False),
    ],
)
def test_transform_is_named_if_it_failed_and_not_if_its_batch_was_waited_for(
    failed: str, nodes: list[str], blamed: bool
) -> None:
    # On several replicas TensorFlow ends a text with an operation that waited for the failed one: any, by chance.
    text = "".join([f"(0) INVALID_ARGUMENT:  {failed}", *(f"\n\t [[{node}]]" for node in nodes)])
    text += "\n  (1) CANCELLED:  [[while/body/_1/while/IteratorGetNext]]"
    error = ModelError if blamed else tf.errors.InvalidArgumentError
    with pytest.raises(error), transform_errors(spec_of().data, "between step 0 and step 1"):
        raise tf.errors.InvalidArgumentError(None, None, text)


def test_validation_with_other_inputs_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    spec = spec_of(validation_transform=None)
    with pytest.raises(ModelError) as refused:
        lab.begin(spec)
    for words in ("training: x float32[7]", "validation: x float32[6]", "hint: set data.validation_transform"):
        assert words in str(refused.value)
    assert lab.log(spec).head() is None
