"""Restoring on another replica count: shared state is bit-equal, the rest is replica 0's, metrics keep their sums."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.write import stage_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import ModelError
from tests.support.lab import Lab, built, in_fresh_process, lab_of, restored, spec_of

MODEL = """
def build():
    model = keras.Sequential([
        keras.Input((6,)),
        keras.layers.BatchNormalization(),
        layers.GeneratorNoise(),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(3),
    ])
    model.compile(
        keras.optimizers.Adam(0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", layers.CountRight(), layers.Peak()],
    )
    return model
"""


def lab_at(folder: str) -> Lab:
    return Lab(Path(folder), Path(folder) / "code")


def spec_for(replicas: int) -> RunSpec:
    return spec_of("build", run=f"on-{replicas}", replicas=replicas)


def values(state: Any) -> dict[str, list[Any]]:
    """Every component of every leaf, as JSON."""
    return {leaf.path: [part.numpy().tolist() for part in leaf.components] for leaf in state.leaves}


def metrics(state: Any) -> dict[str, float]:
    from baton.tasks.foundation.model.metrics import take_metrics

    taken: dict[str, float] = take_metrics(state.model, state.accelerator.strategy)
    return taken


def write(folder: str, replicas: int) -> dict[str, Any]:
    """Train three steps, so that replicas and metrics have values, and stage."""
    lab, spec = lab_at(folder), spec_for(replicas)
    start = lab.begin(spec).tip
    assert start is not None
    ref = lab.train(spec, start, 3).staged
    state = restored(lab, spec, ref)
    return {"ref": ref.model_dump_json(), "values": values(state), "metrics": metrics(state)}


def read(folder: str, replicas: int, written: dict[str, str]) -> dict[str, Any]:
    """Restore checkpoints of other replica counts, given as replicas -> reference."""
    lab, states = lab_at(folder), {}
    for before, text in written.items():
        state = built(lab, spec_for(replicas))
        ref = CheckpointRef.from_json(text.encode(), where="", error=ModelError)
        restore_checkpoint(state, lab.home(spec_for(int(before))), ref)
        states[before] = {"values": values(state), "metrics": metrics(state)}
    return states


def write_then_read(folder: str, replicas: int, written: dict[str, str]) -> dict[str, Any]:
    return {"own": write(folder, replicas), "read": read(folder, replicas, written)}


def draw_on_one_replica(folder: str) -> str:
    """Replica 1 draws once more than replica 0."""
    lab, spec = lab_at(folder), spec_for(2)
    state = built(lab, spec)
    seed = next(leaf for leaf in state.leaves if leaf.seed)
    seed.components[1].assign_add([0, 1])
    try:
        stage_checkpoint(state, lab.home(spec), base=0, attempt="a")
    except ModelError as fault:
        return str(fault)
    return "staged"


def two(folder: str, written: dict[str, str]) -> dict[str, Any]:
    return write_then_read(folder, 2, written) | {"seeds": draw_on_one_replica(folder)}


def assert_restored(written: dict[str, Any], read: dict[str, Any], *, replicas: int) -> None:
    assert written["values"].keys() == read["values"].keys()
    differed = 0
    for path, before in written["values"].items():
        after = read["values"][path]
        assert len(after) == replicas or (len(after) == 1 and len(before) == 1)
        if path.startswith("metrics/"):
            continue
        if "seed_generator" in path:
            assert after[0] == before[0]
            assert len({str(part) for part in after}) == replicas
            continue
        differed += len({str(part) for part in before}) > 1
        assert after == [before[0]] * len(after), path
    if len(written["values"]["step"]) > 1:
        assert differed  # otherwise the test would show nothing
    assert written["metrics"] == pytest.approx(read["metrics"], rel=1e-6)
    assert written["metrics"]["right"] == read["metrics"]["right"] > 0
    assert written["metrics"]["peak"] == read["metrics"]["peak"] > 0


@pytest.mark.slow
def test_checkpoints_restore_on_other_replica_counts(tmp_path: Path) -> None:
    lab_of(tmp_path, MODEL)
    folder = str(tmp_path)
    one = write(folder, 1)
    four = in_fresh_process(write, folder=folder, replicas=4)
    on_two = in_fresh_process(two, folder=folder, written={"1": one["ref"], "4": four["ref"]})
    back = read(folder, 1, {"2": on_two["own"]["ref"], "4": four["ref"]})

    assert_restored(one, on_two["read"]["1"], replicas=2)
    assert_restored(four, on_two["read"]["4"], replicas=2)
    assert_restored(on_two["own"], back["2"], replicas=1)
    assert_restored(four, back["4"], replicas=1)
    assert "replica 1 no longer uses the random seed derived from replica 0's" in on_two["seeds"]
