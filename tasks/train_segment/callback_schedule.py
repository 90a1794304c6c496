"""Call Keras callbacks at absolute steps. The calls depend on the state and the log, not on how a run is cut.

An epoch ends with an evaluation, or with a logged row in a run without evaluations before its end. After an
evaluation, callbacks are called when training starts from the evaluated checkpoint; after a row, as soon as it is read.
From then on, the state includes theirs. After the run's last evaluation they are called in a segment without steps.
"""

from pathlib import Path
from typing import Any

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations, steps_per_epoch
from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import RunLogError
from tasks.foundation.model.callback_state import callback_state, restore_callback_state
from tasks.foundation.model.callbacks import call_hook, callbacks_identity, start_callbacks
from tasks.foundation.runlog.history import evaluation_of, recent_rows
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import TrainState


class Callbacks:
    """The callbacks of one trainer. Their own state is part of the trainer's state.

    Attributes:
        ended: why they ended the run; None if they did not.
    """

    def __init__(self, spec: RunSpec, state: TrainState, *, code_folder: Path) -> None:
        self.ended: str | None = None
        self._state = state
        if state.host_state is None:
            raise AssertionError("the state of a run with callbacks has no host state")
        self._host_state = state.host_state
        self._reference = spec.train.callbacks or ""
        self._at_evaluations = callbacks_act_at_evaluations(spec)
        self._every = steps_per_epoch(spec)
        # These callbacks cannot use the state of others.
        self._identity = callbacks_identity(spec, code_folder)
        strategy = state.accelerator.strategy
        self._callbacks = start_callbacks(state.model, spec, code_folder=code_folder, strategy=strategy)
        self._fresh = [callback_state(callback) for callback in self._callbacks]
        # Metrics of the newest row, in a run whose epochs end with an evaluation; None if the state has none.
        self._row: dict[str, float] | None = None

    def recall(self) -> None:
        """Restore the callbacks' state from the train state; keep the initial one if there is none."""
        value = self._host_state.read()
        if value.get("of") != self._identity:
            value = {"memories": self._fresh, "row": value.get("row"), "ended": None}
        self._row, self.ended = value["row"], value["ended"]
        self._state.model.stop_training = False
        for callback, memory, fresh in zip(self._callbacks, value["memories"], self._fresh, strict=True):
            restore_callback_state(callback, memory, initial=fresh)

    def begin(self, log: RunLog, start: CheckpointRef) -> bool:
        """Call the callbacks if they are due at `start`, where training begins; the state in memory is that of `start`.

        Returns:
            Whether they were due.

        Raises:
            RunLogError: callbacks need the evaluation of `start`, and the log has none.
            ModelError: a callback raised.
        """
        if start.step == 0:
            self._call_all("on_epoch_begin", 0, {})
        elif self._at_evaluations and start.step % self._every == 0:
            head = log.require_head()
            evaluation = evaluation_of(log, head, start.path)
            if evaluation is None:
                raise RunLogError(f"{log.home.uri}/{start.path} has not been evaluated, and callbacks need its metrics")
            validation = {f"val_{name}": value for name, value in evaluation.metrics.items()}
            if self._row is None:  # the run had no callbacks before
                self._row = next((row.metrics for row in recent_rows(log, head, 1)), {})
            self._end_epoch(start.step, {**self._row, **validation})
        else:
            return False
        self._keep()
        return True

    def take_row(self, row: MetricRow) -> None:
        """Call the callbacks if they are due at a row that has just been read.

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
                call_hook(callback, hook, epoch, logs, reference=self._reference)
                if model.stop_training and self.ended is None:
                    self.ended = f"{type(callback).__name__} set model.stop_training in {hook} of epoch {epoch}"

    def _keep(self) -> None:
        memories: list[Any] = [callback_state(callback) for callback in self._callbacks]
        value = {"of": self._identity, "memories": memories, "row": self._row, "ended": self.ended}
        self._host_state.write(value)
