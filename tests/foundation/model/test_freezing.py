"""`init.freeze`: frozen variables keep every bit, also over a resume."""

from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import ModelError
from tests.support.lab import Lab, built, lab_of, restored, spec_of

MODEL = """
def build():
    inner = keras.Input((6,))
    y = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(5, name="first")(inner))
    encoder = keras.Model(inner, y, name="encoder")
    x = keras.Input((6,))
    y = keras.layers.BatchNormalization(name="outer")(encoder(x))
    y = keras.layers.Dropout(0.3)(keras.layers.Dense(4, name="hidden")(y))
    model = keras.Model(x, keras.layers.Dense(3, name="head")(y))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01, use_ema=True), loss, metrics=["accuracy"])
    return model
"""
ENCODER = {
    "model/first/kernel",
    "model/first/bias",
    "model/norm/gamma",
    "model/norm/beta",
    "model/norm/moving_mean",
    "model/norm/moving_variance",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(tmp_path_factory.mktemp("lab"), MODEL)


def frozen_by(*patterns: str, run: str = "frozen") -> RunSpec:
    return spec_of("build", run=run, init={"freeze": list(patterns)})


def values(state: Any) -> dict[str, bytes]:
    return {
        leaf.path: leaf.components[0].numpy().tobytes()
        for leaf in state.leaves
        if leaf.path.startswith("model/") and not leaf.seed
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patterns", "still"),
    [
        (["encoder/*", "head/bias"], {*ENCODER, "model/head/bias"}),
        # Frozen variables only: the layers run as before, and moving statistics change.
        (["norm/gamma", "hidden/kernel"], {"model/norm/gamma", "model/hidden/kernel"}),
    ],
)
def test_frozen_variables_stay_and_others_train(lab: Lab, patterns: list[str], still: set[str]) -> None:
    spec = frozen_by(*patterns, run="-".join(patterns).replace("/", ".").replace("*", "all"))
    head = lab.train_and_commit(spec, 5)
    before, state = (restored(lab, spec, ref) for ref in head.retained)
    one, other = values(before), values(state)
    assert {path for path in one if one[path] == other[path]} == still
    slots = [leaf.path for leaf in state.leaves if leaf.path.startswith("optimizer/")]
    for path in still:
        name = path.removeprefix("model/").replace("/", "_")
        assert not any(name in slot for slot in slots)
    # A frozen variable is saved once; a moving statistic is saved per replica.
    moving = {path for path in one if "moving" in path}
    assert {record.path for record in state.signature if record.per_replica and record.path in one} == moving


@pytest.mark.slow
def test_cut_run_with_frozen_layers_is_bit_exact(lab: Lab) -> None:
    straight, cut = (frozen_by("encoder", "head/bias", run=name) for name in ("straight", "cut"))
    one = lab.relay(straight, 9)
    other = lab.relay(cut, 2, 5, 9, cold=True)
    assert one.tip is not None
    assert other.tip is not None
    assert one.tip.state_digest == other.tip.state_digest
    assert lab.evaluate(straight, one.tip) == lab.evaluate(cut, other.tip)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (
            ["encoder", "hed/*"],
            "init.freeze: hed/* matches no layer or variable of model.py:build; similar names: head",
        ),
        (["*"], "init.freeze: * leaves no trainable variable in model.py:build"),
        (["encoder", "outer", "hidden", "head"], "leaves no trainable variable in model.py:build"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(lab: Lab, patterns: list[str], words: str) -> None:
    with pytest.raises(ModelError) as refused:
        built(lab, frozen_by(*patterns))
    assert words in str(refused.value)


@pytest.mark.slow
def test_resume_with_other_frozen_layers_is_refused(lab: Lab, tmp_path: Path) -> None:
    own = Lab(tmp_path, lab.code)
    own.begin(frozen_by("encoder"))
    with pytest.raises(Exception, match=r"init\.freeze"):
        own.begin(frozen_by("head"))
