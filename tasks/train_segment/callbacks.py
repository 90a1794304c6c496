"""Call Keras callbacks at absolute steps. The calls depend on the state and the log, not on how a run is cut.

An epoch ends with an evaluation. In a run without evaluations before its end it is one of `train.epochs`, or it ends
with a logged row. After an evaluation, callbacks are called when training starts from the evaluated checkpoint; after a
row, as soon as it is read. From then on, the state includes theirs. After the run's last evaluation they are called in
a segment without steps. Batch hooks are called at logged rows.

Detect a loss that blows up. It reads logged rows only, so the result does not depend on how a run is cut.
"""

import logging
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Evaluation, LoggedValues, MetricRow
from baton.tasks.foundation.contracts.run_spec import (
    MOST_NAME_CHARACTERS,
    MOST_PLAIN_VALUES,
    MOST_TEXT_CHARACTERS,
    RunSpec,
    callbacks_act_at_evaluations,
    epochs_of_callbacks,
    is_plain,
    is_row_due,
)
from baton.tasks.foundation.errors import BlowUp, RunLogError
from baton.tasks.foundation.log.history import evaluation_of, recent_rows
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.masking import masked_values
from baton.tasks.foundation.model.user_callbacks import (
    LARGE_STATE_BYTES,
    StartedCallbacks,
    call_hook,
    callback_state,
    callbacks_identity,
    large_state_words,
    restore_callback_state,
    same_callbacks,
    start_callbacks,
)
from baton.tasks.foundation.state.train_state import TrainState
from baton.tasks.foundation.state.warm_state import WarmState
from baton.tasks.foundation.text import listed, option, shown

_LOGGER = logging.getLogger(__name__)
# A row has it, and Keras's callbacks that set it add it to the logs.
_LEARNING_RATE = "learning_rate"
_TO_GO_ON = "correct it, and go on from the newest checkpoint with " + option("accept", "callbacks")


class Callbacks:
    """The callbacks of one trainer. Their own state is part of the trainer's state.

    Attributes:
        ended: why they ended the run; None if they did not.
        notes: how each callback is treated, a line each.
    """

    def __init__(self, spec: RunSpec, state: TrainState, started: StartedCallbacks, *, code_folder: Path) -> None:
        self.ended: str | None = None
        self._state = state
        if state.host_state is None:
            raise AssertionError("the state of a run with callbacks has no host state")
        self._host_state = state.host_state
        self._reference = spec.train.callbacks or ""
        self._at_evaluations = callbacks_act_at_evaluations(spec)
        self._epochs = epochs_of_callbacks(spec)
        # These callbacks cannot use the state of others.
        self._identity = callbacks_identity(spec, code_folder)
        self._record = started.treatment.record
        self._callbacks = started.callbacks
        self._target = spec.train.target
        self._spec = spec
        self._has_batch_hooks = started.treatment.has_batch_hooks
        self.notes = started.treatment.notes
        # Of the newest epoch in this process; on_train_end gets it.
        self._logs: dict[str, float] = {}
        self._fresh = [callback_state(callback) for callback in self._callbacks]
        self._said_size = LARGE_STATE_BYTES
        # Metrics of the newest row, in a run whose epochs end with an evaluation; None if the state has none.
        self._row: dict[str, float] | None = None
        self._added: list[LoggedValues] = []
        self._noted = False

    def recall(self) -> None:
        """Restore the callbacks' state from the train state; keep the initial one if there is none."""
        value = self._host_state.read()
        if not same_callbacks(value.get("of"), self._identity, self._record):
            value = {"memories": self._fresh, "row": value.get("row"), "ended": None}
        self._row, self.ended = value["row"], value["ended"]
        self._state.model.stop_training = False
        for callback, memory, fresh in zip(self._callbacks, value["memories"], self._fresh, strict=True):
            restore_callback_state(callback, memory, initial=fresh)

    def need_evaluation(self, start: CheckpointRef) -> bool:
        """Whether `begin` reads the evaluation of `start` in the log."""
        return self._at_evaluations and (self._epochs.ends_at(start.step) or start.step == self._target)

    @property
    def have_row(self) -> bool:
        """Whether the state has the newest row, which callbacks get with an evaluation; else it is in the log."""
        return self._row is not None

    def begin(self, log: RunLog, start: CheckpointRef, known: Evaluation | None = None) -> bool:
        """Call the callbacks if they are due at `start`, where training begins; the state in memory is that of `start`.

        Args:
            start: where training begins.
            known: its evaluation, if this process has made it; it may not be logged yet. None: it is in the log.

        Returns:
            Whether they were due.

        Raises:
            RunLogError: callbacks need the evaluation of `start`, and the log has none.
            ModelError: a callback raised.
        """
        if start.step == 0:
            self._call_all("on_epoch_begin", 0, {})
            self._begin_batch(0)
        elif self.need_evaluation(start):
            head = None if known is not None and self.have_row else log.require_head()
            evaluation = known if head is None else evaluation_of(log, head, start.path)
            if evaluation is None:
                raise RunLogError(f"{log.home.uri}/{start.path} has not been evaluated, and callbacks need its metrics")
            validation = {f"val_{name}": value for name, value in evaluation.metrics.items()}
            if self._row is None and head is not None:  # the run had no callbacks before
                self._row = next((row.metrics for row in recent_rows(log, head, 1)), {})
            is_end = start.step == self._target  # no step follows; what is called here is not saved
            self._end_epoch(start.step, {**(self._row or {}), **validation}, begin_next=not is_end)
            if is_row_due(self._spec, start.step) and not is_end:
                self._begin_batch(start.step)
        else:
            return False
        self._keep()
        return True

    def take_row(self, row: MetricRow) -> None:
        """Call the callbacks if they are due at a row that has just been read.

        Raises:
            ModelError: a callback raised.
        """
        if self._has_batch_hooks:
            batch = row.step - 1 - self._epochs.end_of(self._epochs.ended_by(row.step - 1))
            self._call_all("on_train_batch_end", batch, dict(row.metrics))
        if self._at_evaluations:
            self._row = dict(row.metrics)
        elif self._epochs.ends_at(row.step):
            self._end_epoch(row.step, dict(row.metrics), begin_next=True)
        if not (self._at_evaluations and self._epochs.ends_at(row.step)):  # else after the evaluation
            self._begin_batch(row.step)
        self._keep()

    def take_added(self) -> tuple[LoggedValues, ...]:
        """Take what callbacks have added to the logs of epochs since the last call."""
        added, self._added = tuple(self._added), []
        return added

    def end_training(self) -> None:
        """Call `on_train_end`: the run has reached its target, or callbacks have ended it. Its changes are not saved.

        Raises:
            ModelError: a callback raised.
        """
        self._call_all("on_train_end", self._logs)

    def _begin_batch(self, step: int) -> None:
        """Call the batch hooks before the step after `step`.

        After a row this does not depend on the target: a run that is extended has the state of one with a later target.
        """
        if self._has_batch_hooks and self.ended is None:
            self._call_all("on_train_batch_begin", step - self._epochs.end_of(self._epochs.ended_by(step)), {})

    def _end_epoch(self, step: int, logs: dict[str, float], *, begin_next: bool) -> None:
        epoch, metrics = self._epochs.last(step), {*logs, _LEARNING_RATE}
        self._call_all("on_epoch_end", epoch, logs)
        self._logs = logs
        self._note_added(step, {name: value for name, value in logs.items() if name not in metrics})
        if self.ended is None and begin_next:
            self._call_all("on_epoch_begin", epoch + 1, {})

    def _note_added(self, step: int, added: Mapping[Any, Any]) -> None:
        """Keep the plain values that callbacks added to the logs of an epoch; name the others once."""
        found = {name: _as_python(value) for name, value in added.items()}
        plain = {
            name: masked_values(value, name)
            for name, value in found.items()
            if isinstance(name, str)
            and len(name) <= MOST_NAME_CHARACTERS
            and (isinstance(value, float) or is_plain(value))
        }
        plain = dict(list(plain.items())[:MOST_PLAIN_VALUES])
        if plain:
            on: Literal["row", "evaluation"] = "evaluation" if self._at_evaluations else "row"
            self._added.append(LoggedValues(step=step, on=on, values=plain))
        others = [shown(str(name)) for name in found if name not in plain]
        if others and not self._noted:
            self._noted = True
            _LOGGER.warning(
                "%s: the log of the run leaves out %s, which callbacks added to logs; it has numbers, true and false, "
                "and texts of up to %d characters, at most %d at an epoch",
                self._reference,
                listed(others),
                MOST_TEXT_CHARACTERS,
                MOST_PLAIN_VALUES,
            )

    def _call_all(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks; the arguments are as in Keras: the number of the epoch or batch, and logs."""
        model, unit = self._state.model, "batch" if "batch" in hook else "epoch"
        with self._state.accelerator.strategy.scope():
            for callback in self._callbacks:
                call_hook(callback, hook, *arguments, reference=self._reference, hints=[_TO_GO_ON])
                if model.stop_training and self.ended is None:
                    self.ended = f"{type(callback).__name__} set model.stop_training in {hook} of {unit} {arguments[0]}"

    def _keep(self) -> None:
        memories: list[Any] = [callback_state(callback) for callback in self._callbacks]
        value = {"of": self._identity, "memories": memories, "row": self._row, "ended": self.ended}
        size = self._host_state.write(value)
        if size > self._said_size:  # again if it has doubled
            self._said_size = 2 * size
            for words in filter(None, map(large_state_words, self._callbacks)):
                _LOGGER.warning("%s: %s", self._reference, words)


def _as_python(value: Any) -> Any:
    """A number of NumPy or TensorFlow as Python's; any other value as it is."""
    return np.asarray(value).item() if getattr(value, "shape", None) == () else value


def callbacks_of(warm: WarmState) -> Callbacks:
    """The callbacks that init-or-restore has started on this model, or new ones.

    Args:
        warm: a state that no trainer has used. What it holds is forgotten if callbacks are started here.
    """
    spec, state, code_folder = warm.spec, warm.state, warm.code_folder
    started = warm.companion(StartedCallbacks)
    if started is None:
        # Before any restore, because Keras's callbacks reset their state in on_train_begin.
        warm.forget_content()
        strategy = state.accelerator.strategy
        started = start_callbacks(state.model, spec, code_folder=code_folder, strategy=strategy)
    else:
        started.random_states.restore()
    return Callbacks(spec, state, started, code_folder=code_folder)


# A median of fewer rows is too noisy; one of more rows would include old losses.
MIN_ROWS = 5
MEDIAN_ROWS = 21
_LOSS = "loss"


class LossWatch:
    """Compares each logged loss with the running median of the losses before it."""

    def __init__(self, factor: float | None, rows: Iterable[MetricRow] = ()) -> None:
        """Start with the rows that the run has logged so far.

        Args:
            factor: a loss above `factor` times the median is a blow-up; None turns detection off.
            rows: the last `MEDIAN_ROWS` rows before the checkpoint that training starts from, oldest first.
        """
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=MEDIAN_ROWS)
        for row in rows:
            self._add(row)

    def check(self, row: MetricRow) -> None:
        """Check a new row.

        Raises:
            BlowUp: its loss is more than `factor` times the absolute value of the running median.
        """
        loss = row.metrics.get(_LOSS)
        if self._factor is not None and loss is not None and len(self._losses) >= MIN_ROWS:
            median = statistics.median(self._losses)
            if loss > self._factor * abs(median):
                raise BlowUp(
                    f"the loss logged at step {row.step} is {loss:.4g}, more than train.blowup_factor = "
                    f"{self._factor:g} times the median {median:.4g} of the {len(self._losses)} rows before; this is "
                    "not committed. Lower the learning rate, clip gradients, or look at the data of these steps",
                    step=row.step,
                )
        self._add(row)

    def _add(self, row: MetricRow) -> None:
        if _LOSS in row.metrics:
            self._losses.append(row.metrics[_LOSS])
