"""A run that goes from 4 replicas to 2, to 8 and to 1: the same examples, the same state, and what is said of it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.foundation.contracts.log_entry import Change, Commit
from tasks.foundation.contracts.run_spec import RunSpec
from tests.support.lab import Lab, in_fresh_process, keep_trainer, restored, spec_of

pytestmark = pytest.mark.slow

# Up to which step each replica count trains; the straight run's four train all.
LEGS = {4: 3, 2: 6, 8: 9}
STEPS = 9
# Of weights and losses after nine steps, the last six of them on other replica counts.
TOLERANCE = 1e-5
BUILDS = ("synchronized", "dependent")


def spec_for(build: str, replicas: int, run: str) -> RunSpec:
    train = {"steps": STEPS, "global_batch_size": 16, "log_every_steps": 4}
    changes = {"model": f"shared_out.py:{build}", "train": train}
    return spec_of("", run=f"{build}-{run}", form="labelled", replicas=replicas, data__validation_fraction=0, **changes)


def values(lab: Lab, spec: RunSpec, ref: Any) -> dict[str, list[Any]]:
    """What a checkpoint holds, by path: of what each replica has for itself, all in their order."""
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
    """The state of this process's replicas right after restoring; of seeds each replica's own."""
    from tasks.foundation.model.metrics import take_metrics

    state = restored(lab, spec, ref)
    held = {leaf.path: [part.numpy().tolist() for part in leaf.components] for leaf in state.leaves}
    return {"values": held, "metrics": take_metrics(state.model, state.accelerator.strategy)}


def go_on(folder: str, replicas: int, straight: bool = False) -> dict[str, Any]:
    """The part of the run that so many replicas train, from what is restored to what is committed."""
    told: dict[str, Any] = {}
    for build in BUILDS:
        lab, spec = Lab(Path(folder)), spec_for(build, replicas, "straight" if straight else "moved")
        start = lab.begin(spec).tip
        assert start is not None
        each: dict[str, Any] = {"warnings": lab.heard.warnings}
        if not straight:
            each["restored"] = in_memory(lab, spec, start)
        tip = start
        if replicas in LEGS:
            tip = lab.train_and_commit(spec, STEPS if straight else LEGS[replicas]).tip
        assert tip is not None
        keep_trainer()
        each["stored"] = as_json(values(lab, spec, tip))
        told[build] = each
    return told


def four(folder: str) -> dict[str, Any]:
    """The first part, and what four replicas make of it alone."""
    return {"straight": go_on(folder, 4, straight=True), "moved": go_on(folder, 4)}


def test_a_run_goes_from_one_replica_count_to_another(tmp_path: Path) -> None:
    folder = str(tmp_path)
    told = in_fresh_process(four, folder=folder)
    legs = {4: told["moved"]}
    for replicas in (2, 8):
        legs[replicas] = in_fresh_process(go_on, folder=folder, replicas=replicas)
    legs[1] = go_on(folder, 1)

    for build in BUILDS:
        for before, now in pairwise(legs):
            assert_handed_over(legs[before][build]["stored"], legs[now][build]["restored"], replicas=now)
        assert_same_examples(told["straight"][build]["stored"], {at: legs[at][build]["stored"] for at in LEGS})
        assert_said_and_logged(tmp_path, build, {at: interval[build]["warnings"] for at, interval in legs.items()})
    apart = {build: furthest(tmp_path, build, told["straight"][build], legs[8][build]) for build in BUILDS}
    assert apart["synchronized"] < TOLERANCE < 1e-3 < apart["dependent"]


def assert_handed_over(stored: dict[str, Any], restored: dict[str, Any], *, replicas: int) -> None:
    held = restored["values"]
    assert held.keys() == stored.keys()
    differed = 0
    for path, before in stored.items():
        after = held[path]
        if path.startswith("metrics/"):
            continue
        if "seed" in path:  # saved once; each replica's is derived from it
            assert after[0] == before[0]
            assert len({str(part) for part in after}) == replicas
            continue
        differed += len({str(part) for part in before}) > 1
        assert after == [before[0]] * len(after), path
    assert differed  # replicas did hold different values, or this would show nothing
    # Of a metric it is what all replicas together say that stays.
    sums = [path for path in stored if path.startswith("metrics/") and not path.endswith("peak/value")]
    assert sums
    for path in sums:
        assert np.sum(held[path], axis=0) == pytest.approx(np.sum(stored[path], axis=0), rel=1e-6), path
        assert not np.any(held[path][1:])
    for path in (path for path in stored if path.endswith("peak/value")):
        assert held[path] == pytest.approx([np.mean(stored[path])] * replicas, rel=1e-6)
        assert np.mean(stored[path]) > 0


def assert_same_examples(straight: dict[str, Any], legs: dict[int, dict[str, Any]]) -> None:
    """Step by step, and in the same order within the global batch."""
    expected = np.sum(straight["model/seen/ids"], axis=0)
    assert expected.shape == (STEPS, 16)
    assert expected.min() >= 1
    first = 0
    for replicas, stored in legs.items():
        ids = np.asarray(stored["model/seen/ids"])
        assert len(ids) == replicas
        mine = ids[:, first : LEGS[replicas]]
        # Each replica read its own part of each batch, and nobody another's.
        assert np.all(np.sum(mine > 0, axis=-1) == 16 // replicas)
        assert np.array_equal(np.sum(mine, axis=0), expected[first : LEGS[replicas]])
        first = LEGS[replicas]


def assert_said_and_logged(root: Path, build: str, warnings: dict[int, list[str]]) -> None:
    assert warnings.pop(4) == []
    for (before, now), said in zip(((4, 2), (2, 8), (8, 1)), warnings.values(), strict=True):
        words = next(each for each in said if "the environment changed" in each)
        assert f"{before} replicas became {now}" in words
        if build == "synchronized":
            assert "to float tolerance" in words
        else:
            assert "norm (statistics of one replica's examples" in words
            assert "drop (random, each replica draws its own)" in words
    spec = spec_for(build, 1, "moved")
    entries = [entry.body for entry in Lab(root).log(spec).entries()]
    assert [body.environment.replicas for body in entries if isinstance(body, Change)] == [2, 8, 1]


def furthest(root: Path, build: str, straight: dict[str, Any], moved: dict[str, Any]) -> float:
    """How far apart weights and logged losses are in the end."""
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
