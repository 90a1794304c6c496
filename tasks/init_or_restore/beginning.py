"""What is required of a model and its callbacks before a run begins with them; the doctor asks the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.model.building import require_test_step
from tasks.foundation.model.callbacks import begin_callbacks, require_monitors
from tasks.foundation.model.memory import remembered
from tasks.foundation.model.metrics import take_metrics
from tasks.foundation.model.stepping import require_train_step
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


def require_callbacks(spec: RunSpec, state: TrainState, *, code_folder: Path) -> None:
    """Begin the callbacks once, on the model that starts at step 0, and refuse what cannot hold.

    Raises:
        ModelError: a callback cannot be used, monitors what is not there, or keeps what a checkpoint cannot hold.
    """
    strategy = state.accelerator.strategy
    callbacks = begin_callbacks(state.model, spec, code_folder=code_folder, strategy=strategy)
    require_monitors(callbacks, take_metrics(state.model, strategy), spec)
    for callback in callbacks:
        remembered(callback)
