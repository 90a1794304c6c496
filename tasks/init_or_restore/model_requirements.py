"""Checks a model and its callbacks before a run starts with them; the doctor runs the same checks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations
from tasks.foundation.dataset.manifest import zero_examples
from tasks.foundation.model.build import require_test_step
from tasks.foundation.model.callback_state import callback_state
from tasks.foundation.model.callbacks import require_monitors, start_callbacks
from tasks.foundation.model.metrics import require_metric, take_metrics
from tasks.foundation.model.remainder import require_remainder
from tasks.foundation.model.returned_metrics import trace_returned_metrics
from tasks.foundation.model.train_step import require_train_step
from tasks.foundation.state.train_state import TrainState


def require_steps(spec: RunSpec, state: TrainState, batch: Sequence[Any], unweighed: Sequence[Any]) -> None:
    """Refuse a model that cannot be trained or evaluated, before a run starts that a corrected model cannot continue.

    Args:
        spec: the run file.
        state: the state that it builds.
        batch: one per-replica batch of zeros, with class weights.
        unweighed: the same batch without class weights, as in evaluation.

    Raises:
        ModelError: see `require_train_step` and `require_test_step`.
    """
    reference = spec.model.build
    require_train_step(
        state.model,
        batch,
        accumulate=spec.train.accumulate,
        leaves=state.leaves,
        reference=reference,
        accelerator=state.accelerator,
    )
    if spec.data.validation_fraction > 0:
        require_test_step(state.model, unweighed, reference=reference, accelerator=state.accelerator)


def require_evaluation(spec: RunSpec, state: TrainState, features: Sequence[Feature], examples: int) -> None:
    """Refuse a model that cannot be evaluated on the last, smaller validation batch.

    Args:
        spec: the run file.
        state: the state that it builds.
        features: the features of the examples.
        examples: number of validation examples.

    Raises:
        ModelError: see `require_remainder`.
    """
    left = examples % spec.train.global_batch_size
    if left:
        batch, reference = zero_examples(features, left), spec.model.build
        require_remainder(state.model, batch, examples=examples, reference=reference, accelerator=state.accelerator)


def require_best(spec: RunSpec, state: TrainState, unweighed: Sequence[Any]) -> None:
    """Refuse `checkpoint.keep_best` with a metric that no evaluation logs.

    Args:
        spec: the run file.
        state: the state that it builds.
        unweighed: see `require_steps`.

    Raises:
        ModelError: the model has no such metric, or its own test_step cannot be traced.
    """
    if spec.data.validation_fraction > 0 and spec.checkpoint.keep_best is not None:
        require_metric(spec.checkpoint.keep_best, _logged_metrics(spec, state, "test_step", unweighed))


def _logged_metrics(spec: RunSpec, state: TrainState, step: str, batch: Sequence[Any]) -> Iterable[str]:
    """Return the names of the metrics that train_step or test_step logs."""
    accelerator = state.accelerator
    returned = trace_returned_metrics(state.model, step, batch, reference=spec.model.build, accelerator=accelerator)
    return take_metrics(state.model, accelerator.strategy, returned)


def require_callbacks(
    spec: RunSpec, state: TrainState, batch: Sequence[Any], unweighed: Sequence[Any], *, code_folder: Path
) -> None:
    """Start the callbacks once, on the model at step 0, and refuse those that cannot be used.

    Args:
        spec: the run file.
        state: the state that it builds.
        batch: see `require_steps`.
        unweighed: see `require_steps`.
        code_folder: the run file's folder.

    Raises:
        ModelError: a callback is not supported, monitors an unknown metric, or holds a value that a checkpoint cannot
            store.
    """
    strategy = state.accelerator.strategy
    callbacks = start_callbacks(state.model, spec, code_folder=code_folder, strategy=strategy)
    tested = _logged_metrics(spec, state, "test_step", unweighed) if callbacks_act_at_evaluations(spec) else ()
    require_monitors(callbacks, _logged_metrics(spec, state, "train_step", batch), spec, tested=tested)
    for callback in callbacks:
        callback_state(callback)
