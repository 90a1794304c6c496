"""A run at step 0, built and found good before anything of it is written.

The relay asks for it as soon as the first example is known, so that a model is refused before the dataset is written.
In a process that begins the run as well, what was built then is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.weights_report import WeightsReport
from tasks.foundation.dataset.class_weight import weighed
from tasks.foundation.dataset.manifest import zeros_of
from tasks.foundation.model.isolated_build import undisturbed
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.telemetry.events import Sink
from tasks.init_or_restore.batch_or_example import state_of_examples
from tasks.init_or_restore.identity import identity_of_model
from tasks.init_or_restore.model_requirements import require_best, require_callbacks, require_steps
from tasks.init_or_restore.weights.loading import load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a run begins from.

    Attributes:
        spec: the run file.
        code_folder: its folder.
        features: what the examples hold.
        state: at step 0, with initial weights.
        identity: what the log records of the model.
        loaded: what became of the initial weights, if there are any.
    """

    spec: RunSpec
    code_folder: Path
    features: tuple[Feature, ...]
    state: TrainState
    identity: dict[str, Any]
    loaded: WeightsReport | None

    def is_of(self, spec: RunSpec, features: Sequence[Feature], code_folder: Path, accelerator: Accelerator) -> bool:
        """Whether beginning anew would come to the same."""
        same = self.spec == spec and self.features == tuple(features) and self.code_folder == code_folder
        return same and self.state.accelerator is accelerator


# At most one: what was tried out and is to be begun.
_tried: list[Begun] = []


def try_beginning(
    spec: RunSpec, features: Sequence[Feature], *, code_folder: Path, accelerator: Accelerator, telemetry: Sink
) -> None:
    """Begin without writing anything, and keep what was built. Arguments and errors: see `begin`."""
    _tried.clear()
    with undisturbed():
        _tried.append(begin(spec, features, code_folder=code_folder, accelerator=accelerator, telemetry=telemetry))


def begin(
    spec: RunSpec, features: Sequence[Feature], *, code_folder: Path, accelerator: Accelerator, telemetry: Sink
) -> Begun:
    """Build the state of step 0, and refuse what could not be trained or evaluated.

    Args:
        spec: the run file.
        features: what the examples hold.
        code_folder: the run file's folder.
        accelerator: the process's.
        telemetry: is told of initial weights.

    Raises:
        SourceError: the source yields batches, or may do so.
        ModelError: the user's model or callbacks cannot be used, or lack the metric of `checkpoint.keep_best`.
        WeightsError: the initial weights are not there, cannot be read, or do not fit.
    """
    if _tried and (tried := _tried.pop()).is_of(spec, features, code_folder, accelerator):
        return tried
    size = per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate)
    unweighed = zeros_of(features, size)
    batch = weighed(unweighed, spec.train.class_weight)
    state = state_of_examples(spec, features, batch, code_folder=code_folder, accelerator=accelerator)
    # Before tracing: Python code of the model's may leave its marks then, and a resume traces nothing here.
    identity = identity_of_model(spec, state, code_folder)
    require_best(spec, state, unweighed)
    if spec.train.callbacks is not None:
        # What they do to the model before training is part of step 0.
        require_callbacks(spec, state, batch, unweighed, code_folder=code_folder)
    require_steps(spec, state, batch, unweighed)
    loaded = load_weights(state, spec.init, code_folder=code_folder, telemetry=telemetry, seed=spec.train.seed)
    return Begun(
        spec=spec,
        code_folder=code_folder,
        features=tuple(features),
        state=state,
        identity=identity,
        loaded=loaded,
    )
