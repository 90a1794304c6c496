"""The run file's content: `RunSpec`, with `train` and `init`; `data` and `accelerator` are in data_spec and placement.

The descriptions double as remedies in error messages and as documentation. What is due at absolute steps and epochs
(rows of metrics, segment borders, evaluations, callbacks) is arithmetic on these values, because the run file gives it
in either. Epochs become steps once the number of training examples is known.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from baton.tasks.foundation.contracts.base import (
    CARRIED,
    FROM_THAT_STEP,
    OTHER_BATCHES,
    CodeReference,
    Contract,
    environment,
    identity,
    operational,
)
from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.placement import AcceleratorSpec, StagesSpec
from baton.tasks.foundation.errors import RunFileError
from baton.tasks.foundation.masking import masked_values
from baton.tasks.foundation.text import option

_SHOWING = operational("says where curves are shown, not what is computed")
ClassWeights = dict[int, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
_CLASS = re.compile(r"0|[1-9][0-9]{0,8}")
_TARGET = operational("says how far to train and in which segments, not what is computed")
_REWIND = operational("a rewind is an entry of the log, and the run is a function of its log")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED_RUN_NAMES = {"datasets"}
_COMPILED = ("compile.optimizer", "compile.loss", "compile.metrics", "compile.other")
_MODEL = ("model.config", "model.code", "model.contents", "model.signature", *_COMPILED)
_RETENTION = operational("says which checkpoints are kept, not what is computed")
_STOPPING = operational("says when the run stops or commits, not what is computed")
_PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# A value that stands in the log and on pages as it is.
PlainValue = bool | int | float | str
MOST_PLAIN_VALUES, MOST_NAME_CHARACTERS, MOST_TEXT_CHARACTERS = 32, 64, 200
DEFAULT_SEGMENT_STEPS = 1000
DEFAULT_LOG_STEPS = 50
# Recorded beside the identity, for information: `data.content_digest` decides whether examples changed.
TRAIN_EXAMPLES = "data.train_examples"


def _patterns(value: object) -> object:
    """A single pattern needs no list."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


_Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns)]


class WeightsSource(Contract):
    """Where initial weights come from, and which variables they are for."""

    source: str = Field(
        min_length=1,
        description="a .weights.h5 or .keras file, a SavedModel, the folder of a KerasHub preset, a TensorFlow "
        "checkpoint, the home of a Baton run, or a function, weights.py:load",
    )
    step: int | Literal["best"] | None = Field(
        default=None, description="of a Baton run: which checkpoint, a step or best; left out: the newest"
    )
    include: _Patterns = Field(
        default=("*",), min_length=1, description="patterns of the model's variable paths that are to be loaded"
    )
    exclude: _Patterns = Field(
        default=(), description="patterns of variable paths, in the model or the source, that are not loaded"
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="the model's names to the source's; a name is a path or the beginning of one"
    )
    strict: bool = Field(
        default=True,
        description="false tolerates variables that are missing, unused or of another shape, and reports them",
    )


def _sources(value: object) -> object:
    """A single source needs no list, and may be just its address."""
    return tuple(map(_source, value if isinstance(value, list | tuple) else [value]))


def _source(value: object) -> object:
    """Check one source. The key of an error within a list is lost, so the message names it."""
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
    """What a run starts from, besides its seed."""

    weights: Annotated[
        tuple[WeightsSource, ...],
        BeforeValidator(_sources),
        identity("other initial weights", accepted="has no effect: the weights come from the checkpoint"),
    ] = Field(
        default=(),
        description="pretrained weights: an address, or {source, step, include, exclude, rename, strict}; or a list",
    )
    freeze: Annotated[
        _Patterns,
        identity("other trainable variables", "model.config", "model.signature", accepted=CARRIED),
    ] = Field(
        default=(), description="patterns of paths of layers or variables that are not trained, such as encoder/*"
    )


class MlflowSpec(Contract):
    """An MLflow server or store."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        description="http://host:5000 or sqlite:////folder/mlflow.db; null: MLflow's own setting, MLFLOW_TRACKING_URI",
    )
    experiment: str = Field(default="Default", min_length=1, description="name of the experiment; made if missing")


class WandbSpec(Contract):
    """Weights & Biases, in its offline mode."""

    project: str = Field(min_length=1, description="name of the project")


class TrackingSpec(Contract):
    """Where the curves are sent. Each is made from the log, so that nothing is sent twice."""

    mlflow: Annotated[MlflowSpec | None, _SHOWING] = Field(
        default=None,
        description="{uri: address, experiment: name}: metrics and evaluations become one MLflow run; {}: MLflow's own "
        "settings; needs the extra `mlflow`",
    )
    wandb: Annotated[WandbSpec | None, _SHOWING] = Field(
        default=None,
        description="{project: name}: the same for Weights & Biases, as an offline run in <home>/wandb, which "
        "`wandb sync` uploads; storage is on a local disk; needs the extra `wandb`",
    )


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
    drop_remainder: Annotated[
        bool,
        identity("other batches from the second epoch on", accepted=OTHER_BATCHES, plain=True),
    ] = Field(
        default=False,
        description="true: an epoch is a whole number of batches, and the examples left over are skipped, "
        "others each time; false: a batch may have examples of two epochs, and none is skipped",
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
    global_batch_size: Annotated[int, identity("other batches", accepted=OTHER_BATCHES, plain=True)] = Field(
        ge=1, le=2**24, description="examples in a step, over all replicas; 1 to 16777216"
    )
    log_every_steps: Annotated[
        int | None,
        operational(
            "says when metrics are read, not what is trained; part of train.callbacks if these act at rows, have batch "
            "hooks, or monitor a training metric"
        ),
    ] = Field(
        default=None,
        ge=1,
        description="metrics are read, logged and reset at each multiple of this number of steps, and with epochs at "
        "the end of each epoch too; left out: every 50 steps, or with epochs only at the end of each",
    )
    seed: Annotated[
        int,
        identity(
            "other initial weights, split, order and dropout",
            "data.content_digest",
            accepted="another order, and other draws without a generator, from that step on; weights and generators "
            "are the checkpoint's",
            plain=True,
        ),
    ] = Field(default=0, ge=0, lt=2**31, description="seed of weights, order and dropout; 0 to 2147483647")
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
    accumulate: Annotated[
        int,
        identity("gradients summed in another order", accepted=FROM_THAT_STEP, plain=True),
    ] = Field(
        default=1,
        ge=1,
        le=4096,
        description="micro-batches per replica batch; their gradients are averaged",
    )
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        identity("another arithmetic", "model.config", accepted=CARRIED, plain=True),
    ] = Field(
        default=None,
        description="float32, or bfloat16: compute in bfloat16, keep variables in float32; left out: the model's",
    )
    class_weight: Annotated[
        ClassWeights | None,
        BeforeValidator(_classes),
        identity("another loss", accepted=FROM_THAT_STEP),
    ] = Field(
        default=None, description="weight of the loss of each class of y, {0: 1.0, 1: 5.0}; classes left out weigh 1"
    )
    callbacks: Annotated[
        CodeReference | None,
        identity(
            "other callbacks, or other steps at which they act",
            accepted=f"{FROM_THAT_STEP}; the callbacks start with fresh state, and a run that they had stopped "
            "continues",
        ),
    ] = Field(
        default=None,
        description="a function that returns a list of Keras callbacks, as callbacks.py:build_callbacks; for them an "
        "epoch ends with each evaluation of evaluate.every_steps or evaluate.every. Without these it is one of "
        "train.epochs, or with train.steps it ends with each logged row. "
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
            raise AssertionError("the number of training examples is not known yet; see contracts/run_spec.py")
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
                "with " + option("set", "train.epochs=null")
            )
        return self

    @model_validator(mode="after")
    def _one_segment_length(self) -> Self:
        lengths = ("segment_steps", "segment_epochs", "segment_seconds")
        given = [name for name in lengths if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one of them")
        return self

    @model_validator(mode="after")
    def _rows_without_epochs(self) -> Self:
        if self.log_every_steps is None and self.epochs is None:
            object.__setattr__(self, "log_every_steps", DEFAULT_LOG_STEPS)
        return self


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
    options: Annotated[
        dict[str, Any],
        identity("other arguments of the function that builds the model", *_MODEL, accepted=CARRIED),
    ] = Field(default_factory=dict, description="keyword arguments of the function")


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


class EvaluateSpec(Contract):
    """When the model is evaluated, besides at the end."""

    every_steps: Annotated[
        int | None,
        operational("says when the model is evaluated, not what is trained; train.callbacks, if given, act then"),
    ] = Field(
        default=None,
        ge=1,
        description="evaluate at each multiple of this number of steps, where a segment ends; left out: as every says",
    )
    every: Annotated[
        Literal["epoch"] | None,
        operational("says when the model is evaluated, not what is trained; train.callbacks, if given, act then"),
    ] = Field(
        default=None,
        description="epoch: evaluate at the end of each epoch, the first step that has trained on its last example; "
        "for a number of steps use every_steps. If both are left out: epoch with train.epochs, only at the end with "
        "train.steps. null: only at the end",
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


def is_plain(value: object) -> bool:
    """Whether a value is a finite number of at most 64 bits, true or false, or a text of at most 200 characters."""
    if isinstance(value, str):
        return len(value) <= MOST_TEXT_CHARACTERS
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and -(2**63) < value < 2**63


def _plain_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Check that all is plain and little, because every entry of the log has it; secrets are masked at once."""
    if len(metadata) > MOST_PLAIN_VALUES:
        raise ValueError(f"it has {len(metadata)} keys; keep at most {MOST_PLAIN_VALUES}")
    for name, value in metadata.items():
        if not 0 < len(name) <= MOST_NAME_CHARACTERS:
            raise ValueError(f"{name!r} is no name; use 1 to {MOST_NAME_CHARACTERS} characters")
        if not is_plain(value):
            raise ValueError(
                f"the value of {name} is not plain; use a number, true or false, or a text of at most "
                f"{MOST_TEXT_CHARACTERS} characters"
            )
    return dict(masked_values(metadata))


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
    metadata: Annotated[
        dict[str, Any], AfterValidator(_plain_metadata), operational("says something of the run, changes nothing in it")
    ] = Field(
        default_factory=dict,
        description="your own facts of the run, {team: vision, ticket: 42}: up to 32 numbers, truth values and texts "
        "of up to 200 characters; the log has them from the next commit on",
    )

    @model_validator(mode="after")
    def _workers_run_all_stages(self) -> Self:
        remote = self.stages.remote()
        if remote and self.accelerator.kind == "multi_worker":
            raise ValueError(
                f"with accelerator.kind = multi_worker every host runs all stages; drop stages.{next(iter(remote))}"
            )
        without_devices = {"prepare_data", "checkpoint_to_gcs"}
        if self.stages.evaluate.accelerator is not None:
            without_devices.add("evaluate")
        others = [name for name in remote if name not in without_devices]
        if others and self.accelerator.tpu != "local":
            raise ValueError(
                f"one process drives the TensorFlow servers of accelerator.tpu; drop stages.{others[0]}, or for "
                "stages.evaluate name an accelerator of its own"
            )
        return self

    @model_validator(mode="after")
    def _servers_read_files(self) -> Self:
        by_itself = {
            "data.cache: memory keeps the examples in this process; drop it": self.data.cache == "memory",
            f"storage {self.storage} is in the memory of this process; name a folder that all hosts have, or gs://":
                self.storage.startswith("memory:"),
            f"the records of source {self.data.source_in_place} stay in their files; set options.copy to true":
                self.data.source_in_place is not None,
        }  # fmt: skip
        for words, is_so in by_itself.items():
            if is_so and self.accelerator.tpu != "local":
                raise ValueError(f"the TensorFlow servers of accelerator.tpu read prepared shards, and {words}")
        return self

    @model_validator(mode="after")
    def _best_needs_evaluation(self) -> Self:
        if self.checkpoint.keep_best is not None and not self.data.has_validation:
            raise ValueError(
                "checkpoint.keep_best needs validation examples; set data.validation_fraction above 0 or drop it"
            )
        return self

    @model_validator(mode="after")
    def _epochs_are_evaluated(self) -> Self:
        # Decided here and now: the settings as JSON, which other processes get, do not tell what the run file left out.
        given = {"every", "every_steps"} & self.evaluate.model_fields_set
        if self.train.epochs is not None and self.data.has_validation and not given:
            object.__setattr__(self, "evaluate", self.evaluate.model_copy(update={"every": "epoch"}))
        return self


def next_border(spec: RunSpec, step: int, until_step: int) -> int:
    """Return the step at which the segment that starts at `step` ends.

    Steps that are evaluated or kept permanently are borders too, because they need a checkpoint.
    """
    keep_every = spec.checkpoint.keep_every_steps
    periods = [evaluations(spec), None if keep_every is None else Period(keep_every), _segments(spec)]
    return min(until_step, *(each.next_end(step) for each in periods if each is not None), until_step)


def is_row_due(spec: RunSpec, step: int) -> bool:
    """Return whether metrics are read, logged and reset at `step`. It does not depend on the target of the run."""
    return any(each.ends_at(step) for each in _rows(spec))


def next_row(spec: RunSpec, step: int) -> int:
    """Return the first step after `step` at which metrics are read, logged and reset."""
    return min(each.next_end(step) for each in _rows(spec))


def _rows(spec: RunSpec) -> tuple[Period, ...]:
    """A row ends the steps since the one before; with `epochs`, each epoch ends with one."""
    every = spec.train.log_every_steps
    if spec.train.epochs is None:
        return (Period(every or DEFAULT_LOG_STEPS),)
    return (spec.train.epoch.period(), *(() if every is None else (Period(every),)))


def evaluations(spec: RunSpec) -> Period | None:
    """Return after which steps the model is evaluated; None: only at the end."""
    if spec.evaluate.every == "epoch":
        return spec.train.epoch.period()
    every = spec.evaluate.every_steps
    return None if every is None else Period(every)


def _segments(spec: RunSpec) -> Period | None:
    """The length of segments; None if it is given in seconds."""
    train = spec.train
    if train.segment_seconds is not None:
        return None
    if train.segment_epochs is not None:
        return train.epoch.period(train.segment_epochs)
    return Period(train.segment_steps or DEFAULT_SEGMENT_STEPS)


def callbacks_act_at_evaluations(spec: RunSpec) -> bool:
    """Return whether callbacks act at each periodic evaluation; otherwise they act at logged rows."""
    periodic = spec.evaluate.every_steps is not None or spec.evaluate.every is not None
    return periodic and spec.data.has_validation


def callbacks_act_at_end(spec: RunSpec, step: int) -> bool:
    """Return whether callbacks get the evaluation at `step`, the last step of the run. It ends their last epoch.

    That epoch may be shorter than the others, as in Keras the last batch may be smaller.
    """
    return spec.train.callbacks is not None and callbacks_act_at_evaluations(spec) and step == spec.train.target


def epochs_of_callbacks(spec: RunSpec) -> Period:
    """Return an epoch as callbacks see it; they act at the end of each."""
    period = evaluations(spec) if callbacks_act_at_evaluations(spec) else None
    # The first of the periods that end with a row: an epoch, or the distance of rows.
    return _rows(spec)[0] if period is None else period


def needs_examples(spec: RunSpec) -> bool:
    """Return whether the settings count in epochs, and the number of training examples is not known yet."""
    counts = (spec.train.epochs, spec.train.segment_epochs, spec.evaluate.every)
    return spec.train.epoch_examples is None and any(each is not None for each in counts)


def with_examples(spec: RunSpec, train_examples: int) -> RunSpec:
    """Return the settings with the number of training examples, from which epochs follow.

    Args:
        train_examples: training examples of its prepared dataset, at least 1.

    Raises:
        RunFileError: `train.drop_remainder` leaves no batch in an epoch.
    """
    train = spec.train
    if train.drop_remainder and train_examples < train.global_batch_size:
        raise RunFileError(
            f"train.drop_remainder is true, and an epoch of {train_examples} training examples has no whole batch of "
            f"train.global_batch_size = {train.global_batch_size}; use a smaller batch, more data, or drop_remainder: "
            "false"
        )
    if train.epoch_examples == train_examples:
        return spec
    known = train.model_copy(update={"epoch_examples": train_examples})
    return spec.model_copy(update={"train": known})


def with_recorded_examples(spec: RunSpec, identity: Mapping[str, Any]) -> RunSpec:
    """Return the settings with the number of training examples that a run's identity has, if it has one."""
    examples = identity.get(TRAIN_EXAMPLES)
    return spec if examples is None else with_examples(spec, examples)


def recorded_epoch(identity: Mapping[str, Any]) -> EpochLength | None:
    """Return the length of an epoch according to a run's identity; None if it does not say."""
    examples, batch = identity.get(TRAIN_EXAMPLES), identity.get("train.global_batch_size")
    if examples is None or batch is None:
        return None
    return EpochLength(
        train_examples=examples,
        global_batch_size=batch,
        drop_remainder=identity.get("train.drop_remainder", False),
    )
