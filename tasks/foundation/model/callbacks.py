"""The user's Keras callbacks: made, checked for what cannot hold in a relay, and made known to the model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from tasks.foundation.contracts.identity import CALLBACKS
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import act_at_evaluations, steps_of_an_epoch
from tasks.foundation.errors import ModelError
from tasks.foundation.model.code_digest import digests_of_user_code
from tasks.foundation.user_code import describe, load_function

# Baton does it, or the run's result would depend on the cuts.
_REFUSED = {
    "ModelCheckpoint": "Baton commits checkpoints itself; see checkpoint.keep_last and checkpoint.keep_best",
    "BackupAndRestore": "Baton commits and restores the whole train state itself; leave it out",
    "OrbaxCheckpoint": "Baton commits checkpoints itself; see checkpoint.keep_last and checkpoint.keep_best",
    "TensorBoard": "Baton writes TensorBoard logs into tensorboard/ of the run's home itself; leave it out",
    "SwapEMAWeights": "Baton evaluates with the averages of use_ema already; leave it out",
    "TerminateOnNaN": "Baton ends a run at the first loss that is not finite; see train.on_blowup",
    "ProgbarLogger": "Baton shows progress itself; leave it out",
    "CSVLogger": "the run's log holds every row, once; see baton log HOME --json",
}
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_OTHER_HOOKS = (
    "on_train_end",
    *(f"on_{what}_{when}" for what in ("test", "test_batch", "predict", "predict_batch") for when in ("begin", "end")),
)


def callbacks_identity(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """The key `train.callbacks` of a run's identity, as JSON values: the code, and when it acts.

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


def begin_callbacks(
    model: keras.Model, spec: RunSpec, *, code_folder: Path, strategy: Any
) -> list[keras.callbacks.Callback]:
    """Make the callbacks that the run file names, tell them of the model, and call `on_train_begin`.

    Raises:
        ModelError: the function raises or returns something else, or a callback cannot hold in a relay.
    """
    reference = spec.train.callbacks
    if reference is None:
        return []
    function = load_function(reference, code_folder, seed=spec.train.seed)
    try:
        made = function()
    except (Exception, SystemExit) as fault:
        raise ModelError(f"{reference} raised {describe(fault)}") from fault
    if not isinstance(made, list | tuple) or not all(isinstance(one, keras.callbacks.Callback) for one in made):
        kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, list | tuple) else type(made).__name__
        raise ModelError(f"{reference} returned {kinds}; it must return a list of keras.callbacks.Callback")
    callbacks = list(made)
    _refuse_what_cannot_hold(callbacks, reference)
    every = steps_of_an_epoch(spec)
    model.stop_training = False
    with strategy.scope():
        for callback in callbacks:
            callback.set_params({"verbose": 0, "epochs": -(-spec.train.steps // every), "steps": every})
            callback.set_model(model)
            call(callback, "on_train_begin", reference=reference)
    return callbacks


def call(callback: keras.callbacks.Callback, hook: str, *arguments: Any, reference: str) -> None:
    """Call a hook of the user's.

    Raises:
        ModelError: it raises.
    """
    try:
        getattr(callback, hook)(*arguments)
    except (Exception, SystemExit) as fault:
        raise ModelError(f"{reference}: {hook} of {type(callback).__name__} raised {describe(fault)}") from fault


def require_monitors(
    callbacks: Iterable[keras.callbacks.Callback], metrics: Iterable[str], spec: RunSpec, *, tested: Iterable[str]
) -> None:
    """Refuse a callback that watches what it will never be told; Keras only warns, again and again.

    Args:
        callbacks: see `begin_callbacks`.
        metrics: names of what training logs, the loss among them.
        spec: the run file.
        tested: names of what an evaluation that they are told of logs.

    Raises:
        ModelError: naming what it will be told.
    """
    told = sorted({*metrics, *(f"val_{name}" for name in tested)})
    for callback in callbacks:
        watched = getattr(callback, "monitor", None)
        if isinstance(watched, str) and watched not in told:
            remedy = ""
            if watched.startswith("val_") and not act_at_evaluations(spec):
                remedy = "; for validation metrics set evaluate.every_steps, and data.validation_fraction above 0"
            raise ModelError(
                f"{spec.train.callbacks}: {type(callback).__name__} has monitor = {watched!r}, which is none of "
                f"{', '.join(told)}{remedy}"
            )


def _refuse_what_cannot_hold(callbacks: Iterable[keras.callbacks.Callback], reference: str) -> None:
    for callback in callbacks:
        name = type(callback).__name__
        for refused, remedy in _REFUSED.items():
            kind = getattr(keras.callbacks, refused, None)
            if kind is not None and isinstance(callback, kind):
                raise ModelError(f"{reference}: callback {name} cannot be used: {remedy}")
        if getattr(callback, "restore_best_weights", False):
            raise ModelError(
                f"{reference}: {name} has restore_best_weights=True, which cannot be used; set checkpoint.keep_best "
                "and take the best with baton export --step best"
            )
        _refuse_hooks(callback, _BATCH_HOOKS, "steps run inside one compiled loop; use on_epoch_end", reference)
        _refuse_hooks(callback, _OTHER_HOOKS, "it would never be called; use on_epoch_end", reference)


def _refuse_hooks(callback: keras.callbacks.Callback, hooks: Iterable[str], why: str, reference: str) -> None:
    for hook in hooks:
        function = getattr(callback, hook, None)
        function = getattr(function, "__func__", function)
        # Keras's own, such as EarlyStopping's on_train_end, only print what ends.
        if function is not None and (getattr(function, "__module__", None) or "").partition(".")[0] != "keras":
            raise ModelError(f"{reference}: callback {type(callback).__name__} has {hook}: {why}")
