"""Accepted changes that give the model other variables: what means the same goes on, what is new begins fresh."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.checkpoint import CarriedState, CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Change, Head
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall
from baton.tasks.foundation.errors import BatonError, StateMismatch
from tests.support.lab import Lab, built, in_fresh_process, lab_of, restored, spec_of

MODEL = """
from keras import optimizers
from keras.optimizers.schedules import CosineDecay


def build(optimizer="Adam", rate=0.01, cosine=False, frozen=False, top2=False, dropout=0.0, lora=0, units=4, bias=True,
          head="head", more=0, norm=True, scaled=False, settings=None):
    x = keras.Input((6,))
    base = keras.layers.Dense(units, activation="relu", name="base")
    y = base(x)
    if norm:
        y = keras.layers.BatchNormalization(name="norm")(y)
    y = keras.layers.Dropout(dropout)(y)
    for number in range(more):
        y = keras.layers.Dense(units)(y)
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax", name=head, use_bias=bias)(y))
    if lora:
        base.enable_lora(lora)
    base.trainable = not frozen
    made = getattr(optimizers, optimizer)(CosineDecay(rate, 11) if cosine else rate, **(settings or {}))
    made = optimizers.LossScaleOptimizer(made) if scaled else made
    top = [keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")] if top2 else []
    model.compile(made, "sparse_categorical_crossentropy", metrics=[*top, "accuracy"])
    return model
"""
ACCEPT = ("model.options", "model.config", "compile.optimizer", "compile.metrics")


@dataclass(frozen=True)
class Case:
    """A change of the options, and what begins fresh or is dropped by it: names without positions."""

    after: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    fresh: str = ""
    dropped: str = ""
    replicas: int = 2  # at most
    values: dict[str, float] = field(default_factory=dict)  # of the restored state


BASE = "base_kernel base_bias"
ALL = f"{BASE} head_kernel head_bias norm_gamma norm_beta"


def slots(names: str, *kinds: str) -> str:
    return " ".join(f"{name}_{kind}" for name in names.split() for kind in kinds)


LORA = "base_lora_kernel_a base_lora_kernel_b"
SGD = {"optimizer": "SGD", "settings": {"momentum": 0.9}}
ADAM_SLOTS = slots(ALL, "momentum", "velocity")
CASES = {
    "metric added": Case({"top2": True}, fresh="top2/total top2/count"),
    "metric removed": Case({}, {"top2": True}, dropped="top2/total top2/count"),
    "Adam to AdamW": Case({"optimizer": "AdamW"}),
    "Adam to Nadam": Case({"optimizer": "Nadam"}, fresh="variable"),
    "Adam to SGD": Case({"optimizer": "SGD"}, fresh="learning_rate", dropped=f"learning_rate {ADAM_SLOTS}"),
    "Adam to SGD with momentum": Case(
        SGD, fresh=f"learning_rate {slots(ALL, 'momentum')}", dropped=f"learning_rate {ADAM_SLOTS}"
    ),
    "momentum removed": Case({"optimizer": "SGD"}, SGD, dropped=slots(ALL, "momentum")),
    "unfrozen": Case({}, {"frozen": True}, fresh=slots(BASE, "momentum", "velocity")),
    "frozen": Case({"frozen": True}, dropped=slots(BASE, "momentum", "velocity")),
    "unfrozen with another optimizer and metric": Case(
        {"optimizer": "AdamW", "top2": True},
        {"frozen": True},
        fresh=f"{slots(BASE, 'momentum', 'velocity')} top2/total top2/count",
    ),
    "rate": Case({"rate": 0.5, "optimizer": "AdamW"}, values={"learning_rate": 0.5}),
    "rate to schedule": Case({"cosine": True}, dropped="learning_rate"),
    "schedule to rate": Case({}, {"cosine": True}, fresh="learning_rate", values={"learning_rate": 0.01}),
    "averages": Case({"settings": {"use_ema": True}}, fresh=slots(ALL, "average")),
    "no averages": Case({}, {"settings": {"use_ema": True}}, dropped=slots(ALL, "average")),
    "accumulation": Case(
        {"settings": {"gradient_accumulation_steps": 2}},
        fresh=slots(ALL, "gradient_accumulator"),
        replicas=1,
        values={"iteration": 6},
    ),
    "no accumulation": Case(
        {},
        {"settings": {"gradient_accumulation_steps": 2}},
        dropped=slots(ALL, "gradient_accumulator"),
        replicas=1,
        values={"iteration": 1},
    ),
    "loss scale": Case({"scaled": True}, fresh="iteration learning_rate step_counter dynamic_scale", replicas=1),
    "no loss scale": Case(
        {}, {"scaled": True}, dropped="iteration learning_rate step_counter dynamic_scale", replicas=1
    ),
    "factored": Case(
        {"optimizer": "Adafactor", "top2": True}, {"optimizer": "Adafactor"}, fresh="top2/total top2/count"
    ),
    "factored, unfrozen": Case(
        {"optimizer": "Adafactor"},
        {"optimizer": "Adafactor", "frozen": True},
        # Keras gives the factors of all kernels one name.
        fresh=f"{'kernel ' * 4}{'bias ' * 4}gamma gamma beta beta {slots(BASE, 'velocity')}",
        dropped="kernel kernel bias bias gamma gamma beta beta",
    ),
    "dropout": Case({"dropout": 0.3}, fresh="seed_generator/seed_generator_state"),
    "no dropout": Case({}, {"dropout": 0.3}, dropped="seed_generator/seed_generator_state"),
    "lora": Case(
        {"lora": 2},
        fresh=f"base/lora_kernel_a base/lora_kernel_b {slots(LORA, 'momentum', 'velocity')}",
        dropped=slots("base_kernel", "momentum", "velocity"),
    ),
    "bias": Case({}, {"bias": False}, fresh=f"head/bias {slots('head_bias', 'momentum', 'velocity')}"),
}
# Each kind of variable that a change adds or drops; by night the others too, which are the way back or a part.
BY_DAY = (
    "Adam to Nadam", "Adam to SGD with momentum", "unfrozen with another optimizer and metric", "rate", "averages",
    "accumulation", "loss scale", "factored, unfrozen", "dropout", "lora",
)  # fmt: skip


def without_positions(paths: tuple[str, ...]) -> list[str]:
    """The last part of a slot's path, the last two of others'."""
    parts = [path.split("/") for path in paths]
    return sorted(each[-1] if each[0] == "optimizer" else "/".join(each[-2:]) for each in parts)


def begin(lab: Lab, options: dict[str, Any], *accept: str, replicas: int = 1) -> Head:
    from baton.tasks.init_or_restore.stage import init_or_restore

    spec = spec_of("build", model__options=options, replicas=replicas)
    call = InitOrRestoreCall(spec=spec, dataset=lab.prepare(spec), accept=accept)
    return init_or_restore(call, lab.place(spec))


def changed(folder: Path, case: Case, replicas: int, trained: dict[str, Lab]) -> tuple[Lab, RunSpec, CheckpointRef]:
    """A run that was trained to step 3, where the change was accepted. Cases with the same beginning share it."""
    before, after = (spec_of("build", model__options=each, replicas=replicas) for each in (case.before, case.after))
    key = json.dumps(case.before)
    if key not in trained:
        root = folder / "trained"
        root.mkdir(parents=True)
        trained[key] = lab_of(root, MODEL)
        trained[key].train_and_commit(before, 3)
    lab = trained[key].copy(folder / "changed")
    head = begin(lab, case.after, *ACCEPT, replicas=replicas)
    assert head.tip is not None
    assert head.tip.step == 3
    return lab, after, head.tip


def carried_values(folder: str, names: list[str], replicas: int) -> dict[str, Any]:
    """For each case: what the log says of the variables, and the variables that a restore gets wrong."""
    found, trained = {}, dict[str, Lab]()
    for name in names:
        case = CASES[name]
        if replicas > case.replicas:
            continue
        lab, after, tip = changed(Path(folder) / "of" / str(len(found)), case, replicas, trained)
        (*_, entry) = lab.log(after).entries()
        assert isinstance(entry.body, Change)
        assert entry.body.variables is not None
        wrong = wrong_values(lab, after, tip, entry.body.variables, case.values)
        found[name] = {"carried": entry.body.variables.model_dump(mode="json"), "wrong": wrong}
    return found


def wrong_values(
    lab: Lab, after: RunSpec, tip: CheckpointRef, carried: CarriedState, values: dict[str, float]
) -> list[str]:
    """The keys of a restored state that are neither as in the checkpoint nor as built, as they should be."""
    import numpy as np

    from baton.tasks.foundation.state.digest import stored_name

    new, state, stored = built(lab, after), restored(lab, after, tip), lab.tensors(after, tip)
    wrong = []
    for key in state.saved:
        path, _, replica = key.partition("/replica_")
        name = path.rsplit("/", 1)[-1]
        value = np.asarray(state._value(key))
        if name in values:
            right = float(value) == pytest.approx(values[name])
        elif name.endswith("_average") and path in carried.fresh:
            weight = next(each for each in state.saved if slots(each[6:].replace("/", "_"), "average") == name)
            right = np.array_equal(value, state._value(weight))
        elif path in carried.fresh:
            right = np.array_equal(value, new._value(key))
        else:
            old = carried.kept[path]
            kept = (f"{old}/replica_{replica}", old, f"{old}/replica_0")
            (_, _, data) = next(stored[stored_name(each)] for each in kept if stored_name(each) in stored)
            right = value.tobytes() == data
        wrong += [] if right else [key]
    return wrong


def by_day_and_at_night(*by_day: str, at_night: Iterable[str]) -> pytest.MarkDecorator:
    """The cases by day on one replica; at night all of them on one and on two."""
    others = [pytest.param(list(at_night), replicas, marks=pytest.mark.nightly) for replicas in (1, 2)]
    return pytest.mark.parametrize(("names", "replicas"), [(list(by_day), 1), *others], ids=["", "1", "2"])


@pytest.mark.slow
@by_day_and_at_night(*BY_DAY, at_night=CASES)
def test_what_means_the_same_keeps_its_value(names: list[str], replicas: int, tmp_path: Path) -> None:
    found = in_fresh_process(carried_values, folder=str(tmp_path), names=names, replicas=replicas)
    for name, one in found.items():
        carried = CarriedState.from_json(json.dumps(one["carried"]).encode(), where=name, error=BatonError)
        assert without_positions(carried.fresh) == sorted(CASES[name].fresh.split()), name
        assert without_positions(carried.dropped) == sorted(CASES[name].dropped.split()), name
        assert one["wrong"] == [], name


def runs_after_change(folder: str, names: list[str], replicas: int) -> dict[str, Any]:
    """For each case: the digests at step 7 straight and cut; those after a rewind in the process, and in a new one."""
    from baton.tasks.foundation.checkpoint.restore import restore_warm_state
    from baton.tasks.foundation.state.warm_state import PROCESS_STATE

    found, trained = {}, dict[str, Lab]()
    for name in names:
        lab, after, tip = changed(Path(folder) / name, CASES[name], replicas, trained)
        cut = lab.copy(Path(folder) / f"{name}, cut")
        ends = [lab.relay(after, 7).tip, cut.relay(after, 5, 7, cold=True).tip]
        warm = PROCESS_STATE.kept  # trained, so that its new variables have other values by now
        assert warm is not None
        assert restore_warm_state(warm, lab.home(after), tip)
        found[name] = {
            "ends": [end.state_digest for end in ends if end is not None],
            "rewound": [warm.state.digest().root, restored(lab, after, tip).digest().root],
        }
    return found


AFTER = ("unfrozen with another optimizer and metric", "averages", "dropout", "lora")


@pytest.mark.slow
@by_day_and_at_night(*AFTER[:2], at_night=AFTER)
def test_bits_after_a_change_depend_on_no_cut(names: list[str], replicas: int, tmp_path: Path) -> None:
    for name, found in in_fresh_process(
        runs_after_change, folder=str(tmp_path), names=names, replicas=replicas
    ).items():
        assert len(found["ends"]) == 2, name
        assert len(set(found["ends"])) == 1, name
        assert len(set(found["rewound"])) == 1, name


REFUSED = {
    "units": ({}, {"units": 8}, r"checkpoint has model/base/kernel float32\[6, 4\], model has .*\[6, 8\]"),
    "renamed": ({}, {"head": "classes"}, r"only in the checkpoint: model/head/kernel"),
    "layer added": ({}, {"more": 1}, r"only in the model: model/dense/kernel"),
    "layer among others of automatic names": ({"more": 1}, {"more": 2}, r"only in the model: model/dense_1/kernel"),
    "layer removed": ({"more": 1}, {}, r"only in the checkpoint: model/dense/kernel"),
    "weights of a layer that goes on": ({"lora": 2}, {}, r"only in the checkpoint: model/base/lora_kernel_a"),
    "state that is not trained": ({}, {"norm": False}, r"only in the checkpoint: model/norm/moving_mean"),
}


@pytest.mark.slow
def test_other_weights_are_refused_with_the_way_that_works(tmp_path: Path) -> None:
    begun: dict[str, Lab] = {}
    for name, (before, after, line) in REFUSED.items():
        key = json.dumps(before)
        if key not in begun:
            (tmp_path / name).mkdir()
            begun[key] = lab_of(tmp_path / name, MODEL)
            begin(begun[key], before)
        lab = begun[key]
        head = lab.log(spec_of("build")).head()
        with pytest.raises(StateMismatch, match=line) as refused:
            begin(lab, after, *ACCEPT)
        assert refused.value.exit_code == 2
        (*_, way) = str(refused.value).splitlines()
        assert way.startswith("hint: ")
        assert f"init.weights: {{source: {lab.root}/storage/build, strict: false}}" in way
        assert "optimizer/" not in str(refused.value), "what could be carried is no reason"
        assert lab.log(spec_of("build")).head() == head
    way = {"source": f"{lab.root}/storage/build", "strict": False}
    assert lab.begin(spec_of("build", run="new", model__options=after, init__weights=way)).tip is not None


def test_nobody_accepted_other_variables(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    tip = begin(lab, {}).tip
    assert tip is not None
    with pytest.raises(StateMismatch, match="belongs to another model"):
        restored(lab, spec_of("build", model__options={"top2": True}), tip)
