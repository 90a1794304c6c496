"""The user's Keras callbacks: creates them, decides how each is treated, and attaches them to the model."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
from keras.src.callbacks.monitor_callback import MonitorCallback  # Keras's callbacks with a monitor inherit it

from tasks.foundation.contracts.callback_record import LOG_EVERY, CallbackRecord
from tasks.foundation.contracts.identity_keys import CALLBACKS
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations, epochs_of_callbacks
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.callback_treatment import Treatment, mode_of, treat
from tasks.foundation.model.code_digest import digests_of_user_code
from tasks.foundation.model.isolated_build import RandomStates
from tasks.foundation.model.learning_rate import unsettable_rate
from tasks.foundation.model.metrics import Results
from tasks.foundation.user_code import load_function
from tasks.foundation.user_errors import user_error


@dataclass(frozen=True, slots=True)
class StartedCallbacks:
    """Callbacks that are attached to a model, and whose `on_train_begin` has been called.

    Attributes:
        callbacks: those whose hooks are called, in the order of the run file's function.
        random_states: right after they were started. A step that is traced later gets them back, because callbacks may
            have drawn.
        treatment: how each callback of the run file's function is treated.
    """

    callbacks: tuple[keras.callbacks.Callback, ...]
    random_states: RandomStates
    treatment: Treatment = field(default_factory=Treatment)


def callbacks_identity(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """Return the identity key `train.callbacks` as JSON values: the callbacks' code and schedule.

    Raises:
        ModelError: the function cannot be loaded.
    """
    reference = spec.train.callbacks
    if reference is None:
        return {CALLBACKS: None}
    function = load_function(reference, code_folder, seed=spec.train.seed)
    return {
        CALLBACKS: {
            "function": reference.partition(":")[2],
            "code": digests_of_user_code(function, reference),
            "evaluate.every_steps": spec.evaluate.every_steps,
            LOG_EVERY: spec.train.log_every_steps,
            # Left out by default, as in logs of earlier versions.
            **({} if spec.evaluate.every is None else {"evaluate.every": spec.evaluate.every}),
        }
    }


def same_callbacks(recorded: Any, now: dict[str, Any], record: CallbackRecord) -> bool:
    """Return whether two values of `callbacks_identity` are of the same callbacks.

    Args:
        recorded: the value in a checkpoint; None if it has none.
        now: the value of this process.
        record: of the callbacks of this process.
    """
    if recorded is None or not record.ignores_rows:
        return bool(recorded == now)
    both = ({**identity[CALLBACKS], LOG_EVERY: None} for identity in (recorded, now))
    return next(both) == next(both)


def start_callbacks(model: keras.Model, spec: RunSpec, *, code_folder: Path, strategy: Any) -> StartedCallbacks:
    """Create the callbacks that the run file names, attach them to the model, and call `on_train_begin`.

    Raises:
        ModelError: the function raises or returns anything other than callbacks, or a callback cannot be resumed.
    """
    reference = spec.train.callbacks
    if reference is None:
        return StartedCallbacks((), RandomStates.now())
    function = load_function(reference, code_folder, seed=spec.train.seed)
    try:
        made = function()
    except (Exception, SystemExit) as fault:
        raise ModelError(user_error(f"{reference} raised", fault)) from fault
    made = _flat(made)
    if not isinstance(made, list | tuple) or not all(isinstance(it, keras.callbacks.Callback) for it in made):
        kinds = ", ".join(type(it).__name__ for it in made) if isinstance(made, list | tuple) else type(made).__name__
        raise ModelError(f"{reference} returned {kinds}; return a list of keras.callbacks.Callback")
    epochs = epochs_of_callbacks(spec)
    # Keras counts an epoch that the target cuts short.
    params = {"verbose": 0, "epochs": epochs.ended_by(spec.train.target - 1) + 1, "steps": epochs.steps}
    model.stop_training = False
    with strategy.scope():
        treatment = treat(made, model, spec, reference=reference)
        for callback in treatment.called:
            for hook, *arguments in (("set_params", dict(params)), ("set_model", model), ("on_train_begin",)):
                call_hook(callback, hook, *arguments, reference=reference)
    return StartedCallbacks(treatment.called, RandomStates.now(), treatment)


def _flat(made: Any) -> Any:
    """Callbacks out of lists in lists and of Keras's own containers of them, as `fit` calls them."""
    if isinstance(made, keras.callbacks.CallbackList):
        return _flat(made.callbacks)
    if not isinstance(made, list | tuple):
        return made
    nested = (list, tuple, keras.callbacks.CallbackList)
    return [each for one in made for each in (_flat(one) if isinstance(one, nested) else [one])]


def call_hook(
    callback: keras.callbacks.Callback, hook: str, *arguments: Any, reference: str, hints: Sequence[str] = ()
) -> None:
    """Call a hook of a user's callback. `hints` end the message of an error.

    Raises:
        ModelError: the hook raises, or compiles the model anew.
    """
    what = f"{reference}: {hook} of {type(callback).__name__}"
    model = next((each for each in arguments if isinstance(each, keras.Model)), callback.model)
    compiled = _compiled(model)
    try:
        getattr(callback, hook)(*arguments)
    except (Exception, SystemExit) as fault:
        raise ModelError(user_error(f"{what} raised", fault, hints=hints)) from fault
    if compiled != _compiled(model):
        raise ModelError(
            message(
                f"{what} compiles the model anew, or replaces its optimizer or a metric; the train step is traced "
                "once, so it would train as before, and the new metrics would stay 0",
                hints=[
                    "compile in the function that builds the model; a callback can set model.optimizer.learning_rate",
                    "to change it in mid-run, edit that function and continue with --accept compile,callbacks",
                ],
            )
        )


def _compiled(model: keras.Model | None) -> list[int]:
    """Ids of what the model was compiled with. While a hook runs, none is used again: the train state keeps all."""
    return [] if model is None else [id(each) for each in (model.optimizer, *model.metrics)]


def require_monitors(
    callbacks: Iterable[keras.callbacks.Callback],
    model: keras.Model,
    spec: RunSpec,
    *,
    trained: Results,
    tested: Results,
) -> None:
    """Refuse a callback that monitors a metric it never receives, or one that is no number; Keras only warns.

    Args:
        callbacks: see `start_callbacks`.
        model: that they were started for.
        spec: the run file.
        trained: of the training metrics, the loss included.
        tested: of the validation metrics that callbacks receive.

    Raises:
        ModelError: names the metrics that the callback receives, the shape of its own, or that `mode` is missing.
    """
    reference = spec.train.callbacks or ""
    received = sorted({*trained.numbers, *(f"val_{name}" for name in tested.numbers)})
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in received:
            asked_by = f"{reference}: {type(callback).__name__} has monitor = {monitor!r}"
            trained.require_number(monitor, f"{asked_by}, which")
            if monitor.startswith("val_"):
                tested.require_number(monitor.removeprefix("val_"), f"{asked_by}, which", prefix="val_")
            remedy = ""
            if monitor.startswith("val_") and not callbacks_act_at_evaluations(spec):
                remedy = (
                    "; for validation metrics, set evaluate.every or evaluate.every_steps, and a "
                    "data.validation_fraction above 0"
                )
            raise ModelError(f"{asked_by}; the available metrics are {', '.join(received)}{remedy}")
        if isinstance(callback, MonitorCallback):
            mode_of(callback, model, reference)


def require_learning_rate(callbacks: Iterable[keras.callbacks.Callback], spec: RunSpec) -> None:
    """Refuse a callback of Keras that sets the learning rate, if it cannot be set, or not to the callback's value.

    Args:
        callbacks: see `start_callbacks`.
        spec: the run file.

    Raises:
        ModelError: names the callback and the schedule, or what a `LearningRateScheduler` has raised.
    """
    reference = spec.train.callbacks or ""
    setting = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
    for callback in (each for each in callbacks if isinstance(each, setting)):
        name = type(callback).__name__
        if instead := unsettable_rate(callback.model):
            raise ModelError(
                message(
                    f"{reference}: {name} sets the learning rate, but {spec.model.build} compiles {instead}, which "
                    "decides the rate itself",
                    hints=["compile it with a number, such as Adam(0.001), or leave out the callback"],
                )
            )
        if isinstance(callback, keras.callbacks.LearningRateScheduler):
            # Its first call is after step 0. On a model that has a learning rate only, it has no effect.
            rate = float(keras.ops.convert_to_numpy(callback.model.optimizer.learning_rate))
            tried = copy.copy(callback)
            tried.verbose = 0
            for epoch in (0, epochs_of_callbacks(spec).last(spec.train.target)):
                tried.set_model(SimpleNamespace(optimizer=SimpleNamespace(learning_rate=rate), metrics=[]))
                call_hook(tried, "on_epoch_begin", epoch, reference=reference)
