"""A model of each kind, trained straight and cut, has equal bytes, as TensorFlow reads them, and an equal history."""

from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, differing, in_fresh_process, rows_of, spec_of

FORMS = {
    "weighted": "weighted",
    "several": "dicts",
    "combined": "dicts",
    "attention": "sequence",
    "adversaries": "alone",
}
ONE_REPLICA_ONLY = {"accumulating": "larger", "overwriting": "use_ema works without it", "mixed": "mixed_bfloat16"}
# All kinds of state; no model can have the second one with the others.
BY_DAY = ("combined", "mixed")
# One kind of state each. The first two are trained by day too, with their own data or step, in test_accumulation.py and
# test_custom_steps.py.
NIGHTLY = (
    "weighted", "own_step_compiled", "functional", "several", "accumulating", "overwriting", "raw_variable",
    "tf_generator", "own_seed", "attention", "counting", "plain", "subclassed", "own_tracker", "own_loss", "schedule",
    "averaged", "bfloat", "nadam", "adafactor", "adversaries",
)  # fmt: skip
# Models whose state differs, or is kept differently, on several replicas.
ON_TWO_REPLICAS = (
    "functional", "own_step_compiled", "averaged", "weighted", "several", "bfloat", "adafactor", "raw_variable",
    "tf_generator", "own_seed", "attention", "counting", "adversaries",
)  # fmt: skip
STEPS = 11


def compare_runs(lab: Lab, build: str, *, replicas: int = 1) -> dict[str, Any]:
    """Train to step 11 in three ways; return the differences."""
    # The adversarial model has no test_step.
    fraction = 0.0 if build == "adversaries" else 0.2
    spec = spec_of(build, form=FORMS.get(build, "plain"), replicas=replicas, data__validation_fraction=fraction)
    start = lab.begin(spec).tip
    assert start is not None
    runs: dict[str, list[Any]] = {}
    # The first two runs, and the first segment of the last one, use the same trainer; its state must not leak.
    for name, borders in (("straight", (STEPS,)), ("warm", (3, 7, STEPS)), ("cold", (5, STEPS))):
        results, at = [], start
        for border in borders:
            if name == "cold" and border == STEPS:
                PROCESS_STATE.forget()
            results.append(lab.train(spec, at, border))
            at = results[-1].staged
        runs[name] = results
    tensors = {name: lab.tensors(spec, results[-1].staged) for name, results in runs.items()}
    moved = differing(tensors["straight"], lab.tensors(spec, start))
    return {
        "differing": differing(tensors["straight"], tensors["cold"]) + differing(tensors["straight"], tensors["warm"]),
        "digests": sorted({results[-1].staged.state_digest for results in runs.values()}),
        "rows": [[row.model_dump() for row in rows_of(results)] for results in runs.values()],
        "moved": moved,
        "keys": len(tensors["straight"]),
        "warnings": lab.recorder.warnings,
    }


def assert_exact(compared: dict[str, Any]) -> None:
    assert compared["differing"] == []
    assert len(compared["digests"]) == 1
    assert [row["step"] for row in compared["rows"][0]] == [4, 8]
    assert compared["rows"][0] == compared["rows"][1] == compared["rows"][2]
    assert all(row["metrics"] for row in compared["rows"][0])
    # Training must have changed weights and optimizer; otherwise equal bytes show nothing.
    assert any(key.startswith("model/") for key in compared["moved"])
    assert any(key.startswith("optimizer/") for key in compared["moved"])
    assert compared["warnings"] == []


@pytest.mark.parametrize(
    "build",
    [
        *BY_DAY,
        *(pytest.param(build, marks=[pytest.mark.slow, pytest.mark.nightly]) for build in NIGHTLY),
    ],
)
def test_cut_run_has_the_same_bits(tmp_path: Path, build: str) -> None:
    assert_exact(compare_runs(Lab(tmp_path), build))


def zoo_on_two_replicas(folder: str) -> dict[str, Any]:
    compared: dict[str, Any] = {build: compare_runs(Lab(Path(folder)), build, replicas=2) for build in ON_TWO_REPLICAS}
    for build in ONE_REPLICA_ONLY:
        try:
            compare_runs(Lab(Path(folder)), build, replicas=2)
        except ModelError as fault:
            compared[build] = str(fault)
    return compared


@pytest.mark.slow
@pytest.mark.nightly
def test_cut_run_has_the_same_bits_on_two_replicas(tmp_path: Path) -> None:
    compared = in_fresh_process(zoo_on_two_replicas, folder=str(tmp_path))
    for build in ON_TWO_REPLICAS:
        assert_exact(compared[build])
    for build, remedy in ONE_REPLICA_ONLY.items():
        assert f"model.py:{build}: optimizer" in compared[build]
        assert "2 replicas" in compared[build]
        assert remedy in compared[build]
        assert "train on one replica" in compared[build]
