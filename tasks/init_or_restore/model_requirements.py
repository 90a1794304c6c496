"""What is required of a model and its callbacks before a run begins with them; the doctor asks the same."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import act_at_evaluations
from tasks.foundation.dataset.manifest import zeros_of
from tasks.foundation.model.build import require_test_step
from tasks.foundation.model.callback_memory import remembered
from tasks.foundation.model.callbacks import begin_callbacks, require_monitors
from tasks.foundation.model.metrics import require_metric, take_metrics
from tasks.foundation.model.remainder import require_remainder
from tasks.foundation.model.returned_metrics import returned_by
from tasks.foundation.model.train_step import require_train_step
from tasks.foundation.state.train_state import TrainState


def require_steps(spec: RunSpec, state: TrainState, batch: Sequence[Any], unweighed: Sequence[Any]) -> None:
    """Refuse what cannot be trained or evaluated, before a run is begun that the corrected model could not continue.

    Args:
        spec: the run file.
        state: as it builds it.
        batch: one per-replica batch of zeros, weighed as training's are.
        unweighed: the same as evaluation's are.

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
    """Refuse a model that cannot take the last validation examples, where they fill no batch.

    Args:
        spec: the run file.
        state: as it builds it.
        features: what the examples hold.
        examples: validation examples.

    Raises:
        ModelError: see `require_remainder`.
    """
    left = examples % spec.train.global_batch_size
    if left:
        batch, reference = zeros_of(features, left), spec.model.build
        require_remainder(state.model, batch, examples=examples, reference=reference, accelerator=state.accelerator)


def require_best(spec: RunSpec, state: TrainState, unweighed: Sequence[Any]) -> None:
    """Refuse to look for the best by a metric that no evaluation will tell.

    Args:
        spec: the run file.
        state: as it builds it.

    Args:
        spec: the run file.
        state: as it builds it.
        unweighed: see `require_steps`.

    Raises:
        ModelError: the model has no such metric, or its own test_step cannot be traced.
    """
    if spec.data.validation_fraction > 0 and spec.checkpoint.keep_best is not None:
        require_metric(spec.checkpoint.keep_best, _told(spec, state, "test_step", unweighed))


def _told(spec: RunSpec, state: TrainState, step: str, batch: Sequence[Any]) -> Iterable[str]:
    """Names of the metrics that are logged of train_step or test_step."""
    accelerator = state.accelerator
    returned = returned_by(state.model, step, batch, reference=spec.model.build, accelerator=accelerator)
    return take_metrics(state.model, accelerator.strategy, returned)


def require_callbacks(
    spec: RunSpec, state: TrainState, batch: Sequence[Any], unweighed: Sequence[Any], *, code_folder: Path
) -> None:
    """Begin the callbacks once, on the model that starts at step 0, and refuse what cannot hold.

    Args:
        spec: the run file.
        state: as it builds it.
        batch: see `require_steps`.
        unweighed: see `require_steps`.
        code_folder: the run file's folder.

    Raises:
        ModelError: a callback cannot be used, monitors what is not there, or keeps what a checkpoint cannot hold.
    """
    strategy = state.accelerator.strategy
    callbacks = begin_callbacks(state.model, spec, code_folder=code_folder, strategy=strategy)
    tested = _told(spec, state, "test_step", unweighed) if act_at_evaluations(spec) else ()
    require_monitors(callbacks, _told(spec, state, "train_step", batch), spec, tested=tested)
    for callback in callbacks:
        remembered(callback)
