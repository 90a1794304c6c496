"""The run file's content. The descriptions double as remedies in error messages and as documentation."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.change_class import identity, operational
from tasks.foundation.contracts.code_reference import CodeReference
from tasks.foundation.contracts.data_spec import DataSpec
from tasks.foundation.contracts.init_spec import InitSpec
from tasks.foundation.contracts.placement import AcceleratorSpec, StagesSpec
from tasks.foundation.contracts.tracking_spec import TrackingSpec
from tasks.foundation.contracts.train_spec import TrainSpec

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED_RUN_NAMES = {"datasets"}

_COMPILED = ("compile.optimizer", "compile.loss", "compile.metrics", "compile.other")
_MODEL = ("model.config", "model.code", "model.contents", "model.signature", *_COMPILED)
_RETENTION = operational("says which checkpoints are kept, not what is computed")
_STOPPING = operational("says when the run stops or commits, not what is computed")

_PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def check_run_name(name: str) -> str:
    """Check that a name can be a run's.

    Raises:
        ValueError: it cannot; the message says why.
    """
    if not _RUN_NAME.fullmatch(name):
        raise ValueError("use letters, digits, '.', '_' and '-', beginning with a letter or digit")
    if name in _RESERVED_RUN_NAMES:
        raise ValueError("this name is the folder that datasets are kept in; take another")
    return name


class ModelSpec(Contract):
    """The function that returns the compiled model."""

    build: Annotated[CodeReference, identity("another model; the name of the function may change", *_MODEL)] = Field(
        description="a function that returns a compiled keras.Model, as model.py:build_model; parameters of it named "
        "steps_per_epoch and train_steps get the steps of an epoch, rounded up, and the step to train to"
    )
    options: Annotated[dict[str, Any], identity("another model", "model.options", *_MODEL)] = Field(
        default_factory=dict, description="keyword arguments of the function"
    )


def _model_from_string(value: object) -> object:
    return {"build": value} if isinstance(value, str) else value


class KeepBest(Contract):
    """Which checkpoint counts as the best."""

    metric: str = Field(min_length=1, description="name of an evaluation metric, such as accuracy or loss")
    mode: Literal["max", "min"] = Field(description="max or min")


class CheckpointSpec(Contract):
    """When checkpoints are committed, and which are kept."""

    keep_last: Annotated[int, _RETENTION] = Field(
        default=3,
        ge=1,
        description="how many of the newest checkpoints are kept; at least 1. The newest that was read whole again, as "
        "by a restart, is kept too, and files are deleted two commits after their checkpoint is retired: with 1 there "
        "are up to four folders",
    )
    keep_every_steps: Annotated[int | None, _RETENTION] = Field(
        default=None,
        ge=1,
        description="checkpoints at multiples of this number of steps are kept for good; at least 1",
    )
    keep_best: Annotated[KeepBest | None, _RETENTION] = Field(
        default=None, description="a metric and a mode, {metric: accuracy, mode: max}"
    )
    every_seconds: Annotated[Literal["auto"] | _PositiveSeconds | None, _STOPPING] = Field(
        default="auto",
        description="commit within a segment too, at least this many seconds apart; auto: as often as it pays; null: "
        "only at its end",
    )
    max_overhead: Annotated[float, _STOPPING] = Field(
        default=0.02,
        gt=0,
        le=1,
        description="with every_seconds: auto, the largest share of the time that commits within a segment may cost; "
        "more than 0, at most 1",
    )
    verify: Annotated[
        Literal["commit", "background"], operational("says how often checkpoints are read, not what is computed")
    ] = Field(
        default="commit",
        description="commit: the files of a checkpoint are verified when it is committed; background: retained "
        "checkpoints are also read again while the training goes on, and damaged ones are quarantined",
    )


class EvaluateSpec(Contract):
    """When the model is evaluated, besides at the end."""

    every_steps: Annotated[
        int | None,
        operational("says when the model is evaluated, not what is trained; train.callbacks, if given, act then"),
    ] = Field(
        default=None, ge=1, description="evaluate at each multiple of this number of steps; left out: only at the end"
    )
    every: Annotated[
        Literal["epoch"] | None,
        operational("says when the model is evaluated, not what is trained; train.callbacks, if given, act then"),
    ] = Field(
        default=None,
        description="epoch: evaluate at the end of each epoch, the first step that has trained on its last example; "
        "for a number of steps use every_steps",
    )

    @model_validator(mode="after")
    def _one_cadence(self) -> Self:
        if self.every is not None and self.every_steps is not None:
            raise ValueError("every and every_steps exclude each other; keep one of them")
        return self


class StopSpec(Contract):
    """How a run reacts to a stop."""

    grace_seconds: Annotated[float, _STOPPING] = Field(
        default=25.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds between the notice (SIGTERM, preemption) and the end of the machine; more than 0",
    )
    answer_seconds: Annotated[float, _STOPPING] = Field(
        default=3.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds within which training reacts to a notice; inner loops are sized for it; more than 0",
    )
    attempts_without_progress: Annotated[int, _STOPPING] = Field(
        default=5, ge=1, description="attempts in a row that do not advance the run before it is refused"
    )
    hang_seconds: Annotated[Literal["auto"] | _PositiveSeconds | None, _STOPPING] = Field(
        default="auto",
        description="if no inner loop ends for this many seconds, the process records the stacks of its threads and "
        "exits with 3, so that it can be started again; auto: 600, or 20 times the longest inner loop if that is more; "
        "null: never",
    )


class RunSpec(Contract):
    """A run file."""

    run: Annotated[
        str, AfterValidator(check_run_name), operational("says where the run is; another name is another run")
    ] = Field(description="the run's name; its home is <storage>/<run>/")
    storage: Annotated[str, operational("says where the run is; its folder may be moved")] = Field(
        min_length=1, description="a folder, relative to the run file, or gs://bucket/prefix"
    )
    data: DataSpec = Field(description="the examples: source, options, validation_fraction")
    model: Annotated[ModelSpec, BeforeValidator(_model_from_string)] = Field(
        description="a function that returns a compiled keras.Model, as model.py:build_model"
    )
    train: TrainSpec = Field(description="steps or epochs, segment_steps, global_batch_size, log_every_steps, seed")
    init: InitSpec = Field(default_factory=InitSpec, description="weights, freeze")
    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec, description="{kind: auto}")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="keep_last, keep_best")
    evaluate: EvaluateSpec = Field(default_factory=EvaluateSpec, description="every_steps, every")
    stop: StopSpec = Field(default_factory=StopSpec, description="grace_seconds, answer_seconds")
    stages: StagesSpec = Field(default_factory=StagesSpec, description="which stages run as Prefect deployments")
    tracking: TrackingSpec = Field(default_factory=TrackingSpec, description="mlflow, wandb")

    @model_validator(mode="after")
    def _workers_run_all_stages(self) -> Self:
        remote = self.stages.remote()
        if remote and self.accelerator.kind == "multi_worker":
            raise ValueError(
                f"with accelerator.kind = multi_worker every host runs all stages; drop stages.{next(iter(remote))}"
            )
        return self

    @model_validator(mode="after")
    def _best_needs_evaluation(self) -> Self:
        if self.checkpoint.keep_best is not None and not self.data.has_validation:
            raise ValueError(
                "checkpoint.keep_best needs validation examples; set data.validation_fraction above 0 or drop it"
            )
        return self
