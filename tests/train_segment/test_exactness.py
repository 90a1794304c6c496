"""A model of each kind, trained straight and cut: equal bytes, as TensorFlow reads them, and equal history."""

from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.errors import ModelError
from tasks.train_segment.stage import forget_trainer
from tests.support.lab import Lab, differing, in_fresh_process, rows_of, spec_of

FORMS = {"weighted": "weighted", "several": "dicts", "attention": "sequence", "adversaries": "alone"}
ONE_REPLICA_ONLY = {"accumulating": "larger", "overwriting": "use_ema alone", "mixed": "mixed_bfloat16"}
QUICK = ("functional",)
SLOW = (
    "plain",
    "subclassed",
    "own_tracker",
    "own_step_compiled",
    "own_loss",
    "schedule",
    "averaged",
    "weighted",
    "several",
    "accumulating",
    "overwriting",
    "mixed",
    "bfloat",
    "nadam",
    "adafactor",
    "raw_variable",
    "tf_generator",
    "own_seed",
    "attention",
    "counting",
    "adversaries",
)
# Those whose state is another one, or is kept in another way, where there are several replicas.
ON_TWO_REPLICAS = (
    "functional",
    "own_step_compiled",
    "averaged",
    "weighted",
    "several",
    "bfloat",
    "adafactor",
    "raw_variable",
    "tf_generator",
    "own_seed",
    "attention",
    "counting",
    "adversaries",
)
STEPS = 11


def compare_ways(lab: Lab, build: str, *, replicas: int = 1) -> dict[str, Any]:
    """Train to step 11 in three ways; tells what differs."""
    # Adversaries have no test_step.
    fraction = 0.0 if build == "adversaries" else 0.2
    spec = spec_of(build, form=FORMS.get(build, "plain"), replicas=replicas, data__validation_fraction=fraction)
    start = lab.begin(spec).tip
    assert start is not None
    ways: dict[str, list[Any]] = {}
    # The trainer of the last cold segment goes on with the other ways: it must leave nothing behind.
    for way, borders in (("cold", (5, STEPS)), ("straight", (STEPS,)), ("warm", (3, 7, STEPS))):
        results, at = [], start
        for border in borders:
            if way == "cold":
                forget_trainer()
            results.append(lab.train(spec, at, border))
            at = results[-1].staged
        ways[way] = results
    tensors = {way: lab.tensors(spec, results[-1].staged) for way, results in ways.items()}
    moved = differing(tensors["straight"], lab.tensors(spec, start))
    return {
        "differing": differing(tensors["straight"], tensors["cold"]) + differing(tensors["straight"], tensors["warm"]),
        "digests": sorted({results[-1].staged.state_digest for results in ways.values()}),
        "rows": [[row.model_dump() for row in rows_of(results)] for results in ways.values()],
        "moved": moved,
        "keys": len(tensors["straight"]),
        "warnings": lab.heard.warnings,
    }


def assert_exact(told: dict[str, Any]) -> None:
    assert told["differing"] == []
    assert len(told["digests"]) == 1
    assert [row["step"] for row in told["rows"][0]] == [4, 8]
    assert told["rows"][0] == told["rows"][1] == told["rows"][2]
    assert all(row["metrics"] for row in told["rows"][0])
    # Training did change weights and optimizer: equal bytes mean something.
    assert any(key.startswith("model/") for key in told["moved"])
    assert any(key.startswith("optimizer/") for key in told["moved"])
    assert told["warnings"] == []


@pytest.mark.parametrize("build", [*QUICK, *(pytest.param(build, marks=pytest.mark.slow) for build in SLOW)])
def test_cuts_do_not_show(tmp_path: Path, build: str) -> None:
    assert_exact(compare_ways(Lab(tmp_path), build))


def zoo_on_two_replicas(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = {build: compare_ways(Lab(Path(folder)), build, replicas=2) for build in ON_TWO_REPLICAS}
    for build in ONE_REPLICA_ONLY:
        try:
            compare_ways(Lab(Path(folder)), build, replicas=2)
        except ModelError as fault:
            told[build] = str(fault)
    return told


@pytest.mark.slow
def test_cuts_do_not_show_on_two_replicas(tmp_path: Path) -> None:
    told = in_fresh_process(zoo_on_two_replicas, folder=str(tmp_path))
    for build in ON_TWO_REPLICAS:
        assert_exact(told[build])
    for build, remedy in ONE_REPLICA_ONLY.items():
        assert f"model.py:{build}: optimizer" in told[build]
        assert "2 replicas" in told[build]
        assert remedy in told[build]
        assert "train on one replica" in told[build]
