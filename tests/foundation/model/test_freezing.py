"""`init.freeze`: frozen variables keep every bit, also over a resume."""

from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import IdentityChanged, ModelError
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
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
    start = lab.begin(spec).tip
    assert start is not None
    end = lab.train(spec, start, 5).staged
    if "encoder/*" in patterns:  # a cut run has the same bits
        middle = lab.train(spec, start, 2).staged
        PROCESS_STATE.forget()
        assert lab.train(spec, middle, 5).staged.state_digest == end.state_digest
        with pytest.raises(IdentityChanged, match=r"init\.freeze"):
            lab.begin(frozen_by("head", run=spec.run))
    state = restored(lab, spec, start)
    before = values(state)
    restore_checkpoint(state, lab.home(spec), end)
    after = values(state)
    assert {path for path in before if before[path] == after[path]} == still
    slots = [leaf.path for leaf in state.leaves if leaf.path.startswith("optimizer/")]
    for path in still:
        name = path.removeprefix("model/").replace("/", "_")
        assert not any(name in slot for slot in slots)
    # A frozen variable is saved once; a moving statistic is saved per replica.
    moving = {path for path in before if "moving" in path}
    assert {record.path for record in state.signature if record.per_replica and record.path in before} == moving


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
