"""How each callback is treated: called, replaced by what Baton does itself, or refused.

Keras's callbacks that save, log or show are replaced, and what they would do is done from the log, so it is right after
any restart. Batch hooks are called at each logged row: at an absolute step, with metrics that are read there anyway.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
from pydantic import ValidationError

from tasks.foundation.contracts.callback_record import CallbackRecord, CsvFile
from tasks.foundation.contracts.run_spec import KeepBest, RunSpec
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message

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
        callbacks: new ones.
        model: the model that they are for; its metrics are built.
        spec: the run file.
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
            "export the best checkpoint with baton export --step best"
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
    for hook in own_hooks(callback, _BATCH_HOOKS):
        raise ModelError(
            message(
                f"{reference}: callback {name} has {hook}: steps run inside one compiled loop, so it is called at each "
                f"logged row only, once for train.log_every_steps = {spec.train.log_every_steps} steps",
                hints=[
                    f"if that is often enough, set {_ANY_PACE} = True on the callback; its logs are the row's metrics",
                    "or use on_epoch_end, or train.log_every_steps: 1, which is slower",
                    "to change the learning rate at each step, give the optimizer a LearningRateSchedule",
                ],
            )
        )


def _called_words(callback: keras.callbacks.Callback, spec: RunSpec) -> str:
    every = spec.train.log_every_steps
    when = f"each logged row (train.log_every_steps = {every})"
    if callbacks_act_at_evaluations(spec):
        when = "each epoch" if spec.evaluate.every else f"each evaluation ({spec.evaluate.every_steps} steps)"
    words = f"called at {when}, which ends its epoch" if when != "each epoch" else "called at the end of each epoch"
    if own_hooks(callback, _BATCH_HOOKS):
        words += f"; its batch hooks every {every} steps" if every > 1 else "; its batch hooks at each step"
    return words


def _best_words(rule: KeepBest, spec: RunSpec) -> str:
    decides = spec.checkpoint.keep_best
    if decides is not None and decides != rule:
        return f"; the best checkpoint is that of checkpoint.keep_best: {decides.metric} ({decides.mode})"
    return (
        f"; the checkpoint with the best validation {rule.metric} ({rule.mode}) is kept, see baton export --step best"
    )
