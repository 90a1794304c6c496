"""Models that draw with TensorFlow's and Keras's global state give the same bits however a run is cut."""

from pathlib import Path
from typing import Any

import pytest

from tasks.train_segment.stage import forget_trainer
from tests.support.lab import Lab, differing, in_fresh_process, lab_of, rows_of, spec_of
from tests.support.random_models import FORMS, MODELS, WITHOUT_TEST_STEP

STEPS = 9
QUICK = "draws"
SLOW = ("vae", "gan", "ddpm", "swin")
ON_TWO_REPLICAS = ("wasserstein", "ddim")


def compare_cuts(lab: Lab, build: str, *, replicas: int = 1, **changes: Any) -> dict[str, Any]:
    """Train to step 9 straight, and in segments that begin like a new process; evaluate twice."""
    fraction = 0.0 if build in WITHOUT_TEST_STEP else 0.2
    settings: dict[str, Any] = {"data__validation_fraction": fraction, "train__log_every_steps": 2, **changes}
    spec = spec_of(build, run=f"{build}-{replicas}", form=FORMS[build], replicas=replicas, **settings)
    start = lab.begin(spec).tip
    assert start is not None
    runs: dict[str, list[Any]] = {}
    for name, borders in (("cut", (2, 5, STEPS)), ("straight", (STEPS,))):
        results, at = [], start
        for border in borders:
            if border == 5:  # the segments before and after it are traced in another order
                forget_trainer()
            results.append(lab.train(spec, at, border))
            at = results[-1].staged
        runs[name] = results
    tensors = {name: lab.tensors(spec, results[-1].staged) for name, results in runs.items()}
    metrics: list[dict[str, float]] = []
    for _ in range(2 if fraction else 0):
        metrics.append(lab.evaluate(spec, start))
        lab.train(spec, start, 2)  # draws of a training must not move those of an evaluation
    rows = [[row.model_dump() for row in rows_of(results)] for results in runs.values()]
    return {
        "differing": differing(tensors["straight"], tensors["cut"]),
        "rows": rows,
        "metrics": metrics,
        "warnings": [text for text in lab.recorder.warnings if "callbacks" not in text],
        "digest": runs["straight"][-1].staged.state_digest,
    }


def assert_exact(compared: dict[str, Any]) -> None:
    assert compared["differing"] == []
    cut, straight = compared["rows"]
    assert cut == straight
    # Other draws at each step: the same ones would give a smooth curve, but never equal rows.
    assert len({str(row["metrics"]) for row in straight}) == len(straight) == STEPS // 2
    assert compared["metrics"][1:] == compared["metrics"][:1]
    assert compared["warnings"] == []


@pytest.mark.parametrize("build", [QUICK, *(pytest.param(b, marks=pytest.mark.slow) for b in SLOW)])
def test_cut_run_of_a_random_step_has_the_same_bits(tmp_path: Path, build: str) -> None:
    forget_trainer()
    assert_exact(compare_cuts(lab_of(tmp_path, MODELS), build))


def gallery(folder: str, replicas: int) -> dict[str, Any]:
    lab = lab_of(Path(folder), MODELS)
    return {build: compare_cuts(lab, build, replicas=replicas) for build in ON_TWO_REPLICAS}


@pytest.mark.slow
@pytest.mark.nightly
def test_random_steps_are_exact_on_two_replicas(tmp_path: Path) -> None:
    for compared in in_fresh_process(gallery, folder=str(tmp_path), replicas=2).values():
        assert_exact(compared)
