"""`train.precision`: which layers compute in it, what stays float32, and which conflicts are refused."""

from pathlib import Path
from typing import Any

import keras
import pytest

from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, built, lab_of, spec_of

MODEL = """
POLICY = ""
if POLICY:
    keras.config.set_dtype_policy(POLICY)


def build(policy=None, dtype=None):
    if policy:
        keras.config.set_dtype_policy(policy)
    x = keras.Input((6,))
    y = keras.layers.Dense(3, dtype=dtype)(keras.layers.Dense(5, dtype=dtype)(x))
    model = keras.Model(x, y)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""


def dtypes(lab: Lab, **settings: Any) -> tuple[set[str], set[str]]:
    """Return the compute dtypes of the layers, and the dtypes of weights and optimizer slots."""
    state = built(lab, spec_of("build", **settings))
    dense = [layer for layer in state.model.layers if isinstance(layer, keras.layers.Dense)]
    floating = {record.dtype for record in state.signature if "float" in record.dtype}
    return {layer.compute_dtype for layer in dense}, floating


@pytest.mark.parametrize("build", ["functional", "subclassed"])
def test_bfloat16_computes_and_variables_stay_float32(tmp_path: Path, build: str) -> None:
    state = built(Lab(tmp_path), spec_of(build, train__precision="bfloat16"))
    assert "bfloat16" in {layer.compute_dtype for layer in state.model.layers}
    assert {record.dtype for record in state.signature if "float" in record.dtype} == {"float32"}
    plain = built(Lab(tmp_path), spec_of(build, train__precision="float32"))
    assert {layer.compute_dtype for layer in plain.model.layers} == {"float32"}


def test_without_precision_the_module_policy_holds(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    assert dtypes(lab) == ({"float32"}, {"float32"})
    assert dtypes(lab, model__options={"policy": "mixed_bfloat16"}) == ({"bfloat16"}, {"float32"})
    settings = {"train__precision": "bfloat16", "model__options": {"policy": "mixed_bfloat16"}}
    assert dtypes(lab, **settings) == ({"bfloat16"}, {"float32"})


@pytest.mark.parametrize(
    ("precision", "policy", "options"),
    [
        ("bfloat16", "mixed_float16", {}),
        ("float32", "mixed_bfloat16", {}),
        ("bfloat16", "", {"policy": "float32"}),
        ("float32", "", {"policy": "mixed_bfloat16"}),
    ],
)
def test_conflicting_policies_are_refused(tmp_path: Path, precision: str, policy: str, options: dict[str, str]) -> None:
    lab = lab_of(tmp_path, MODEL.replace('POLICY = ""', f"POLICY = {policy!r}"))
    with pytest.raises(ModelError) as refused:
        dtypes(lab, train__precision=precision, model__options=options)
    other = policy or options["policy"]
    assert f"train.precision = {precision}, but model.py:build sets the dtype policy {other}" in str(refused.value)
    assert refused.value.exit_code == 2


def test_layers_with_another_dtype_are_refused(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    with pytest.raises(ModelError, match=r"no layer of model.py:build computes in it; the layers compute in float32"):
        dtypes(lab, train__precision="bfloat16", model__options={"dtype": "float32"})


@pytest.mark.slow
@pytest.mark.nightly
def test_bfloat16_run_resumes_bit_exact(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    digests = []
    for run, borders in (("straight", [8]), ("cut", [3, 8])):
        spec = spec_of("functional", run=run, train__precision="bfloat16")
        PROCESS_STATE.forget()
        head = lab.relay(spec, *borders, cold=True)
        assert head.tip is not None
        digests.append(head.tip.state_digest)
    assert digests[0] == digests[1]
