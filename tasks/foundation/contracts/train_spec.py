"""`train` in the run file: how far to train, in which segments, and with which arithmetic."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.change_class import environment, identity, operational
from tasks.foundation.contracts.code_reference import CodeReference
from tasks.foundation.contracts.epoch_length import EpochLength

ClassWeights = dict[int, Annotated[float, Field(ge=0, allow_inf_nan=False)]]

_CLASS = re.compile(r"0|[1-9][0-9]{0,8}")
_TARGET = operational("says how far to train and in which segments, not what is computed")
_REWIND = operational("a rewind is an entry of the log, and the run is a function of its log")


def _classes(weights: object) -> object:
    """Whole numbers from the keys, which are text in YAML and JSON."""
    if not isinstance(weights, Mapping):
        return weights
    wrong = [key for key in weights if not (isinstance(key, int) or _CLASS.fullmatch(str(key)))]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no class; name classes by whole numbers, as {{0: 1.0, 1: 5.0}}")
    return {int(key): weight for key, weight in weights.items()}


class TrainSpec(Contract):
    """How far to train, in which segments, and with which arithmetic."""

    steps: Annotated[int | None, _TARGET] = Field(
        default=None,
        ge=1,
        lt=2**53,
        description="the step to train to, counted from initialization; at least 1. Either steps or epochs is required",
    )
    epochs: Annotated[int | None, _TARGET] = Field(
        default=None,
        ge=1,
        lt=2**31,
        description="instead of steps: the passes over the training examples, counted from initialization. The data "
        "order has no gaps, so an epoch may end in the middle of a batch: the target is step epochs * examples / "
        "global_batch_size, rounded up",
    )
    drop_remainder: Annotated[bool, identity("the last examples of an epoch are left out", "train.drop_remainder")] = (
        Field(
            default=False,
            description="true: an epoch is a whole number of batches, and the examples left over are skipped, "
            "others each time; false: a batch may have examples of two epochs, and none is skipped",
        )
    )
    segment_steps: Annotated[int | None, _TARGET] = Field(
        default=None, ge=1, description="a segment ends at each multiple of this number of steps; at least 1"
    )
    segment_epochs: Annotated[int | None, _TARGET] = Field(
        default=None, ge=1, description="a segment ends after each of this number of epochs; at least 1"
    )
    segment_seconds: Annotated[float | None, _TARGET] = Field(
        default=None, gt=0, allow_inf_nan=False, description="a segment ends after this many seconds; more than 0"
    )
    global_batch_size: Annotated[int, identity("other batches", "train.global_batch_size")] = Field(
        ge=1, le=2**24, description="examples in a step, over all replicas; 1 to 16777216"
    )
    log_every_steps: Annotated[
        int,
        operational(
            "says when metrics are read, not what is trained; part of train.callbacks if these act at rows, have batch "
            "hooks, or monitor a training metric"
        ),
    ] = Field(
        default=50, ge=1, description="metrics are read, logged and reset at each multiple of this number of steps"
    )
    seed: Annotated[int, identity("other weights, split, order and dropout", "train.seed", "data.content_digest")] = (
        Field(default=0, ge=0, lt=2**31, description="seed of weights, order and dropout; 0 to 2147483647")
    )
    deterministic: Annotated[bool, environment("operations that are not deterministic give other bits each time")] = (
        Field(
            default=True,
            description="true: TensorFlow uses deterministic operations only, which TPUs always do; false is faster "
            "for some models, and two runs may then differ",
        )
    )
    stop_after_seconds: Annotated[float | None, operational("says when a command stops, not what is computed")] = Field(
        default=None, gt=0, allow_inf_nan=False, description="a command stops, resumable, after this many seconds"
    )
    on_blowup: Annotated[Literal["stop", "rewind"], _REWIND] = Field(
        default="stop", description="what to do if the loss blows up: stop, or rewind to the last segment border"
    )
    blowup_factor: Annotated[float | None, _REWIND] = Field(
        default=None,
        gt=1,
        allow_inf_nan=False,
        description="a logged loss above this multiple of its running median is a blow-up; left out: only NaN and "
        "infinity",
    )
    rewind_skip_batches: Annotated[int, _REWIND] = Field(
        default=100,
        ge=1,
        description="global batches that a rewind skips after the blow-up, besides those that led to it; at least 1",
    )
    rewind_tries: Annotated[int, _REWIND] = Field(
        default=3, ge=1, description="rewinds in a row that do not get past the blow-up before the run stops"
    )
    accumulate: Annotated[int, identity("gradients are summed in another order", "train.accumulate")] = Field(
        default=1,
        ge=1,
        le=4096,
        description="micro-batches per replica batch; their gradients are averaged",
    )
    precision: Annotated[
        Literal["float32", "bfloat16"] | None, identity("another arithmetic", "train.precision", "model.config")
    ] = Field(
        default=None,
        description="float32, or bfloat16: compute in bfloat16, keep variables in float32; left out: the model's",
    )
    class_weight: Annotated[
        ClassWeights | None, BeforeValidator(_classes), identity("another loss", "train.class_weight")
    ] = Field(
        default=None, description="weight of the loss of each class of y, {0: 1.0, 1: 5.0}; classes left out weigh 1"
    )
    callbacks: Annotated[
        CodeReference | None, identity("other callbacks, which may change the learning rate", "train.callbacks")
    ] = Field(
        default=None,
        description="a function that returns a list of Keras callbacks, as callbacks.py:build_callbacks; for them an "
        "epoch ends with each evaluation of evaluate.every_steps or evaluate.every, or else with each logged row. "
        "Those of Keras that save, log or show are replaced by what Baton does itself; batch hooks act at logged rows",
    )
    epoch_examples: Annotated[int | None, operational("follows from the data")] = Field(
        default=None,
        ge=1,
        description="not for run files: Baton sets it to the number of training examples of the prepared dataset",
    )

    @property
    def epoch(self) -> EpochLength:
        """The length of an epoch, once `epochs.with_examples` has set the number of training examples."""
        if self.epoch_examples is None:
            raise AssertionError("the number of training examples is not known yet; see contracts/epochs.py")
        return EpochLength(
            train_examples=self.epoch_examples,
            global_batch_size=self.global_batch_size,
            drop_remainder=self.drop_remainder,
        )

    @property
    def target(self) -> int:
        """The absolute step to train to; with `epochs`, once the number of training examples is known."""
        return self.epoch.end_of(self.epochs) if self.epochs is not None else self.steps or 0

    @property
    def known_target(self) -> int | None:
        """The absolute step to train to; None as long as it follows from an unknown number of training examples."""
        return None if self.epochs is not None and self.epoch_examples is None else self.target

    def target_ahead(self, step: int, logged: int | None) -> int | None:
        """Return the step that a run at `step` is trained to: by the run file, or, if that is not ahead, by its log.

        Args:
            step: of the tip.
            logged: the target of the newest commit, perhaps of a command with another one; None: not known.
        """
        own = self.known_target
        if own is None or logged is None:
            return logged if own is None else own
        return own if own > step else max(own, logged)

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise ValueError("train.steps is missing; add it, the step to train to, or add train.epochs instead")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                "steps and epochs exclude each other; keep one of them. On the command line, set the other to null, as "
                "with --set train.epochs=null"
            )
        return self

    @model_validator(mode="after")
    def _one_segment_length(self) -> Self:
        lengths = ("segment_steps", "segment_epochs", "segment_seconds")
        given = [name for name in lengths if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one of them")
        return self
