"""Keras files whose variables match by the names or the positions of layers."""

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.checkpoint import WeightsReport
from baton.tasks.foundation.contracts.run_spec import InitSpec
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.init_or_restore.weights.loading import load_weights
from tests.support.event_recorder import EventRecorder
from tests.support.lab import Lab, built, lab_of, spec_of
from tests.support.weights_lab import (
    SUBCLASSED,
    fresh,
    load,
    others_of,
    refusal,
    same,
    values_of,
)


def test_renamed_layers_match_by_position_if_the_whole_file_fits(lab: Lab) -> None:
    """As in a notebook, where automatic names continue to count."""
    recorder = EventRecorder()
    before = others_of(fresh(lab, head="logits"))
    state, report = load(lab, "kept.weights.h5", head="logits", recorder=recorder)
    assert same(others_of(state), before)  # Keras would load these too
    kept = dict(np.load(lab.code / "weights.npz"))
    assert np.array_equal(values_of(state)["logits/kernel"], kept["head/kernel"])
    assert report.sources[0].remarks == (
        "layers were matched by position, as model.load_weights does, because their names differ",
    )
    assert any("matched by position" in text for text in recorder.warnings)
    assert report.left == ()
    message = refusal(lab, {"source": "kept.weights.h5", "exclude": ["*/nothing", "block"]}, head="logits")
    assert "exclude: */nothing matches no variable" in message
    message = refusal(lab, {"source": "kept.weights.h5", "exclude": ["block"]}, head="logits")
    assert "missing in the source: 2 variables: logits/kernel, logits/bias" in message
    assert "missing in the model: 2 variables: head/0, head/1" in message


def test_file_without_layer_names_matches_as_a_whole_or_by_keys(lab: Lab) -> None:
    """Keras wrote such files before 3.6: dense_1 in a key is a position, and may be another layer's name here."""
    shutil.copy(lab.code / "kept.weights.h5", lab.code / "old.weights.h5")
    with h5py.File(lab.code / "old.weights.h5", "a") as file:
        file.visititems(lambda _, item: item.attrs.pop("name", None) and None)
    state, report = load(lab, "old.weights.h5")
    assert same(values_of(state), dict(np.load(lab.code / "weights.npz")))
    assert "matched by position" in report.sources[0].remarks[0]
    head = {"source": "old.weights.h5", "include": ["head"]}
    assert "missing in the source: 2 variables: head/kernel, head/bias" in refusal(lab, head)
    keys = {"head/kernel": "layers/dense/vars/0", "head/bias": "layers/dense/vars/1"}
    _, report = load(lab, head | {"rename": keys})
    assert report.sources[0].loaded == keys


def test_subclassed_models_are_loaded(tmp_path: Path) -> None:
    own = lab_of(tmp_path, SUBCLASSED)
    source, spec = built(own, spec_of("build", train__seed=3)), spec_of("build")
    source.model.save_weights(own.code / "own.weights.h5")
    kept = values_of(source)
    assert {"own_model/left/kernel", "own_model/kept_otherwise/w"} <= kept.keys(), sorted(kept)
    state = built(own, spec)
    assert not same(values_of(state), kept)
    init = {"weights": "own.weights.h5"}
    report = load_weights(state, InitSpec.model_validate(init), code_folder=own.code, telemetry=own.recorder)
    assert report is not None
    assert same(values_of(state), kept)
    # A value that a layer saves in its own form has no name that could match a variable.
    part = {"source": "own.weights.h5", "exclude": ["*otherwise*"]}
    state = built(own, spec)
    report = load_weights(
        state, InitSpec.model_validate({"weights": part}), code_folder=own.code, telemetry=own.recorder
    )
    assert report is not None
    assert report.left == ("own_model/kept_otherwise/w",)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("hidden", {f"hidden/{layer}/{name}" for layer in ("one", "two") for name in ("kernel", "bias")}),
        ("omitting", {"omitting/b"}),
    ],
)
@pytest.mark.parametrize("head", ["head", "logits"])
def test_variables_that_a_file_lacks_are_named(kind: str, lost: set[str], head: str, tmp_path: Path) -> None:
    """Keras writes such files without a word, and loads them without one."""
    own = lab_of(tmp_path, SUBCLASSED)
    built(own, spec_of("lacking", train__seed=3, model__options={"kind": kind})).model.save_weights(
        own.code / "own.weights.h5"
    )
    state = built(own, spec_of("lacking", model__options={"kind": kind, "head": head}))
    before = values_of(state)

    def of(**more: Any) -> WeightsReport | None:
        init = InitSpec.model_validate({"weights": [{"source": "own.weights.h5", **more}]})
        return load_weights(state, init, code_folder=own.code, telemetry=own.recorder)

    with pytest.raises(WeightsError, match="missing in the source: ") as refused:
        of()
    assert min(lost) in str(refused.value)
    report = of(strict=False)
    assert report is not None
    assert set(report.left) == set(report.sources[0].missing) == lost
    assert set(report.sources[0].loaded) == set(before) - lost
    assert ("by position" in str(report.sources[0].remarks)) == (head == "logits")
    assert {path for path, value in values_of(state).items() if np.array_equal(value, before[path])} >= lost


def test_file_with_another_layer_count_is_not_matched_by_position(lab: Lab) -> None:
    message = refusal(lab, "kept.weights.h5", between=True)
    assert "missing in the source: 2 variables: between/kernel, between/bias" in message
    longer = fresh(lab, after=True)
    longer.model.save_weights(lab.code / "longer.weights.h5")
    message = refusal(lab, "longer.weights.h5")  # Keras would load it without a message
    assert "missing in the model: 4 variables: after/0, after/1" in message
    state, report = load(lab, {"source": "kept.weights.h5", "strict": False}, between=True)
    assert report.left == report.sources[0].missing == ("between/kernel", "between/bias")
    kept = dict(np.load(lab.code / "weights.npz"))
    assert same({path: value for path, value in values_of(state).items() if path in kept}, kept)


def test_bfloat16_in_hdf5_is_loaded(lab: Lab) -> None:
    policy = keras_policy("bfloat16")
    try:
        model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3, name="head", dtype="bfloat16")])
        model.save_weights(lab.code / "low.weights.h5")
    finally:
        keras_policy(policy)
    state, report = load(lab, {"source": "low.weights.h5", "include": ["head"]})
    assert report.sources[0].cast == ("head/kernel: bfloat16 -> float32", "head/bias: bfloat16 -> float32")
    assert np.array_equal(values_of(state)["head/kernel"], model.layers[0].kernel.numpy().astype("float32"))


def keras_policy(policy: Any) -> Any:
    before = tf.keras.config.dtype_policy()
    tf.keras.config.set_dtype_policy(policy)
    return before
