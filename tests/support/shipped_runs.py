"""Real processes on the shipped run files, shortened."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkout import CHECKOUT

DRIVER = Path(__file__).with_name("run_without_prefect.py")

# Short, with evaluations and log rows that no segment border falls on.
SHORT: dict[str, list[str]] = {
    "digits": ["train.steps=60", "train.log_every_steps=7", "evaluate.every_steps=25", "model.options.width=4"],
    "text": [
        "train.steps=40",
        "train.log_every_steps=7",
        "evaluate.every_steps=25",
        "data.options.max_bytes=60000",
        "data.options.length=16",
        "model.options.length=16",
        "model.options.width=16",
        "model.options.heads=2",
        "train.global_batch_size=16",
    ],
}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that has ended."""

    code: int
    result: dict[str, Any]
    stdout: str
    stderr: str


def run_file(name: str) -> Path:
    return CHECKOUT / "deploy" / "runs" / name / "run.yaml"


def settings(name: str, storage: Path, *, replicas: int = 1, extra: Sequence[str] = ()) -> list[str]:
    chosen = [f"storage={storage}", "accelerator.kind=cpu", f"accelerator.replicas={replicas}", *SHORT[name], *extra]
    return [word for setting in chosen for word in ("--set", setting)]
