"""Which values of a checkpoint a model with other variables keeps."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.checkpoint import OptimizerRecord, VariableRecord
from baton.tasks.foundation.state.train_state import StateTree, carried_between

# The slots of the last two have one name.
WEIGHTS = ("a/kernel", "a/bias", "b/c_kernel", "b_c/kernel")
KINDS = {"Adam": ("momentum", "velocity"), "AdamW": ("momentum", "velocity"), "SGD": ("momentum",), "Plain": ()}


def record(path: str, *shape: int, per_replica: bool = False) -> VariableRecord:
    return VariableRecord(path=path, dtype="float32", shape=shape, per_replica=per_replica)


def tree(
    trained: Sequence[str] = WEIGHTS,
    *,
    kind: str = "Adam",
    name: str = "opt",
    rate: bool = True,
    metrics: Sequence[str] = (),
    seeds: int = 0,
    recorded: bool = True,
) -> StateTree:
    """A tree as Keras lays it out."""
    slots = [f"{name}/{each.replace('/', '_')}_{slot}" for each in trained for slot in KINDS[kind]]
    of_optimizer = [f"{name}/iteration", *([f"{name}/learning_rate"] if rate else []), *slots]
    of_metrics = [f"{each}/{part}" for each in metrics for part in ("total", "count")]
    records = [
        record("step"),
        *(record(f"model/{each}", 2, per_replica=each not in trained) for each in WEIGHTS),
        *(record(f"model/seed_generator{f'_{n}' if n else ''}/seed_generator_state", 2) for n in range(seeds)),
        *(record(f"optimizer/{n}/{each}", *([2] if each in slots else [])) for n, each in enumerate(of_optimizer)),
        *(record(f"metrics/1/{n}/{each}", per_replica=True) for n, each in enumerate(of_metrics)),
    ]
    optimizers = {f"optimizer/{name}": OptimizerRecord(kind=kind)} if recorded else {}
    return StateTree(signature=tuple(sorted(records, key=lambda each: each.path)), optimizers=optimizers)


trees = st.builds(
    tree,
    st.lists(st.sampled_from(WEIGHTS), unique=True).map(lambda found: sorted(found, key=WEIGHTS.index)),
    kind=st.sampled_from(list(KINDS)),
    name=st.sampled_from(["opt", "adam", "sgd_1"]),
    rate=st.booleans(),
    metrics=st.lists(st.sampled_from(["loss", "accuracy", "top2"]), max_size=5),
    seeds=st.integers(0, 2),
    recorded=st.booleans(),
)


@given(before=trees, now=trees, order=st.randoms(use_true_random=False))
def test_each_variable_is_accounted_for_once(before: StateTree, now: StateTree, order: Any) -> None:
    carried, refused = carried_between(before, now)
    assert refused == []
    old, new = ({each.path: each for each in one.signature} for one in (before, now))
    assert len(set(carried.kept.values())) == len(carried.kept)
    assert sorted([*carried.kept, *carried.fresh]) == sorted(new)
    assert sorted([*carried.kept.values(), *carried.dropped]) == sorted(old)
    for mine, stored in carried.kept.items():
        assert (new[mine].dtype, new[mine].shape) == (old[stored].dtype, old[stored].shape)
    shuffled = []
    for one in (before, now):
        records = list(one.signature)
        order.shuffle(records)
        shuffled.append(StateTree(signature=records, optimizers=one.optimizers))
    assert carried_between(*shuffled) == (carried, refused)


@given(one=trees)
def test_the_same_tree_keeps_everything(one: StateTree) -> None:
    carried, _ = carried_between(one, one)
    assert carried.kept == {each.path: each.path for each in one.signature}


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        (tree(kind="Adam"), tree(kind="AdamW", name="adam_w"), ["iteration", "learning_rate", "momentum", "velocity"]),
        # One name, and another meaning.
        (tree(kind="SGD"), tree(kind="Adam"), ["iteration"]),
        (tree(kind="Adam"), tree(kind="SGD"), ["iteration"]),
        (tree(kind="SGD"), tree(kind="Plain"), ["iteration"]),
        # In a checkpoint of an earlier version only the name tells the class.
        (
            tree(name="adam_1", recorded=False),
            tree(kind="AdamW"),
            ["iteration", "learning_rate", "momentum", "velocity"],
        ),
        (tree(kind="SGD", name="sgd", recorded=False), tree(kind="Adam"), ["iteration"]),
    ],
)
def test_slots_keep_what_means_the_same(before: StateTree, now: StateTree, kept: list[str]) -> None:
    found = [path.rsplit("/", 1)[-1] for path in carried_between(before, now)[0].kept if path.startswith("optimizer/")]
    assert sorted({each if each == "learning_rate" else each.rsplit("_", 1)[-1] for each in found}) == kept


def test_slots_of_one_name_are_not_mistaken() -> None:
    before, now = tree(["a/kernel", "b/c_kernel"]), tree(["a/kernel", "b_c/kernel"])
    kept = carried_between(before, now)[0].kept
    assert [path for path in kept if "a_kernel_" in path] != []
    assert [path for path in kept if "b_c_kernel_" in path] == []


def test_metrics_of_one_name_keep_their_order_unless_one_came() -> None:
    two, three = tree(metrics=["accuracy", "accuracy"]), tree(metrics=["top2", "accuracy", "accuracy"])
    kept = carried_between(two, three)[0].kept
    assert kept["metrics/1/2/accuracy/total"] == "metrics/1/0/accuracy/total"
    assert kept["metrics/1/5/accuracy/count"] == "metrics/1/3/accuracy/count"
    carried, _ = carried_between(two, tree(metrics=["accuracy"] * 3))
    assert [path for path in carried.kept if path.startswith("metrics/")] == []


def test_other_optimizers_of_a_model_have_slots_of_their_own() -> None:
    def two(**changes: str) -> StateTree:
        kinds = {"optimizers/gan/d": "Adam", "optimizers/gan/opts/0": "Adam", **changes}
        return StateTree(
            signature=[
                record(f"{path}/{n}/adam/{slot}")
                for path in kinds
                for n, slot in enumerate(["iteration", "w_momentum"])
            ],
            optimizers={f"{path}/adam": OptimizerRecord(kind=kind) for path, kind in kinds.items()},
        )

    carried, _ = carried_between(two(), two(**{"optimizers/gan/d": "SGD"}))
    assert carried.fresh == carried.dropped == ("optimizers/gan/d/1/adam/w_momentum",)
