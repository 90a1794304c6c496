"""`train` in the run file: how far to train, in which segments, and with which arithmetic."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.change_class import environment, identity, operational
from tasks.foundation.contracts.code_reference import CodeReference

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

    steps: Annotated[int, _TARGET] = Field(
        ge=1, lt=2**53, description="the step to train to, counted from initialization; at least 1"
    )
    segment_steps: Annotated[int | None, _TARGET] = Field(
        default=None, ge=1, description="a segment ends at each multiple of this number of steps; at least 1"
    )
    segment_seconds: Annotated[float | None, _TARGET] = Field(
        default=None, gt=0, allow_inf_nan=False, description="a segment ends after this many seconds; more than 0"
    )
    global_batch_size: Annotated[int, identity("other batches", "train.global_batch_size")] = Field(
        ge=1, le=2**24, description="examples in a step, over all replicas; 1 to 16777216"
    )
    log_every_steps: Annotated[
        int,
        operational("says when metrics are read, not what is trained; train.callbacks, if given, act at these steps"),
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
        "epoch ends with each evaluation of evaluate.every_steps, or else with each logged row",
    )

    @model_validator(mode="after")
    def _one_segment_length(self) -> Self:
        if self.segment_steps is not None and self.segment_seconds is not None:
            raise ValueError("segment_steps and segment_seconds exclude each other; keep one of them")
        return self
