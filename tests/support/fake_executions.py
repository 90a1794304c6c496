"""Executions without processes and without TensorFlow: their logs are written at once."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from baton.flows.proof.compare import SavedState
from baton.flows.proof.execute import Execution
from baton.flows.supervisor import Outcome
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef, checkpoint_folder
from baton.tasks.foundation.contracts.log_entry import Commit, Environment, MetricRow, Origin
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage

ENVIRONMENT = Environment(accelerator="cpu", replicas=1, intra_op_threads=2, inter_op_threads=2, versions={})
KEYS = ("model/dense/kernel", "model/dense/bias", "optimizer/0/iteration", "metrics/0/0/loss/total", "step")


def state_of(values: dict[str, Any]) -> SavedState:
    """The state with these values."""
    leaves = {key: f"{value.dtype.name}{list(value.shape)} {value.tobytes().hex()}" for key, value in values.items()}
    return SavedState(leaves=leaves, read=values.__getitem__)


def small_run_file(folder: Path) -> RunFile:
    """A run file in `folder` with settings that a proof has to override."""
    values = {
        "run": "mine",
        "storage": "runs",
        "data": {"source": "digits"},
        "model": "model.py:build",
        "train": {"steps": 10, "segment_seconds": 5, "global_batch_size": 4},
        "checkpoint": {"keep_every_steps": 3},
        "evaluate": {"every_steps": 2},
    }
    (folder / "model.py").write_text("def build():\n    pass\n")
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return load_run_file(folder / "run.yaml")


@dataclass
class FakeExecutions:
    """Processes that write their logs at once; `result` gives the final state of an execution by its name."""

    too_quick: int = 0
    result: Callable[[str], str] = lambda _: "same"
    content: Callable[[str], str] = lambda _: "c"
    stateful_operations: str = ""
    ended: list[Execution] = field(default_factory=list)
    killed: list[Execution] = field(default_factory=list)

    def run_to_end(self, execution: Execution) -> Outcome:
        self.ended.append(execution)
        self._train(execution, execution.steps)
        return Outcome(returncode=0, stateful_operations=self.stateful_operations)

    def kill_after(self, execution: Execution, step: int) -> Outcome:
        self.killed.append(execution)
        if len(self.killed) <= self.too_quick:
            self._train(execution, execution.steps)
            # In turn: it ended before the kill; it was killed when all its work was done.
            return Outcome(returncode=-9 * (len(self.killed) % 2), killed=True)
        self._train(execution, step)
        return Outcome(returncode=-9, killed=True)

    def read(self, _home: LocalStorage, ref: CheckpointRef) -> dict[str, Any]:
        values = {key: np.arange(6, dtype="float32").reshape(2, 3) for key in KEYS}
        if ref.state_digest != "same":
            values["model/dense/bias"] = values["model/dense/bias"] + np.float32([[0, 0, 0.5], [0, 0, 2]])
            values["optimizer/0/iteration"] = np.zeros((2, 3), "float32")
        return values

    def saved(self, home: LocalStorage, ref: CheckpointRef) -> SavedState:
        return state_of(self.read(home, ref))

    def _train(self, execution: Execution, until: int) -> None:
        log = RunLog(execution.home)
        result, content = self.result(execution.name), self.content(execution.name)
        (length,) = (int(each.split("=")[1]) for each in execution.settings if each.startswith("train.segment_steps="))
        if log.head() is None:
            origin = Origin(identity={"data.content_digest": content}, environment=ENVIRONMENT)
            log.append(lambda _: origin, attempt=uuid.uuid4().hex)
            self._commit(log, 0, result)
        while (head := log.head()) and head.tip and head.tip.step < until:
            step = min(execution.steps, (head.tip.step // length + 1) * length)
            self._commit(log, step, result, parent=head.tip)

    def _commit(self, log: RunLog, step: int, result: str, parent: CheckpointRef | None = None) -> None:
        head, attempt = log.head(), uuid.uuid4().hex
        assert head is not None
        path = checkpoint_folder(step=step, base=head.base, attempt=attempt)
        ref = CheckpointRef(
            path=path, step=step, base=head.base, attempt=attempt, state_digest=result, manifest_digest="", size=1
        )
        rows = range(parent.step + 1, step + 1) if parent else ()
        loss = {False: 0.5, True: float("nan")}  # NaN equals itself
        history = tuple(
            MetricRow(step=row, metrics={"loss": 0.7 if result != "same" and row > 15 else loss[row == 3]})
            for row in rows
            if row % 2 == 0 or row == 3
        )
        body = Commit(
            checkpoint=ref, parent=parent.path if parent else None, exit_reason="segment_end", history=history
        )
        commit(log, body)
