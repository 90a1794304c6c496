"""A run that moves from 4 replicas to 2, 8 and 1 reads the same examples, keeps its state and reports the changes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.log_entry import Change, Commit
from baton.tasks.foundation.contracts.run_spec import RunSpec
from tests.support.lab import Lab, in_fresh_process, keep_trainer, restored, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# The step up to which each replica count trains. The straight run trains all steps on 4 replicas.
LAST_STEP = {4: 3, 2: 6, 8: 9}
STEPS = 9
# For weights and losses after nine steps, six of them on other replica counts.
TOLERANCE = 1e-5
BUILDS = ("synchronized", "dependent")


def spec_for(build: str, replicas: int, run: str) -> RunSpec:
    train = {"steps": STEPS, "global_batch_size": 16, "log_every_steps": 4}
    changes = {"model": f"shared_out.py:{build}", "train": train}
    return spec_of("", run=f"{build}-{run}", form="labelled", replicas=replicas, data__validation_fraction=0, **changes)


def values(lab: Lab, spec: RunSpec, ref: Any) -> dict[str, list[Any]]:
    """Read a checkpoint: path -> values, one for each replica that has its own."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(lab.folder(spec, ref) / "ckpt"))
    found: dict[str, dict[int, Any]] = {}
    for key in reader.get_variable_to_shape_map():
        path, _, replica = key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").partition("/replica_")
        if path.startswith(("model/", "optimizer/", "metrics/", "variables/", "generators/", "step")):
            found.setdefault(path, {})[int(replica or 0)] = reader.get_tensor(key)
    return {path: [parts[index] for index in sorted(parts)] for path, parts in found.items()}


def as_json(parts: dict[str, list[Any]]) -> dict[str, Any]:
    return {path: [value.tolist() for value in each] for path, each in parts.items()}


def in_memory(lab: Lab, spec: RunSpec, ref: Any) -> dict[str, Any]:
    """Return the restored state, with the values and seeds of each replica, and the metrics of all replicas."""
    from baton.tasks.foundation.model.metrics import take_metrics

    state = restored(lab, spec, ref)
    held = {leaf.path: [part.numpy().tolist() for part in leaf.components] for leaf in state.leaves}
    return {"values": held, "metrics": take_metrics(state.model, state.accelerator.strategy)}


def train_part(folder: str, replicas: int, straight: bool = False) -> dict[str, Any]:
    """Train the part of the run that belongs to a replica count; returns restored and committed values by model."""
    results: dict[str, Any] = {}
    for build in BUILDS:
        lab, spec = Lab(Path(folder)), spec_for(build, replicas, "straight" if straight else "moved")
        start = lab.begin(spec).tip
        assert start is not None
        each: dict[str, Any] = {"warnings": lab.recorder.warnings}
        if not straight:
            each["restored"] = in_memory(lab, spec, start)
        tip = start
        if replicas in LAST_STEP:
            tip = lab.train_and_commit(spec, STEPS if straight else LAST_STEP[replicas]).tip
        assert tip is not None
        keep_trainer()
        each["stored"] = as_json(values(lab, spec, tip))
        results[build] = each
    return results


def train_on_four_replicas(folder: str) -> dict[str, Any]:
    """Train the straight run, and the first part of the run that moves."""
    return {"straight": train_part(folder, 4, straight=True), "moved": train_part(folder, 4)}


def test_run_moves_between_replica_counts(tmp_path: Path) -> None:
    folder = str(tmp_path)
    on_four = in_fresh_process(train_on_four_replicas, folder=folder)
    parts = {4: on_four["moved"]}
    for replicas in (2, 8):
        parts[replicas] = in_fresh_process(train_part, folder=folder, replicas=replicas)
    parts[1] = train_part(folder, 1)

    for build in BUILDS:
        for before, now in pairwise(parts):
            assert_state_is_kept(parts[before][build]["stored"], parts[now][build]["restored"], replicas=now)
        assert_same_examples(on_four["straight"][build]["stored"], {at: parts[at][build]["stored"] for at in LAST_STEP})
        assert_changes_are_reported(tmp_path, build, {at: part[build]["warnings"] for at, part in parts.items()})
    apart = {
        build: largest_difference(tmp_path, build, on_four["straight"][build], parts[8][build]) for build in BUILDS
    }
    assert apart["synchronized"] < TOLERANCE < 1e-3 < apart["dependent"]


def assert_state_is_kept(stored: dict[str, Any], restored: dict[str, Any], *, replicas: int) -> None:
    """Assert that each replica restores the stored values, its own seed, and its share of the metrics."""
    held = restored["values"]
    assert held.keys() == stored.keys()
    differed = 0
    for path, before in stored.items():
        after = held[path]
        if path.startswith("metrics/"):
            continue
        if "seed" in path:  # one seed is saved, and each replica derives its own
            assert after[0] == before[0]
            assert len({str(part) for part in after}) == replicas
            continue
        differed += len({str(part) for part in before}) > 1
        assert after == [before[0]] * len(after), path
    assert differed  # otherwise the comparison shows nothing
    # The value of a metric over all replicas is kept, not the value of each replica.
    sums = [path for path in stored if path.startswith("metrics/") and not path.endswith("peak/value")]
    assert sums
    for path in sums:
        assert np.sum(held[path], axis=0) == pytest.approx(np.sum(stored[path], axis=0), rel=1e-6), path
        assert not np.any(held[path][1:])
    for path in (path for path in stored if path.endswith("peak/value")):
        assert held[path] == pytest.approx([np.mean(stored[path])] * replicas, rel=1e-6)
        assert np.mean(stored[path]) > 0


def assert_same_examples(straight: dict[str, Any], parts: dict[int, dict[str, Any]]) -> None:
    """Assert that each step reads the same examples, in the same order within the global batch."""
    expected = np.sum(straight["model/seen/ids"], axis=0)
    assert expected.shape == (STEPS, 16)
    assert expected.min() >= 1
    first = 0
    for replicas, stored in parts.items():
        ids = np.asarray(stored["model/seen/ids"])
        assert len(ids) == replicas
        mine = ids[:, first : LAST_STEP[replicas]]
        # Each replica reads its own part of each batch only.
        assert np.all(np.sum(mine > 0, axis=-1) == 16 // replicas)
        assert np.array_equal(np.sum(mine, axis=0), expected[first : LAST_STEP[replicas]])
        first = LAST_STEP[replicas]


def assert_changes_are_reported(root: Path, build: str, warnings: dict[int, list[str]]) -> None:
    """Assert that each change of replicas is a warning and an entry of the log."""
    assert warnings.pop(4) == []
    for (before, now), notes in zip(((4, 2), (2, 8), (8, 1)), warnings.values(), strict=True):
        words = next(each for each in notes if "the environment changed" in each)
        assert f"{before} replicas became {now}" in words
        if build == "synchronized":
            assert "to float tolerance" in words
        else:
            assert "norm (statistics of one replica's examples" in words
            assert "drop (random, each replica draws its own values)" in words
    spec = spec_for(build, 1, "moved")
    entries = [entry.body for entry in Lab(root).log(spec).entries()]
    assert [body.environment.replicas for body in entries if isinstance(body, Change)] == [2, 8, 1]


def largest_difference(root: Path, build: str, straight: dict[str, Any], moved: dict[str, Any]) -> float:
    """Return the largest difference of weights and logged losses at the end."""
    weights = [path for path in straight["stored"] if path.startswith(("model/dense", "model/norm"))]
    assert weights
    far = [
        np.max(np.abs(np.subtract(straight["stored"][path][0], moved["stored"][path][0]))).item() for path in weights
    ]
    rows = []
    for run in ("straight", "moved"):
        bodies = [entry.body for entry in Lab(root).log(spec_for(build, 4, run)).entries()]
        rows.append([row for body in bodies if isinstance(body, Commit) for row in body.history])
    assert [row.step for row in rows[0]] == [row.step for row in rows[1]] == [4, 8]
    return float(max(*far, *(abs(one.metrics["loss"] - two.metrics["loss"]) for one, two in zip(*rows, strict=True))))
