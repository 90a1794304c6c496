"""What the benchmarks train: a model, its examples, and the run file that trains the same with Baton."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.checkout import CHECKOUT

_MODELS = Path(__file__).resolve().parent / "workload" / "model.py"
_DIGITS = CHECKOUT / "deploy" / "runs" / "digits" / "model.py"
_EXAMPLES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and its batches.

    Attributes:
        name: shown in the table.
        model_file, build, options: the function that returns the compiled model.
        batch: examples a step.
        bytes: roughly, of weights and optimizer slots.
    """

    name: str
    build: str
    batch: int
    bytes: int
    model_file: Path = _MODELS
    options: Mapping[str, Any] = field(default_factory=dict)
    digits: bool = False


TRANSFORMER_250MB = Workload(
    name="transformer 250 MB",
    build="transformer",
    options={"width": 512, "blocks": 6, "length": 64},
    batch=4,
    bytes=232_000_000,
)
TRANSFORMER_1GB = Workload(
    name="transformer 1 GB",
    build="transformer",
    options={"width": 1024, "blocks": 7, "length": 32},
    batch=2,
    bytes=1_065_000_000,
)
# Seven blocks alike: hosts can share it evenly.
TRANSFORMER_64MB = Workload(
    name="transformer 64 MB",
    build="transformer",
    options={"width": 256, "blocks": 7, "length": 16},
    batch=8,
    bytes=68_000_000,
)
PERCEPTRON = Workload(name="perceptron", build="perceptron", batch=16, bytes=300_000)
DIGITS = Workload(name="digits", build="build_model", model_file=_DIGITS, batch=64, bytes=200_000, digits=True)
MEDIUM = Workload(
    name="transformer 7 MB",
    build="transformer",
    options={"width": 128, "blocks": 2, "length": 16},
    batch=4,
    bytes=5_600_000,
)
TINY = Workload(
    name="tiny transformer",
    build="transformer",
    options={"width": 16, "blocks": 1, "length": 8, "heads": 2},
    batch=4,
    bytes=150_000,
)


def write_examples(workload: Workload, folder: Path) -> Path:
    """Write the examples as `<workload>.npz` with x and y, once.

    Text is drawn from a seed: the next byte is learned no better than chance, and takes the same time.
    """
    file = folder / f"{workload.name.replace(' ', '-')}.npz"
    if file.exists():
        return file
    if workload.digits:
        from sklearn.datasets import load_digits

        found = load_digits()
        x, y = (found.images[..., None] / 16).astype(np.float32), found.target.astype(np.int32)
    else:
        length = int(workload.options.get("length", 64))
        text = np.random.default_rng(0).integers(0, 256, (_EXAMPLES, length + 1), dtype=np.int32)
        x, y = text[:, :-1], text[:, 1:]
    part = file.with_suffix(".part.npz")
    np.savez(part, x=x, y=y)
    part.replace(file)
    return file


def write_many_examples(folder: Path, count: int, *, name: str = "examples", seed: int = 0) -> Path:
    """Write `count` examples of 1 kB, for the input pipeline."""
    file = folder / f"{name}.npz"
    random = np.random.default_rng(seed)
    np.savez(file, x=random.integers(0, 256, (count, 1024), np.uint8), y=random.integers(0, 10, count, np.int32))
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How long a training is and when it commits, in steps.

    Attributes:
        steps: the step to train to.
        rows: a row of metrics is read at each multiple of this number of steps.
        commit_steps: a checkpoint at each multiple of this number; 0: none before the end.
    """

    steps: int
    rows: int
    commit_steps: int = 0

    def __post_init__(self) -> None:
        if self.steps % self.rows or self.commit_steps % self.rows:
            raise ValueError(f"{self}: steps and commit_steps are not multiples of rows")

    @property
    def commits(self) -> list[int]:
        """The steps of the checkpoints."""
        return list(range(self.commit_steps, self.steps + 1, self.commit_steps)) if self.commit_steps else []


def write_run_file(workload: Workload, training: Training, folder: Path, examples: Path, **more: Any) -> Path:
    """Write a run file that trains `workload` with Baton.

    Args:
        workload: the model and its batches.
        training: its length. Every commit is the end of a segment.
        folder: of the run file, the model's file and the run's storage.
        examples: the .npz file.
        more: further keys of the run file; mappings are merged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(workload.model_file.read_text(encoding="utf-8"), encoding="utf-8")
    content: dict[str, Any] = {
        "run": "bench",
        "storage": "./runs",
        "data": {"source": "npz", "options": {"path": str(examples), "x": "x", "y": "y"}, "validation_fraction": 0},
        "model": {"build": f"model.py:{workload.build}", "options": dict(workload.options)},
        "train": {
            "steps": training.steps,
            "segment_steps": training.commit_steps or training.steps,
            "global_batch_size": workload.batch,
            "log_every_steps": training.rows,
            "seed": 0,
        },
        "accelerator": {"kind": "cpu"},
        "checkpoint": {"keep_last": 3},
    }
    for key, value in more.items():
        content[key] = {**content[key], **value} if isinstance(content.get(key), dict) else value
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def peer_settings(workload: Workload, training: Training, folder: Path, examples: Path, *, threads: int) -> str:
    """The settings of a peer, as `peers/common.py` reads them."""
    return json.dumps(
        {
            "model_file": str(workload.model_file),
            "build": workload.build,
            "options": dict(workload.options),
            "data": str(examples),
            "batch": workload.batch,
            "steps": training.steps,
            "rows": training.rows,
            "commit_steps": training.commit_steps,
            "folder": str(folder),
            "threads": threads,
        }
    )
