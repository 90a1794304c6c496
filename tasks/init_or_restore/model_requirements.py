"""Checks a model and its callbacks before a run starts with them; the doctor runs the same checks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.dataset import DatasetRef, Feature
from tasks.foundation.contracts.evaluation_sets import SetName
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations
from tasks.foundation.dataset.evaluation_sets import place_of_set
from tasks.foundation.dataset.manifest import load_manifest, zero_examples
from tasks.foundation.model.build import require_test_step
from tasks.foundation.model.callback_state import callback_state
from tasks.foundation.model.callbacks import (
    StartedCallbacks,
    require_learning_rate,
    require_monitors,
    start_callbacks,
)
from tasks.foundation.model.metrics import Results, read_results, require_metric
from tasks.foundation.model.remainder import require_remainder
from tasks.foundation.model.returned_metrics import trace_returned_metrics
from tasks.foundation.model.train_step import require_train_step
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.state.warm_state import WarmState
from tasks.foundation.storage.base import Storage


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
        draws=state.draws,
    )
    if spec.data.is_evaluated_on:
        require_test_step(state.model, unweighed, reference=reference, accelerator=state.accelerator, draws=state.draws)


def require_evaluation(
    spec: RunSpec, state: TrainState, features: Sequence[Feature], examples: int, *, on: SetName = "validation"
) -> None:
    """Refuse a model that cannot be evaluated on the last, smaller batch of a set.

    Args:
        spec: the run file.
        state: the state that it builds.
        features: the features of the examples.
        examples: number of examples of the set.
        on: the set.

    Raises:
        ModelError: see `require_remainder`.
    """
    left = examples % spec.train.global_batch_size
    if left:
        batch, reference = zero_examples(features, left), spec.model.build
        require_remainder(
            state.model,
            batch,
            examples=examples,
            reference=reference,
            accelerator=state.accelerator,
            on=on,
            draws=state.draws,
        )


def require_evaluations(spec: RunSpec, warm: WarmState, dataset: DatasetRef, storage: Storage) -> None:
    """Refuse a model that cannot be evaluated on the last, smaller batch of the validation or the test set.

    Args:
        spec: the run file.
        warm: the state that it builds.
        dataset: the prepared dataset.
        storage: the storage root.

    Raises:
        ModelError: see `require_remainder`.
    """
    for name in spec.data.is_evaluated_on:
        features: Sequence[Feature] = warm.inputs.validation
        if spec.data.validation_transform is None:
            features = load_manifest(storage, place_of_set(dataset, name)[0]).features
        require_evaluation(spec, warm.state, features, dataset.examples_of(name), on=name)


def require_best(spec: RunSpec, state: TrainState, unweighed: Sequence[Any]) -> None:
    """Refuse `checkpoint.keep_best` with a metric that no evaluation logs.

    Args:
        spec: the run file.
        state: the state that it builds.
        unweighed: see `require_steps`.

    Raises:
        ModelError: the model has no such metric, or its own test_step cannot be traced.
    """
    if spec.data.has_validation and spec.checkpoint.keep_best is not None:
        require_metric(spec.checkpoint.keep_best, _logged_metrics(spec, state, "test_step", unweighed))


def _logged_metrics(spec: RunSpec, state: TrainState, step: str, batch: Sequence[Any]) -> Results:
    """Return the results of the metrics that train_step or test_step logs."""
    accelerator = state.accelerator
    returned = trace_returned_metrics(
        state.model, step, batch, reference=spec.model.build, accelerator=accelerator, draws=state.draws
    )
    return read_results(state.model, accelerator.strategy, returned)


def require_callbacks(
    spec: RunSpec, state: TrainState, batch: Sequence[Any], unweighed: Sequence[Any], *, code_folder: Path
) -> StartedCallbacks:
    """Start the callbacks once, on the model as it was built, and refuse those that cannot be used.

    The train step is traced before, as the trainer does: tracing may draw random numbers.

    Args:
        spec: the run file.
        state: the state that it builds.
        batch: see `require_steps`.
        unweighed: see `require_steps`.
        code_folder: the run file's folder.

    Returns:
        The callbacks. They must not be started again on this model.

    Raises:
        ModelError: a callback is not supported, monitors an unknown metric, sets a learning rate that cannot be set, or
            holds a value that a checkpoint cannot store.
    """
    trained = _logged_metrics(spec, state, "train_step", batch)
    started = start_callbacks(state.model, spec, code_folder=code_folder, strategy=state.accelerator.strategy)
    tested = _logged_metrics(spec, state, "test_step", unweighed) if callbacks_act_at_evaluations(spec) else Results()
    require_monitors(started.treatment.monitors, state.model, spec, trained=trained, tested=tested)
    require_learning_rate(started.callbacks, spec)
    for callback in started.callbacks:
        callback_state(callback)
    return started
