"""The user's Keras callbacks: creates them, decides how each is treated, attaches them, and saves their state.

A callback is called, replaced by what Baton does itself, or refused. Keras's callbacks that save, log or show are
replaced, and what they would do is done from the log, so it is right after any restart. Batch hooks are called at each
logged row: at an absolute step, with metrics that are read there anyway.

The state of a callback is JSON values: the plain values among its attributes. A callback may define `get_state()`,
which returns plain values, and `set_state(state)`; then nothing else is saved. The numbers of a large array are bytes,
which are no JSON: `HostState` keeps them beside it.
"""

import copy
import enum
import functools
import json
import logging
import pathlib
import re
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras.src.callbacks.monitor_callback import MonitorCallback
from pydantic import ValidationError

from baton.tasks.foundation.contracts.identity import (
    CALLBACKS,
    CODE,
    LOG_EVERY,
    CallbackRecord,
    CsvFile,
    callback_schedule,
)
from baton.tasks.foundation.contracts.run_spec import (
    KeepBest,
    RunSpec,
    callbacks_act_at_evaluations,
    epochs_of_callbacks,
)
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.model.build import RandomStates
from baton.tasks.foundation.model.metrics import Results, unsettable_rate
from baton.tasks.foundation.model.saved_code import user_code
from baton.tasks.foundation.telemetry.formatting import size_words
from baton.tasks.foundation.text import command, message, option
from baton.tasks.foundation.user_functions import load_function
from baton.tasks.foundation.user_traceback import user_error

_COMMITS = "Baton commits checkpoints itself (checkpoint.keep_last, keep_every_steps)"
# What Baton does in place of Keras's callbacks.
_REPLACED: Mapping[str, str] = {
    "ModelCheckpoint": _COMMITS,
    "BackupAndRestore": "Baton commits and restores the whole train state itself",
    "OrbaxCheckpoint": _COMMITS,
    "TensorBoard": "Baton writes the curves to tensorboard/ in the run's home itself",
    "SwapEMAWeights": "Baton evaluates and exports with the averages of use_ema itself",
    "TerminateOnNaN": "Baton stops at the first loss that is not finite itself (train.on_blowup)",
    "ProgbarLogger": "Baton shows progress itself",
    "CSVLogger": "Baton writes the file from the log itself",
}
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_NEVER_CALLED = tuple(
    f"on_{what}_{when}" for what in ("test", "test_batch", "predict", "predict_batch") for when in ("begin", "end")
)
_ANY_PACE = "accepts_several_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What becomes of a run's callbacks.

    Attributes:
        called: the callbacks whose hooks are called, in order.
        monitors: the callbacks that need a metric, called or not.
        has_batch_hooks: whether one of those that are called has a batch hook of its own.
        record: what Baton does in place of the others.
        notes: one line for each callback.
    """

    called: tuple[keras.callbacks.Callback, ...] = ()
    monitors: tuple[keras.callbacks.Callback, ...] = ()
    has_batch_hooks: bool = False
    record: CallbackRecord = field(default_factory=CallbackRecord)
    notes: tuple[str, ...] = ()


def treat(
    callbacks: Sequence[keras.callbacks.Callback], model: keras.Model, spec: RunSpec, *, reference: str
) -> Treatment:
    """Decide how each callback is treated.

    Args:
        model: the model that they are for; its metrics are built.
        reference: the function's name in the run file, for messages.

    Raises:
        ModelError: a callback cannot be used.
    """
    called: list[keras.callbacks.Callback] = []
    monitors: list[keras.callbacks.Callback] = []
    rules: dict[str, KeepBest] = {}
    files: dict[str, CsvFile] = {}
    notes = []
    for callback in callbacks:
        name = type(callback).__name__
        remedy = _replacement(callback, reference)
        rule = _best_rule(callback, model, spec, reference)
        if rule is not None:
            rules[name] = rule
        if remedy is None or rule is not None:
            monitors.append(callback)
        if isinstance(callback, keras.callbacks.CSVLogger):
            file = _csv_file(callback, reference)
            if file.name in files:
                raise ModelError(f"{reference}: two CSVLoggers write {file.name}; give one another name")
            files[file.name] = file
            remedy = f"Baton writes callbacks/{file.name} in the run's home, from the log, when a command ends"
        elif remedy is None:
            _refuse_hooks(callback, spec, reference)
            called.append(callback)
        words = _called_words(callback, spec) if remedy is None else f"not called: {remedy}"
        notes.append(f"callback {name}: {words}{'' if rule is None else _best_words(rule, spec)}")
    has_batch_hooks = any(own_hooks(callback, _BATCH_HOOKS) for callback in called)
    of_training = any(not str(getattr(each, "monitor", "val_")).startswith("val_") for each in monitors)
    return Treatment(
        called=tuple(called),
        monitors=tuple(monitors),
        has_batch_hooks=has_batch_hooks,
        record=CallbackRecord(
            keep_best=_one_rule(rules, spec, reference),
            csv_files=tuple(files.values()),
            on_train_end=any(own_hooks(callback, ("on_train_end",)) for callback in called),
            sees_rows=has_batch_hooks or of_training or not callbacks_act_at_evaluations(spec),
        ),
        notes=tuple(notes),
    )


def own_hooks(callback: keras.callbacks.Callback, hooks: Iterable[str]) -> list[str]:
    """Return the hooks that a callback has from the user's code; Keras's own ones, if they do anything, print."""
    found = []
    for hook in hooks:
        function = getattr(callback, hook, None)
        function = getattr(function, "__func__", function)
        if function is not None and (getattr(function, "__module__", None) or "").partition(".")[0] != "keras":
            found.append(hook)
    return found


def _replacement(callback: keras.callbacks.Callback, reference: str) -> str | None:
    """What Baton does in place of a callback; None if it is called."""
    for name, remedy in _REPLACED.items():
        kind = getattr(keras.callbacks, name, None)
        if kind is None or not isinstance(callback, kind):
            continue
        if type(callback) is not kind:
            raise ModelError(
                f"{reference}: callback {type(callback).__name__} is a subclass of {name}, which is not called: "
                f"{remedy}. Derive it from keras.callbacks.Callback"
            )
        return remedy
    return None


def _best_rule(callback: Any, model: keras.Model, spec: RunSpec, reference: str) -> KeepBest | None:
    """The rule for the best checkpoint that a callback asks for; None if it does not."""
    name = type(callback).__name__
    if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
        asks = "restore_best_weights=True"
        callback.restore_best_weights = False  # the best checkpoint is kept in the home, not in memory
    elif isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only:
        asks = "save_best_only=True"
    elif getattr(callback, "restore_best_weights", False):
        raise ModelError(
            f"{reference}: {name} has restore_best_weights=True, which is not supported; set checkpoint.keep_best and "
            "export the best checkpoint with " + command("export", ("step", "best"))
        )
    else:
        return None
    if not callback.monitor.startswith("val_"):
        raise ModelError(
            f"{reference}: {name} has {asks} and monitor = {callback.monitor!r}, a training metric; the best "
            f"checkpoint is kept by a validation metric: use monitor='val_{callback.monitor}', or "
            f"{asks.partition('=')[0]}=False"
        )
    metric = callback.monitor.removeprefix("val_")
    if not callbacks_act_at_evaluations(spec):
        return KeepBest(metric=metric, mode="min")  # refused when its metric is looked up
    return KeepBest(metric=metric, mode=mode_of(callback, model, reference))


def mode_of(callback: Any, model: keras.Model, reference: str) -> Any:
    """Return `min` or `max`, as Keras decides it for mode='auto' at the first epoch: by the compiled metric.

    Raises:
        ModelError: Keras cannot decide it.
    """
    copied = copy.copy(callback)
    copied.set_model(model)
    try:
        if copied.monitor_op is None:
            copied._set_monitor_op()
    except ValueError as fault:
        raise ModelError(f"{reference}: {type(callback).__name__}: {fault}") from fault
    return "min" if copied.monitor_op is keras.ops.less else "max"


def _one_rule(rules: Mapping[str, KeepBest], spec: RunSpec, reference: str) -> KeepBest | None:
    different = {(rule.metric, rule.mode) for rule in rules.values()}
    if len(different) > 1 and spec.checkpoint.keep_best is None:
        asked = ", ".join(f"{name}: {rule.metric} ({rule.mode})" for name, rule in rules.items())
        raise ModelError(
            message(
                f"{reference}: callbacks ask for different best checkpoints ({asked}), and a run keeps one",
                hints=["use one monitor, or set checkpoint.keep_best in the run file, which then decides"],
            )
        )
    return next(iter(rules.values()), None)


def _csv_file(callback: Any, reference: str) -> CsvFile:
    try:
        return CsvFile(name=Path(callback.filename).name, separator=callback.sep)
    except ValidationError as fault:
        raise ModelError(
            f"{reference}: CSVLogger({callback.filename!r}, separator={callback.sep!r}): {fault.errors()[0]['msg']}"
        ) from fault


def _refuse_hooks(callback: keras.callbacks.Callback, spec: RunSpec, reference: str) -> None:
    name = type(callback).__name__
    for hook in own_hooks(callback, _NEVER_CALLED):
        raise ModelError(f"{reference}: callback {name} has {hook}: it is never called; use on_epoch_end")
    if spec.train.log_every_steps == 1 or getattr(callback, _ANY_PACE, False):
        return
    every = spec.train.log_every_steps
    pace = "once an epoch" if every is None else f"once for train.log_every_steps = {every} steps"
    for hook in own_hooks(callback, _BATCH_HOOKS):
        raise ModelError(
            message(
                f"{reference}: callback {name} has {hook}: steps run inside one compiled loop, so it is called at each "
                f"logged row only, {pace}",
                hints=[
                    f"if that is often enough, set {_ANY_PACE} = True on the callback; its logs are the row's metrics",
                    "or use on_epoch_end, or train.log_every_steps: 1, which is slower",
                    "to change the learning rate at each step, give the optimizer a LearningRateSchedule",
                ],
            )
        )


def _called_words(callback: keras.callbacks.Callback, spec: RunSpec) -> str:
    every, at_epochs = spec.train.log_every_steps, spec.train.epochs is not None
    at = f"each logged row (train.log_every_steps = {every})"
    if callbacks_act_at_evaluations(spec):
        at_epochs, at = spec.evaluate.every is not None, f"each evaluation ({spec.evaluate.every_steps} steps)"
    words = "called at the end of each epoch" if at_epochs else f"called at {at}, which ends its epoch"
    if own_hooks(callback, _BATCH_HOOKS):
        paces = [] if every is None else [f"every {every} steps" if every > 1 else "at each step"]
        paces += ["at the end of each epoch"] if spec.train.epochs is not None and every != 1 else []
        words += f"; its batch hooks {' and '.join(paces)}"
    return words


def _best_words(rule: KeepBest, spec: RunSpec) -> str:
    decides = spec.checkpoint.keep_best
    if decides is not None and decides != rule:
        return f"; the best checkpoint is that of checkpoint.keep_best: {decides.metric} ({decides.mode})"
    return (
        f"; the checkpoint with the best validation {rule.metric} ({rule.mode}) is kept, see baton export --step best"
    )


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
    schedule = callback_schedule(spec)
    # A checkpoint has the value too, so the order of its keys stays.
    return {
        CALLBACKS: {
            "function": schedule["function"],
            CODE: user_code(function, reference).digests(),
            **schedule,
        }
    }


def same_callbacks(recorded: Any, now: dict[str, Any], record: CallbackRecord) -> bool:
    """Return whether two values of `callbacks_identity` are of the same callbacks.

    Args:
        recorded: the value in a checkpoint; None if it has none.
    """
    if recorded is None or record.sees_rows:
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
                    "to change it in mid-run, edit that function and continue with "
                    + option("accept", "compile,callbacks"),
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
            remedy = _validation_remedy(spec) if monitor.startswith("val_") else ""
            raise ModelError(f"{asked_by}; the available metrics are {', '.join(received)}{remedy}")
        if isinstance(callback, MonitorCallback):
            mode_of(callback, model, reference)


def _validation_remedy(spec: RunSpec) -> str:
    """What this run file needs so that callbacks receive validation metrics; "" if they do."""
    needs = [] if spec.data.has_validation else ["data.validation, or a data.validation_fraction above 0"]
    periodic = spec.evaluate.every is not None or spec.evaluate.every_steps is not None
    # With epochs and validation examples, each epoch ends with an evaluation unless the run file says otherwise.
    if not periodic and (spec.train.epochs is None or spec.data.has_validation):
        needs.append("evaluate.every: epoch, or evaluate.every_steps")
    return f"; for validation metrics, set {'; and '.join(needs)}" if needs else ""


def require_learning_rate(callbacks: Iterable[keras.callbacks.Callback], spec: RunSpec) -> None:
    """Refuse a callback of Keras that sets the learning rate, if it cannot be set, or not to the callback's value.

    Args:
        callbacks: see `start_callbacks`.

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


# Keras sets these again in every process.
_SET_BY_KERAS = {"_model", "model", "params"}
# Types of values without state; they are not saved.
_STATELESS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    pathlib.PurePath,
    re.Pattern,
    logging.Logger,
    enum.Enum,
)
_NUMBERS = "biufc"
# Arrays from this size on are bytes; the states of most callbacks stay text.
_LARGE_ARRAY_BYTES = 1024
# A state of this size is worth a word, because each checkpoint has it.
LARGE_STATE_BYTES = 1_000_000
_MOST_ATTRIBUTES = 8
_GET_STATE = "get_state"


class _UnsupportedValueError(Exception):
    """The value cannot be converted to JSON exactly."""


def callback_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the callback's current state.

    Raises:
        ModelError: the callback holds a value that a checkpoint cannot store; names the attribute and its type.
    """
    name = type(callback).__name__
    if hasattr(callback, _GET_STATE):
        try:
            return {_GET_STATE: _encoded(callback.get_state())}
        except _UnsupportedValueError as fault:
            raise ModelError(
                f"callback {name}: its get_state() returned {fault}, which a checkpoint cannot store; return numbers, "
                "strings, NumPy arrays of numbers, or lists and dicts of these"
            ) from fault
    state = {}
    for key, value in sorted(vars(callback).items()):
        if key in _SET_BY_KERAS:
            continue
        try:
            state[key] = _encoded(value)
        except _UnsupportedValueError as fault:
            if not _is_stateless(value, callback.model):
                raise ModelError(
                    f"callback {name}: the attribute {key} has type {type(value).__name__}, which a checkpoint cannot "
                    "store; use numbers, strings, NumPy arrays of numbers, or lists and dicts of these, or define "
                    "get_state() and set_state(state) in the callback"
                ) from fault
    return state


def restore_callback_state(
    callback: keras.callbacks.Callback, state: Mapping[str, Any], *, initial: Mapping[str, Any]
) -> None:
    """Restore a callback to a saved state.

    Args:
        callback: in any state.
        state: what `callback_state` returned when the state was saved.
        initial: what `callback_state` returned for the new callback, after `on_train_begin`.
    """
    if _GET_STATE in state:
        callback.set_state(_decoded(state[_GET_STATE]))
        return
    for key in callback_state(callback).keys() - initial.keys() - state.keys():
        delattr(callback, key)  # set since the state was saved
    for key, value in {**initial, **state}.items():
        setattr(callback, key, _decoded(value))


def large_state_words(callback: keras.callbacks.Callback) -> str:
    """Return what to tell the user of a callback whose state makes checkpoints large; "" if it does not."""
    sizes = {name: _size(value) for name, value in callback_state(callback).items()}
    total = sum(sizes.values())
    if total < LARGE_STATE_BYTES:
        return ""
    largest = {name: size for name, size in sizes.items() if size >= total / _MOST_ATTRIBUTES}
    kept = " and ".join(f"{size_words(size)} in {name}" for name, size in largest.items())
    return (
        f"callback {type(callback).__name__} keeps {kept}: each checkpoint has them, and they are copied whenever the "
        "callback acts; define get_state() and set_state(state) in it, which return and take only what changes"
    )


def _size(encoded: Any) -> int:
    """The size of an encoded value in a checkpoint, in bytes."""
    held: list[int] = []
    return len(json.dumps(encoded, default=lambda data: held.append(len(data)))) + sum(held)


def _is_stateless(value: Any, model: keras.Model) -> bool:
    known = (model, model.optimizer, *model.layers)
    return isinstance(value, _STATELESS) or any(value is each for each in known)


def _encoded(value: Any) -> Any:  # noqa: PLR0911 - one a type
    """Convert a value to JSON. Lists stay lists; a type that JSON lacks becomes a dict with one key, its type."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        array = np.asarray(value)
        form, data = "scalar" if isinstance(value, np.generic) else "array", array.tobytes()
        return {form: [array.dtype.str, list(array.shape), data if len(data) >= _LARGE_ARRAY_BYTES else data.hex()]}
    if kind is list:
        return [_encoded(item) for item in value]
    if kind is tuple:
        return {"tuple": [_encoded(item) for item in value]}
    if kind in (set, frozenset):  # the order of a set differs between processes
        return {kind.__name__: sorted(map(_encoded, value), key=json.dumps)}
    if kind is deque:
        return {"deque": [[_encoded(item) for item in value], value.maxlen]}
    if isinstance(value, dict) and kind.__module__ in {"builtins", "collections"} and not hasattr(value, "__missing__"):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    # Keras callbacks such as EarlyStopping hold their comparison as an operation, and flip min_delta to match it.
    name = getattr(value, "__name__", "")
    if callable(value) and getattr(keras.ops, name, None) is value:
        return {"op": name}
    raise _UnsupportedValueError(f"a {kind.__name__}")


def _decoded(value: Any) -> Any:  # noqa: PLR0911 - one a kind
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    match kind:
        case "scalar" | "array":
            dtype, shape, data = held
            data = data if isinstance(data, bytes) else bytes.fromhex(data)
            array = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
            return array if kind == "array" else array[()]
        case "tuple":
            return tuple(map(_decoded, held))
        case "set":
            return set(map(_decoded, held))
        case "frozenset":
            return frozenset(map(_decoded, held))
        case "deque":
            return deque(map(_decoded, held[0]), maxlen=held[1])
        case "dict":
            return {_decoded(key): _decoded(item) for key, item in held}
    return getattr(keras.ops, held)
