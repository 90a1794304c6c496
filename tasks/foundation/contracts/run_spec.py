"""The run file's content. The descriptions double as remedies in error messages and as documentation."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.placement import AcceleratorSpec, StagesSpec

ClassWeights = dict[int, Annotated[float, Field(ge=0, allow_inf_nan=False)]]

_CLASS = re.compile(r"0|[1-9][0-9]{0,8}")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED_RUN_NAMES = {"datasets"}


def check_run_name(name: str) -> str:
    """Refuse what cannot be the name of a run, with a ValueError that says why."""
    if not _RUN_NAME.fullmatch(name):
        raise ValueError("use letters, digits, '.', '_' and '-', beginning with a letter or digit")
    if name in _RESERVED_RUN_NAMES:
        raise ValueError("this name is the folder that datasets are kept in; take another")
    return name


def _check_code_reference(reference: str) -> str:
    """`file.py:name`, relative to the run file, or `package.module:name`."""
    module, separator, name = reference.partition(":")
    if not separator or not module or not name.isidentifier():
        raise ValueError("name a function as file.py:function or package.module:function")
    if module.endswith(".py"):
        if PurePosixPath(module).is_absolute():
            raise ValueError("name the file relative to the run file's folder")
        if not PurePosixPath(module).stem.isidentifier():
            raise ValueError("the file's name must be a Python name and .py, as my_model.py")
    elif not all(part.isidentifier() for part in module.split(".")):
        raise ValueError("name a function as file.py:function or package.module:function")
    return reference


def _check_source(source: str) -> str:
    return _check_code_reference(source) if ":" in source else source


def _check_batched(batched: bool | None) -> bool | None:
    if batched:
        raise ValueError(
            "batches are not read yet; yield their examples one by one, as yield from zip(x, y), and drop the key"
        )
    return batched


class DataSpec(Contract):
    """Where the examples come from and how they are laid out."""

    source: Annotated[str, AfterValidator(_check_source)] = Field(
        description="a built-in source (csv, digits, images, npz, text, tfrecord) or a generator function, data.py:load"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="settings of the source, such as path; keyword arguments of data.py:load"
    )
    version: str | int = Field(
        default=0, description="change it when what data.py:load reads has changed though its code has not"
    )
    validation_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="share of the examples that is held out, at least 0 and below 1"
    )
    classes: int | None = Field(default=None, ge=1, description="number of classes; labels y must lie in [0, classes)")
    allow_nan: bool = Field(default=False, description="true lets NaN and infinity into the dataset")
    batched: Annotated[bool | None, AfterValidator(_check_batched)] = Field(
        default=None,
        description="false: what data.py:load yields are single examples; left out: refused where they may be batches",
    )
    shard_examples: int | None = Field(
        default=None, ge=1, description="examples in a shard; left out: about 32 MiB of them"
    )
    window_shards: int = Field(
        default=8, ge=1, description="shards that are read and shuffled together, in memory; at least 1"
    )


class ModelSpec(Contract):
    """The function that returns the compiled model."""

    build: Annotated[str, AfterValidator(_check_code_reference)] = Field(
        description="a function that returns a compiled keras.Model, as model.py:build_model"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


def _classes(weights: object) -> object:
    """Keys of YAML and JSON are text."""
    if not isinstance(weights, Mapping):
        return weights
    wrong = [key for key in weights if not (isinstance(key, int) or _CLASS.fullmatch(str(key)))]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no class; name classes by whole numbers, as {{0: 1.0, 1: 5.0}}")
    return {int(key): weight for key, weight in weights.items()}


def _model_from_string(value: object) -> object:
    return {"build": value} if isinstance(value, str) else value


class TrainSpec(Contract):
    """How far and in which pieces."""

    steps: int = Field(ge=1, lt=2**53, description="the step to train to, counted from initialization; at least 1")
    segment_steps: int | None = Field(
        default=None, ge=1, description="a segment ends at each multiple of so many steps; at least 1"
    )
    segment_seconds: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="a segment ends after so many seconds; more than 0"
    )
    global_batch_size: int = Field(ge=1, le=2**24, description="examples in a step, over all replicas; 1 to 16777216")
    log_every_steps: int = Field(
        default=50, ge=1, description="metrics are read, logged and reset at each multiple of so many steps"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of weights, order and dropout; 0 to 2147483647")
    deterministic: bool = Field(
        default=True,
        description="true: TensorFlow uses deterministic operations only, as TPUs do by themselves; false is faster "
        "for some models, and two runs may then differ",
    )
    stop_after_seconds: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="a command stops, resumable, after so many seconds"
    )
    on_blowup: Literal["stop", "rewind"] = Field(
        default="stop", description="what a loss that blows up leads to: stop, or rewind to the last segment border"
    )
    blowup_factor: float | None = Field(
        default=None,
        gt=1,
        allow_inf_nan=False,
        description="a logged loss over so many times its running median is a blow-up; left out: only NaN and infinity",
    )
    rewind_skip_batches: int = Field(
        default=100,
        ge=1,
        description="global batches that a rewind skips from the blow-up on, besides those that led to it; at least 1",
    )
    rewind_tries: int = Field(
        default=3, ge=1, description="rewinds in a row that do not get past the blow-up, before the run stops"
    )
    accumulate: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="micro-batches that a replica's batch is cut into, their gradients averaged",
    )
    precision: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="float32, or bfloat16: compute in it, keep variables in float32; left out: the model's",
    )
    class_weight: Annotated[ClassWeights | None, BeforeValidator(_classes)] = Field(
        default=None, description="weight of the loss of each class of y, {0: 1.0, 1: 5.0}; classes left out weigh 1"
    )
    callbacks: Annotated[str, AfterValidator(_check_code_reference)] | None = Field(
        default=None,
        description="a function that returns a list of Keras callbacks, as callbacks.py:build_callbacks; an epoch, to "
        "them, ends with each evaluation of evaluate.every_steps, or else with each logged row",
    )

    @model_validator(mode="after")
    def _one_way_to_cut(self) -> Self:
        if self.segment_steps is not None and self.segment_seconds is not None:
            raise ValueError("segment_steps and segment_seconds exclude each other; keep one of them")
        return self


def _patterns(value: object) -> object:
    """One pattern may be said without a list."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


_Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns)]


class WeightsSource(Contract):
    """Where initial weights come from, and which variables they are for."""

    source: str = Field(
        min_length=1,
        description="a .weights.h5 or .keras file, a SavedModel, a TensorFlow checkpoint, the home of a Baton run, or "
        "a function, weights.py:load",
    )
    step: int | Literal["best"] | None = Field(
        default=None, description="of a Baton run: which checkpoint, a step or best; left out: the newest"
    )
    include: _Patterns = Field(
        default=("*",), min_length=1, description="patterns of the model's variable paths that are to be loaded"
    )
    exclude: _Patterns = Field(default=(), description="patterns of those that are not; of names in the source too")
    rename: dict[str, str] = Field(
        default_factory=dict, description="the model's names to the source's; a name is a path or the beginning of one"
    )
    strict: bool = Field(
        default=True,
        description="false tolerates variables that are missing, unused or of another shape, and reports them",
    )


def _sources(value: object) -> object:
    """One source may be said without a list, and by its address alone."""
    return tuple(map(_source, value if isinstance(value, list | tuple) else [value]))


def _source(value: object) -> object:
    """What is wrong within a list has no key of its own in the run file, so it is said here."""
    if isinstance(value, WeightsSource):
        return value
    if isinstance(value, str):
        value = {"source": value}
    keys = ", ".join(WeightsSource.model_fields)
    if not isinstance(value, dict):
        raise ValueError(f"a source is an address, or a mapping of {keys}")  # noqa: TRY004 - pydantic's kind of error
    try:
        return WeightsSource.model_validate(value)
    except ValidationError as faults:
        fault = faults.errors()[0]
        key = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            raise ValueError(f"{key} is no key of a source; the keys are {keys}") from None
        raise ValueError(f"{key} should be {WeightsSource.model_fields[key].description}") from None


class InitSpec(Contract):
    """What a run begins from, besides its seed."""

    weights: Annotated[tuple[WeightsSource, ...], BeforeValidator(_sources)] = Field(
        default=(),
        description="pretrained weights: an address, or {source, step, include, exclude, rename, strict}; or a list",
    )
    freeze: _Patterns = Field(
        default=(), description="patterns of paths of layers or variables that are not trained, such as encoder/*"
    )


class KeepBest(Contract):
    """Which checkpoint counts as the best."""

    metric: str = Field(min_length=1, description="name of an evaluation metric, such as accuracy or loss")
    mode: Literal["max", "min"] = Field(description="max or min")


class CheckpointSpec(Contract):
    """Which checkpoints stay."""

    keep_last: int = Field(default=3, ge=1, description="how many of the newest checkpoints stay; at least 1")
    keep_every_steps: int | None = Field(
        default=None, ge=1, description="checkpoints at multiples of so many steps stay for good; at least 1"
    )
    keep_best: KeepBest | None = Field(default=None, description="a metric and a mode, {metric: accuracy, mode: max}")
    every_seconds: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="commit within a segment too, at least so many seconds apart; left out: only at its end",
    )


class EvaluateSpec(Contract):
    """When the validation examples are looked at, besides at the end."""

    every_steps: int | None = Field(
        default=None, ge=1, description="evaluate at each multiple of so many steps; left out: only at the end"
    )


class StopSpec(Contract):
    """How a run answers when it has to go."""

    grace_seconds: float = Field(
        default=25.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds between the notice (SIGTERM, preemption) and the end of the machine; more than 0",
    )
    answer_seconds: float = Field(
        default=3.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds within which training heeds a notice; inner loops are sized for it; more than 0",
    )
    attempts_without_progress: int = Field(
        default=5, ge=1, description="attempts in a row that do not advance the run before it refuses to go on"
    )


class RunSpec(Contract):
    """A run file."""

    run: Annotated[str, AfterValidator(check_run_name)] = Field(
        description="the run's name; its home is <storage>/<run>/"
    )
    storage: str = Field(min_length=1, description="a folder, relative to the run file, or gs://bucket/prefix")
    data: DataSpec = Field(description="the examples: source, options, validation_fraction")
    model: Annotated[ModelSpec, BeforeValidator(_model_from_string)] = Field(
        description="a function that returns a compiled keras.Model, as model.py:build_model"
    )
    train: TrainSpec = Field(description="steps, segment_steps, global_batch_size, log_every_steps, seed")
    init: InitSpec = Field(default_factory=InitSpec, description="weights, freeze")
    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec, description="{kind: auto}")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="keep_last, keep_best")
    evaluate: EvaluateSpec = Field(default_factory=EvaluateSpec, description="every_steps")
    stop: StopSpec = Field(default_factory=StopSpec, description="grace_seconds, answer_seconds")
    stages: StagesSpec = Field(default_factory=StagesSpec, description="which stages run as Prefect deployments")

    @model_validator(mode="after")
    def _workers_run_all_stages(self) -> Self:
        elsewhere = self.stages.elsewhere()
        if elsewhere and self.accelerator.kind == "multi_worker":
            raise ValueError(
                f"with accelerator.kind = multi_worker every host runs all stages; drop stages.{next(iter(elsewhere))}"
            )
        return self

    @model_validator(mode="after")
    def _best_needs_evaluation(self) -> Self:
        if self.checkpoint.keep_best is not None and self.data.validation_fraction == 0:
            raise ValueError(
                "checkpoint.keep_best needs validation examples; set data.validation_fraction above 0 or drop it"
            )
        return self
