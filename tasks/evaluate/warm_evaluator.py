"""The model that a process keeps from one evaluation to the next."""

from dataclasses import dataclass
from pathlib import Path

from tasks.evaluate.loop import Evaluator
from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.reader import load_manifest, zero_batch
from tasks.foundation.model.returned_metrics import trace_returned_metrics
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model is built from."""

    spec: RunSpec
    dataset: DatasetRef
    code_folder: Path


class WarmEvaluator:
    """Keeps one model and its compiled evaluation: building them can take minutes.

    Training has its own model, whose state an evaluation must not change. One instance is enough, because a process has
    one distribution strategy.
    """

    def __init__(self) -> None:
        self._kept: tuple[Recipe, TrainState, Evaluator] | None = None

    def take(
        self, recipe: Recipe, storage: Storage, accelerator: Accelerator, per_replica: int
    ) -> tuple[TrainState, Evaluator]:
        """Return the kept model and its evaluation if they fit, or build new ones and keep them.

        Args:
            recipe: what the model is built from.
            storage: the storage root, with the dataset.
            accelerator: the one of this process.
            per_replica: examples in a replica's batch.
        """
        if self._kept is not None:
            kept, state, evaluator = self._kept
            if kept == recipe and state.accelerator is accelerator:
                return state, evaluator
        self.forget()
        batch = zero_batch(load_manifest(storage, recipe.dataset), per_replica)
        state = build_train_state(recipe.spec, code_folder=recipe.code_folder, accelerator=accelerator, batch=batch)
        reference = recipe.spec.model.build
        returned = trace_returned_metrics(state.model, "test_step", batch, reference=reference, accelerator=accelerator)
        evaluator = Evaluator(state.model, accelerator.strategy, reference=reference, returned=returned)
        self._kept = (recipe, state, evaluator)
        return state, evaluator

    def forget(self) -> None:
        """Drop the model, so that the next evaluation builds one."""
        self._kept = None


WARM_EVALUATOR = WarmEvaluator()
