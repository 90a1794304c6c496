"""The trainer that a process keeps from one segment to the next."""

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.storage.base import Storage
from tasks.train_segment.trainer import Recipe, Trainer


class WarmTrainer:
    """Keeps one trainer: building and compiling a model can take minutes.

    It is the only state that this room keeps between calls. One instance is enough, because a process has one
    distribution strategy, and a second model would not fit on its devices.
    """

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def take(self, recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> Trainer:
        """Take out the kept trainer if it fits, or build one. Only a segment that succeeds puts it back."""
        kept, self.trainer = self.trainer, None
        if kept is not None and kept.recipe == recipe and kept.accelerator is accelerator:
            return kept
        return Trainer(recipe, storage=storage, accelerator=accelerator)

    def keep(self, trainer: Trainer) -> None:
        """Keep a trainer whose state is known to be valid."""
        self.trainer = trainer

    def forget(self) -> None:
        """Drop the kept trainer, so that the next segment builds one and restores from storage."""
        self.trainer = None


WARM_TRAINER = WarmTrainer()
