"""The trainer that a process keeps from one segment to the next."""

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.state.warm_state import PROCESS_STATE, Recipe
from tasks.foundation.storage.base import Storage
from tasks.train_segment.trainer import Trainer


class WarmTrainer:
    """Keeps one trainer with the state of the process: compiling a training loop can take minutes."""

    @property
    def trainer(self) -> Trainer | None:
        """The kept trainer, if there is one."""
        kept = PROCESS_STATE.kept
        return None if kept is None else kept.companion(Trainer)

    def take(self, recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> Trainer:
        """Take out the process's state and its trainer if they fit, or build them.

        Only a segment that succeeds puts them back.
        """
        warm = PROCESS_STATE.take(recipe, storage=storage, accelerator=accelerator)
        trainer = warm.companion(Trainer)
        if trainer is not None and trainer.recipe == recipe:
            return trainer
        if trainer is not None or (warm.attributes_changed and not warm.as_built()):
            # Another trainer has used it, or Python code that a new process does not run in this order.
            del warm, trainer
            warm = PROCESS_STATE.take(recipe, storage=storage, accelerator=accelerator)
        return Trainer(recipe, warm, storage=storage)

    def keep(self, trainer: Trainer) -> None:
        """Keep a trainer whose state is known to be valid."""
        trainer.warm.keep_companion(trainer)
        PROCESS_STATE.keep(trainer.warm)

    def forget(self) -> None:
        """Drop the process's state and its trainer, so that the next segment builds them and restores from storage."""
        PROCESS_STATE.forget()


WARM_TRAINER = WarmTrainer()
