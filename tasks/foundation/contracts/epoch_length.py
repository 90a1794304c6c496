"""The length of an epoch, and absolute steps at which something is due."""

from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from tasks.foundation.contracts.base import Contract


@dataclass(frozen=True, slots=True)
class Period:
    """Something that is due again and again: after each `examples` examples, in steps of `batch` examples.

    Period k (from 1) ends at the first step that has trained on its last example, step ceil(k * examples / batch). A
    period of N steps has N examples in batches of 1. Several periods can end at one step, if they are shorter than it.
    """

    examples: int
    batch: int = 1

    @property
    def steps(self) -> int:
        """The steps of the first period; a later one may have one step fewer."""
        return self.end_of(1)

    def end_of(self, number: int) -> int:
        """Return the step at which period `number` ends, counted from 1; 0 for period 0."""
        return -(-number * self.examples // self.batch)

    def ended_by(self, step: int) -> int:
        """Return how many periods have ended when `step` is done."""
        return step * self.batch // self.examples

    def last(self, step: int) -> int:
        """Return the number, from 0, of the newest period that ends at `step`, or of the one that is under way."""
        return self.ended_by(step) - self.ends_at(step)

    def ends_at(self, step: int) -> bool:
        """Return whether a period ends at `step`; false for step 0."""
        return step > 0 and self.ended_by(step) > self.ended_by(step - 1)

    def next_end(self, step: int) -> int:
        """Return the first step after `step` at which a period ends."""
        return self.end_of(self.ended_by(step) + 1)


class EpochLength(Contract):
    """The length of an epoch: one pass over the training examples.

    The data order is continuous: batches follow each other without a gap, so an epoch usually ends in the middle of a
    batch. With `drop_remainder` an epoch is a whole number of batches, and the other examples are left out of it.
    """

    train_examples: int = Field(ge=1, description="training examples of the prepared dataset")
    global_batch_size: int = Field(ge=1, description="examples in a step")
    drop_remainder: bool = False

    @model_validator(mode="after")
    def _has_a_batch(self) -> Self:
        if not self.examples:
            raise ValueError(
                f"drop_remainder leaves no batch of {self.global_batch_size} in {self.train_examples} examples"
            )
        return self

    @property
    def examples(self) -> int:
        """The examples that an epoch trains on."""
        rest = self.train_examples % self.global_batch_size if self.drop_remainder else 0
        return self.train_examples - rest

    @property
    def steps(self) -> int:
        """The steps of an epoch, rounded up, as `len()` of a batched dataset."""
        return self.period().steps

    def period(self, epochs: int = 1) -> Period:
        """Return the period of `epochs` epochs."""
        return Period(epochs * self.examples, self.global_batch_size)

    def end_of(self, epoch: int) -> int:
        """Return the step at which an epoch ends, counted from 1: ceil(epoch * examples / global_batch_size)."""
        return self.period().end_of(epoch)

    def after(self, step: int) -> float:
        """Return the epochs that are done after `step`, with a fraction. Batches that a rewind skipped do not count."""
        return step * self.global_batch_size / self.examples
