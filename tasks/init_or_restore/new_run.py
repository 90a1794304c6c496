"""A new run at step 0, built and checked before any of its files is written.

The relay calls `check_new_run` once the first example is known, so that a model is refused before the dataset is
written. If the same process then begins the run, it uses what was built for the check.
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
from tasks.foundation.dataset.class_weight import apply_class_weight
from tasks.foundation.dataset.manifest import zero_examples
from tasks.foundation.model.isolated_build import preserved_global_state
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.telemetry.events import Sink
from tasks.init_or_restore.identity import user_code_identity
from tasks.init_or_restore.model_requirements import require_best, require_callbacks, require_steps
from tasks.init_or_restore.weights.loading import load_weights
from tasks.init_or_restore.yielded_batches import build_state_from_examples


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that may begin.

    Attributes:
        spec: the run file.
        code_folder: its folder.
        features: of the examples.
        state: at step 0, with initial weights.
        identity: what the log records of the model.
        loaded: report on the initial weights; None if the run file names none.
    """

    spec: RunSpec
    code_folder: Path
    features: tuple[Feature, ...]
    state: TrainState
    identity: dict[str, Any]
    loaded: WeightsReport | None

    def matches(self, spec: RunSpec, features: Sequence[Feature], code_folder: Path, accelerator: Accelerator) -> bool:
        """Whether building it again from these arguments would give the same run."""
        same = self.spec == spec and self.features == tuple(features) and self.code_folder == code_folder
        return same and self.state.accelerator is accelerator


class CheckedRun:
    """Keeps the run that `check_new_run` built until `build_new_run` takes it.

    It is the only state that this module keeps between calls: the check and the stage that begins the run are two calls
    of one process, and building the model twice would double its start-up time.
    """

    def __init__(self) -> None:
        self._run: NewRun | None = None

    def keep(self, run: NewRun | None) -> None:
        """Keep a run and drop the previous one; None only drops it."""
        self._run = run

    def take(self) -> NewRun | None:
        """Take out the kept run."""
        run, self._run = self._run, None
        return run


_CHECKED_RUN = CheckedRun()


def check_new_run(
    spec: RunSpec, features: Sequence[Feature], *, code_folder: Path, accelerator: Accelerator, telemetry: Sink
) -> None:
    """Build a new run without writing anything, and keep it. For arguments and errors see `build_new_run`."""
    _CHECKED_RUN.keep(None)
    with preserved_global_state():
        _CHECKED_RUN.keep(
            build_new_run(spec, features, code_folder=code_folder, accelerator=accelerator, telemetry=telemetry)
        )


def build_new_run(
    spec: RunSpec, features: Sequence[Feature], *, code_folder: Path, accelerator: Accelerator, telemetry: Sink
) -> NewRun:
    """Build the state of step 0, and refuse a model that could not be trained or evaluated.

    Args:
        spec: the run file.
        features: of the examples.
        code_folder: the run file's folder.
        accelerator: the process's.
        telemetry: receives a note about the initial weights.

    Returns:
        The run, or the one that `check_new_run` kept, if it matches.

    Raises:
        SourceError: the source yields batches, or may do so.
        ModelError: the user's model or callbacks cannot be used, or lack the metric of `checkpoint.keep_best`.
        WeightsError: the initial weights are missing, cannot be read, or do not fit.
    """
    kept = _CHECKED_RUN.take()
    if kept is not None and kept.matches(spec, features, code_folder, accelerator):
        return kept
    size = per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate)
    unweighed = zero_examples(features, size)
    batch = apply_class_weight(unweighed, spec.train.class_weight)
    state = build_state_from_examples(spec, features, batch, code_folder=code_folder, accelerator=accelerator)
    # Before tracing, which may run Python code with side effects on the model. A resume traces nothing here.
    identity = user_code_identity(spec, state, code_folder)
    require_best(spec, state, unweighed)
    if spec.train.callbacks is not None:
        # What callbacks do to the model before training is part of step 0.
        require_callbacks(spec, state, batch, unweighed, code_folder=code_folder)
    require_steps(spec, state, batch, unweighed)
    loaded = load_weights(state, spec.init, code_folder=code_folder, telemetry=telemetry, seed=spec.train.seed)
    return NewRun(
        spec=spec,
        code_folder=code_folder,
        features=tuple(features),
        state=state,
        identity=identity,
        loaded=loaded,
    )
