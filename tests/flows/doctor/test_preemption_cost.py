"""The cost of preemptions, and the suggested commit interval."""

from pathlib import Path

import pytest

from flows.doctor.cost import CommitCost, best_interval_seconds, check_preemption, configured_interval_seconds
from tests.support.faulty_runs import load_faulty_run

FIXED = ["checkpoint.every_seconds=null"]


def cost_of(commit_seconds: float, training_seconds: float | None = None) -> CommitCost:
    """The cost of a commit; in line, unless it takes less from the training."""
    taken = commit_seconds if training_seconds is None else training_seconds
    return CommitCost(commit_seconds=commit_seconds, training_seconds=taken, restore_seconds=1.0, state_bytes=1)


@pytest.mark.parametrize(
    ("commit_seconds", "hours", "seconds"),
    [(8.0, 4.0, 480.0), (2.0, 1.0, 120.0), (0.01, 1.0, 60.0)],
)
def test_best_interval_follows_young(commit_seconds: float, hours: float, seconds: float) -> None:
    assert best_interval_seconds(commit_seconds, hours) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("overrides", "step_seconds", "seconds"),
    [
        ([], None, None),
        ([], 0.5, 500.0),
        (["train.segment_steps=100"], 0.5, 50.0),
        (["train.segment_steps=5000"], 0.5, 500.0),
        (["train.segment_seconds=70"], None, 70.0),
        (["train.segment_seconds=70", "checkpoint.every_seconds=20"], 0.5, 20.0),
    ],
)
def test_configured_interval_is_read_from_run_file(
    overrides: list[str], step_seconds: float | None, seconds: float | None, tmp_path: Path
) -> None:
    assert configured_interval_seconds(load_faulty_run(tmp_path, *overrides), step_seconds) == seconds


@pytest.mark.parametrize(
    ("overrides", "step_seconds", "commit_seconds", "verdict", "words"),
    [
        ([], None, 8.0, "pass", ["a commit every 8 min 00 s", "about 4 min 11 s", "train.segment_seconds: 480"]),
        ([*FIXED, "train.steps=100000", "train.segment_steps=1000"], 0.5, 8.0, "pass", ["commits every 8 min 20 s"]),
        ([*FIXED, "train.steps=100000"], 0.5, 8.0, "warn", ["13 h 53 min", "100% of the time", "segment_steps: 960"]),
        (["train.steps=100000"], 0.5, 8.0, "pass", ["every_seconds is auto, so commits within a segment follow"]),
        (["train.steps=100000", "train.segment_steps=10"], 0.5, 8.0, "warn", ["every 5.0 s", "segment_steps: 960"]),
        ([], 0.01, 8.0, "pass", ["the whole run takes 10 s"]),
        ([], 1e-7, 8.0, "pass", ["the whole run takes 0.0 s"]),
        (["train.segment_steps=100"], 0.01, 0.1, "pass", ["the whole run takes 10 s"]),
        (["train.segment_steps=100"], 0.01, 8.0, "warn", ["every 1.0 s", "one segment is enough"]),
        (["train.segment_seconds=480"], None, 40.0, "warn", ["stop.grace_seconds = 25", "closer"]),
    ],
)
def test_preemption_cost_and_advice(
    tmp_path: Path,
    *,
    overrides: list[str],
    step_seconds: float | None,
    commit_seconds: float,
    verdict: str,
    words: list[str],
) -> None:
    cost = cost_of(commit_seconds)
    found = check_preemption(
        load_faulty_run(tmp_path, *overrides), cost, start_seconds=10.0, step_seconds=step_seconds, hours_between=4.0
    )
    text = f"{found.text} {found.remedy}"
    assert found.verdict == verdict, text
    assert [word for word in words if word not in text] == [], text


def test_advice_counts_what_a_commit_takes_from_training(tmp_path: Path) -> None:
    """A commit beside the training takes less from it than it lasts; the grace period must last for all of it."""
    run = load_faulty_run(tmp_path, *FIXED)
    settings = {"start_seconds": 10.0, "step_seconds": None, "hours_between": 4.0}
    beside = check_preemption(run, cost_of(8.0, 0.5), **settings)  # type: ignore[arg-type]
    assert "a commit every 2 min 00 s" in beside.text
    long = check_preemption(run, cost_of(40.0, 0.5), **settings)  # type: ignore[arg-type]
    assert "a commit takes longer than stop.grace_seconds = 25" in long.text
