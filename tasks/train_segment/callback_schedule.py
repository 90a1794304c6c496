"""When callbacks act: at absolute steps, and as a function of the state and the log, wherever a run is cut.

What they are told as an epoch ends with an evaluation, or with a logged row if the run has no evaluations between its
ends. At an evaluation they act when training begins from the checkpoint that was evaluated; at a row, right after it is
read. What they remember is in the state from then on. At the run's last evaluation they act in a segment of no steps.
"""

from pathlib import Path
from typing import Any

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import act_at_evaluations, steps_of_an_epoch
from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import RunLogError
from tasks.foundation.model.callback_memory import give_back, remembered
from tasks.foundation.model.callbacks import begin_callbacks, call, callbacks_identity
from tasks.foundation.runlog.history import evaluation_of, recent_rows
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import TrainState


class Callbacks:
    """The callbacks of one trainer, and what they remember, which lies in its state.

    Attributes:
        ended: why they have ended the run; None while they have not.
    """

    def __init__(self, spec: RunSpec, state: TrainState, *, code_folder: Path) -> None:
        self.ended: str | None = None
        self._state = state
        if state.memory is None:
            raise AssertionError("a run with callbacks has a state that holds what they remember")
        self._memory = state.memory
        self._reference = spec.train.callbacks or ""
        self._at_evaluations = act_at_evaluations(spec)
        self._every = steps_of_an_epoch(spec)
        # What others remember is of no use to these.
        self._identity = callbacks_identity(spec, code_folder)
        strategy = state.accelerator.strategy
        self._callbacks = begin_callbacks(state.model, spec, code_folder=code_folder, strategy=strategy)
        self._fresh = [remembered(callback) for callback in self._callbacks]
        # The last one, where an epoch ends with an evaluation; None where the state does not say.
        self._row: dict[str, float] | None = None

    def recall(self) -> None:
        """Remember what the state in memory holds, which has just been restored; begin anew if that is nothing."""
        held = self._memory.read()
        if held.get("of") != self._identity:
            held = {"memories": self._fresh, "row": held.get("row"), "ended": None}
        self._row, self.ended = held["row"], held["ended"]
        self._state.model.stop_training = False
        for callback, memory, fresh in zip(self._callbacks, held["memories"], self._fresh, strict=True):
            give_back(callback, memory, fresh=fresh)

    def begin(self, log: RunLog, start: CheckpointRef) -> bool:
        """What is due where training begins from `start`, which the state in memory is; whether anything was.

        Raises:
            RunLogError: `start` was to be evaluated, and the log does not say so.
            ModelError: a callback raised.
        """
        if start.step == 0:
            self._call_all("on_epoch_begin", 0, {})
        elif self._at_evaluations and start.step % self._every == 0:
            head = log.require_head()
            evaluation = evaluation_of(log, head, start.path)
            if evaluation is None:
                raise RunLogError(f"{log.home.uri}/{start.path} has not been evaluated, and callbacks act on that")
            validation = {f"val_{name}": value for name, value in evaluation.metrics.items()}
            if self._row is None:  # begun without callbacks
                self._row = next((row.metrics for row in recent_rows(log, head, 1)), {})
            self._end_epoch(start.step, {**self._row, **validation})
        else:
            return False
        self._keep()
        return True

    def take_row(self, row: MetricRow) -> None:
        """A row has just been read, at an absolute step.

        Raises:
            ModelError: a callback raised.
        """
        if self._at_evaluations:
            self._row = dict(row.metrics)
        else:
            self._end_epoch(row.step, dict(row.metrics))
        self._keep()

    def _end_epoch(self, step: int, logs: dict[str, float]) -> None:
        epoch = step // self._every - 1
        self._call_all("on_epoch_end", epoch, logs)
        if self.ended is None:
            self._call_all("on_epoch_begin", epoch + 1, {})

    def _call_all(self, hook: str, epoch: int, logs: dict[str, float]) -> None:
        model = self._state.model
        with self._state.accelerator.strategy.scope():
            for callback in self._callbacks:
                call(callback, hook, epoch, logs, reference=self._reference)
                if model.stop_training and self.ended is None:
                    self.ended = f"{type(callback).__name__} set model.stop_training in {hook} of epoch {epoch}"

    def _keep(self) -> None:
        memories: list[Any] = [remembered(callback) for callback in self._callbacks]
        held = {"of": self._identity, "memories": memories, "row": self._row, "ended": self.ended}
        self._memory.write(held)
