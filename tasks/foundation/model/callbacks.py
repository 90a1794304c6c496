"""The user's Keras callbacks: creates them, refuses those that cannot be resumed, and attaches them to the model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from tasks.foundation.contracts.identity import CALLBACKS
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations, steps_per_epoch
from tasks.foundation.errors import ModelError
from tasks.foundation.model.code_digest import digests_of_user_code
from tasks.foundation.user_code import describe, load_function

# Baton does these itself, or the run's result would depend on how it is cut into segments.
_REFUSED = {
    "ModelCheckpoint": "Baton commits checkpoints itself; see checkpoint.keep_last and checkpoint.keep_best",
    "BackupAndRestore": "Baton commits and restores the whole train state itself; remove it",
    "OrbaxCheckpoint": "Baton commits checkpoints itself; see checkpoint.keep_last and checkpoint.keep_best",
    "TensorBoard": "Baton writes TensorBoard logs into tensorboard/ of the run's home itself; remove it",
    "SwapEMAWeights": "Baton already evaluates with the averages of use_ema; remove it",
    "TerminateOnNaN": "Baton stops a run at the first loss that is not finite; see train.on_blowup",
    "ProgbarLogger": "Baton shows progress itself; remove it",
    "CSVLogger": "the run's log holds every row once; see baton log HOME --json",
}
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_OTHER_HOOKS = (
    "on_train_end",
    *(f"on_{what}_{when}" for what in ("test", "test_batch", "predict", "predict_batch") for when in ("begin", "end")),
)


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
            "train.log_every_steps": spec.train.log_every_steps,
        }
    }


def start_callbacks(
    model: keras.Model, spec: RunSpec, *, code_folder: Path, strategy: Any
) -> list[keras.callbacks.Callback]:
    """Create the callbacks that the run file names, attach them to the model, and call `on_train_begin`.

    Raises:
        ModelError: the function raises or returns anything other than callbacks, or a callback cannot be resumed.
    """
    reference = spec.train.callbacks
    if reference is None:
        return []
    function = load_function(reference, code_folder, seed=spec.train.seed)
    try:
        made = function()
    except (Exception, SystemExit) as fault:
        raise ModelError(f"{reference} raised {describe(fault)}") from fault
    if not isinstance(made, list | tuple) or not all(isinstance(it, keras.callbacks.Callback) for it in made):
        kinds = ", ".join(type(it).__name__ for it in made) if isinstance(made, list | tuple) else type(made).__name__
        raise ModelError(f"{reference} returned {kinds}; return a list of keras.callbacks.Callback")
    callbacks = list(made)
    _refuse_unsupported(callbacks, reference)
    every = steps_per_epoch(spec)
    model.stop_training = False
    with strategy.scope():
        for callback in callbacks:
            callback.set_params({"verbose": 0, "epochs": -(-spec.train.steps // every), "steps": every})
            callback.set_model(model)
            call_hook(callback, "on_train_begin", reference=reference)
    return callbacks


def call_hook(callback: keras.callbacks.Callback, hook: str, *arguments: Any, reference: str) -> None:
    """Call a hook of a user's callback.

    Raises:
        ModelError: the hook raises.
    """
    try:
        getattr(callback, hook)(*arguments)
    except (Exception, SystemExit) as fault:
        raise ModelError(f"{reference}: {hook} of {type(callback).__name__} raised {describe(fault)}") from fault


def require_monitors(
    callbacks: Iterable[keras.callbacks.Callback], metrics: Iterable[str], spec: RunSpec, *, tested: Iterable[str]
) -> None:
    """Refuse a callback that monitors a metric it never receives; Keras only warns, at every call.

    Args:
        callbacks: see `start_callbacks`.
        metrics: names of the training metrics, the loss included.
        spec: the run file.
        tested: names of the validation metrics that callbacks receive.

    Raises:
        ModelError: names the metrics that the callback receives.
    """
    received = sorted({*metrics, *(f"val_{name}" for name in tested)})
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in received:
            remedy = ""
            if monitor.startswith("val_") and not callbacks_act_at_evaluations(spec):
                remedy = "; for validation metrics, set evaluate.every_steps and a data.validation_fraction above 0"
            raise ModelError(
                f"{spec.train.callbacks}: {type(callback).__name__} has monitor = {monitor!r}; the available metrics "
                f"are {', '.join(received)}{remedy}"
            )


def _refuse_unsupported(callbacks: Iterable[keras.callbacks.Callback], reference: str) -> None:
    for callback in callbacks:
        name = type(callback).__name__
        for refused, remedy in _REFUSED.items():
            kind = getattr(keras.callbacks, refused, None)
            if kind is not None and isinstance(callback, kind):
                raise ModelError(f"{reference}: callback {name} cannot be used: {remedy}")
        if getattr(callback, "restore_best_weights", False):
            raise ModelError(
                f"{reference}: {name} has restore_best_weights=True, which is not supported; set checkpoint.keep_best "
                "and export the best checkpoint with baton export --step best"
            )
        _refuse_hooks(callback, _BATCH_HOOKS, "steps run inside one compiled loop; use on_epoch_end", reference)
        _refuse_hooks(callback, _OTHER_HOOKS, "it is never called; use on_epoch_end", reference)


def _refuse_hooks(callback: keras.callbacks.Callback, hooks: Iterable[str], why: str, reference: str) -> None:
    for hook in hooks:
        function = getattr(callback, hook, None)
        function = getattr(function, "__func__", function)
        # Keras's own hooks, such as EarlyStopping's on_train_end, only print a message.
        if function is not None and (getattr(function, "__module__", None) or "").partition(".")[0] != "keras":
            raise ModelError(f"{reference}: callback {type(callback).__name__} has {hook}: {why}")
