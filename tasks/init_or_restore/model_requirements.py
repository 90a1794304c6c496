"""Checks a model and its callbacks before a run starts with them; the doctor runs the same checks.

The extreme values of the data are tried on a new model: labels that it has no output for, tokens without a row. Nothing
else is known of a model's losses and layers, so they are asked: with one of the values in place of zero, the compiled
loss must not fail and not be NaN. If it does, examples decide that have the value, each in another column, because the
columns of an array may mean different things (a user, a movie). Nothing is looked at if zeros fail too, or if code of
the user's stands between the values and the model: an own train step, or a transform.

A user's source whose examples can be read two ways is refused, by building the model both ways: what is yielded may be
a batch instead of an example, and a list of arrays may be one array instead of several inputs.

What in a model depends on how a global batch is split over replicas, or on one batch size, is found and named. A step
that is a mean over the examples gives the same result on any number of replicas, except for rounding. Statistics over
one replica's examples, random masks, and clipping before the gradients are summed do not. A fixed batch size prevents
the evaluation of the last, smaller batch of a set.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.dataset import DatasetRef, ExtremeValue, Feature, Reading
from baton.tasks.foundation.contracts.run_spec import RunSpec, callbacks_act_at_evaluations
from baton.tasks.foundation.dataset.evaluation_sets import all_batches, place_of_set
from baton.tasks.foundation.dataset.features import (
    Shapes,
    describe_shapes,
    shared_batch_size,
    single_example_shapes,
    unflatten,
    zeros,
)
from baton.tasks.foundation.dataset.manifest import load_manifest, ref_of_source, zero_examples
from baton.tasks.foundation.dataset.model_inputs import apply_class_weight
from baton.tasks.foundation.errors import BatonError, ModelError, SourceError
from baton.tasks.foundation.machine.devices import DEVICE_LOST_ERRORS, Accelerator
from baton.tasks.foundation.model.build import (
    build_model,
    compute_loss,
    create_variables,
    has_fixed_batch_size,
    preserved_global_state,
    require_test_step,
    trace_test_step,
)
from baton.tasks.foundation.model.keras_steps import overrides
from baton.tasks.foundation.model.metrics import Results, read_results, require_metric, trace_returned_metrics
from baton.tasks.foundation.model.randomness import StepDraws, exact_draws
from baton.tasks.foundation.model.step import require_train_step
from baton.tasks.foundation.model.user_callbacks import (
    StartedCallbacks,
    callback_state,
    require_learning_rate,
    require_monitors,
    start_callbacks,
)
from baton.tasks.foundation.model.variables import layers_of, leaves_of, with_inner_optimizers
from baton.tasks.foundation.state.train_state import TrainState, build_train_state
from baton.tasks.foundation.state.warm_state import HeldValues, WarmState
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.text import message
from baton.tasks.foundation.user_traceback import describe, user_error

_HINTS = (
    "do not fix the model's batch size: use keras.Input without batch_size and batch_shape",
    "or choose train.global_batch_size and data.validation_fraction so that no smaller batch is left",
)
_HINT_OF_TEST = "or choose train.global_batch_size and the number of test examples so that no smaller batch is left"
_SHOWN = 4
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
_MEAN_OF_WEIGHTS = "mean_with_sample_weight"
_BATCH = 1024  # examples that are searched for a value at once
_MOST_TRIED = 64  # of them
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


class ExtremeExamples(NamedTuple):
    """The features of a dataset, their extreme values, and what yields its examples as batches for `train_step`."""

    features: tuple[Feature, ...]
    values: tuple[ExtremeValue, ...]
    batches: Callable[[], Iterable[Any]]

    @classmethod
    def of(cls, storage: Storage, ref: DatasetRef) -> "ExtremeExamples":
        """Those of a prepared dataset that is no mixture."""
        manifest = load_manifest(storage, ref)
        return cls(manifest.features, manifest.extremes, partial(all_batches, storage, ref, batch_size=_BATCH))

    def rows(self, value: ExtremeValue) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
        """Yield examples with a value, of the first batch that has it: its index in their feature, and their arrays."""
        # In the order in which the arrays of a batch are flattened: dicts by their keys.
        names = tree.flatten(unflatten({feature.name: feature.name for feature in self.features}))
        for batch in self.batches():
            arrays = dict(zip(names, tree.flatten(batch), strict=True))
            found = arrays[value.feature] == value.value
            if not found.any():
                continue
            for column in np.ndindex(found.shape[1:]):
                if (rows := np.flatnonzero(found[(slice(None), *column)])).size:
                    yield column, {name: array[rows[0]] for name, array in arrays.items()}
            return


def require_remainder(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    examples: int,
    reference: str,
    draws: StepDraws,
    on: SetName = "validation",
) -> None:
    """Check that a model can be evaluated on a smaller batch, before training starts.

    Args:
        batch: the last batch, of NumPy arrays.
        examples: number of examples of the set, for the message.
        reference: the function's name in the run file, for messages.
        draws: seeds of the step's random operations; it is traced for their replicas.
        on: the set, for the message.

    Raises:
        ModelError: `test_step` cannot be traced with the batch.
    """
    left = len(tree.flatten(tuple(batch))[0])
    try:
        trace_test_step(model, batch, draws)
    except DEVICE_LOST_ERRORS:
        raise
    except (Exception, SystemExit) as fault:
        what = (
            f"{reference}: it cannot be evaluated: the {examples} {on} examples end with a batch of {left}, "
            "which test_step does not take:"
        )
        hints = _HINTS if on == "validation" else (_HINTS[0], _HINT_OF_TEST)
        raise ModelError(user_error(what, fault, hints=hints)) from fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """A part of a model whose result depends on the number of replicas.

    Attributes:
        part: the layer, loss or setting, for messages.
        why: the reason.
    """

    part: str
    why: str


def batch_dependent_parts(model: keras.Model) -> tuple[Dependence, ...]:
    """Return the parts of a built and compiled model that depend on the number of replicas.

    A layer with a `keras.random.SeedGenerator` counts as random unless all its rates are 0. What a custom layer
    computes over the examples of its batch is not detected, nor whether a Keras mask reaches the loss. A custom
    `train_step` cannot be inspected, so it is listed.
    """
    return tuple(dict.fromkeys((*_layers(model), *_steps(model), *_losses(model), *_clipping(model))))


def describe_dependence(parts: Sequence[Dependence]) -> str:
    """Describe what a run with another number of replicas computes differently."""
    if not parts:
        return (
            "the same examples form the same global batches, and no layer is known to depend on how they are split: "
            "losses continue as before, to float tolerance"
        )
    of_reason: dict[str, list[str]] = {}
    for each in parts:
        of_reason.setdefault(each.why, []).append(each.part)
    named = "; ".join(f"{_abridged(names)} ({why})" for why, names in of_reason.items())
    return (
        "the same examples form the same global batches, but losses differ by more than rounding, because these "
        f"depend on which examples share a replica, or on the number of replicas: {named}"
    )


def _abridged(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _layers(model: keras.Model) -> Iterator[Dependence]:
    for layer in layers_of(model):
        path = layer.path or layer.name
        if isinstance(layer, keras.layers.BatchNormalization):
            if layer.trainable and not layer.synchronized:
                why = "statistics of one replica's examples; synchronized=True uses those of all replicas"
                yield Dependence(part=path, why=why)
        elif _is_random(layer):
            yield Dependence(part=path, why="random, each replica draws its own values")


def _is_random(layer: keras.Layer) -> bool:
    # Recurrent cells hold a generator even if their dropout is 0.
    rates = [rate for name in _RATES if isinstance(rate := getattr(layer, name, None), int | float)]
    keeps = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return keeps and (any(rates) or not rates)


def _steps(model: keras.Model) -> Iterator[Dependence]:
    if overrides(model, "train_step"):
        why = "the replicas' gradients are summed, so a loss that Keras does not scale must be divided by their number"
        yield Dependence(part=f"train_step of {type(model).__name__}", why=why)


def _losses(model: keras.Model) -> Iterator[Dependence]:
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", None) == _MEAN_OF_WEIGHTS:
            yield Dependence(part=f"loss {loss.name}", why="a mean over the weights of one replica's examples")


def _clipping(model: keras.Model) -> Iterator[Dependence]:
    for optimizer in with_inner_optimizers(model.optimizer):
        for name in _CLIPPING:
            if value := getattr(optimizer, name, None):
                part = f"{name} = {value} of optimizer {optimizer.name}"
                yield Dependence(part=part, why="clips each replica's gradients before they are summed")


def require_steps(spec: RunSpec, state: TrainState, batch: Sequence[Any], unweighed: Sequence[Any]) -> None:
    """Refuse a model that cannot be trained or evaluated, before a run starts that a corrected model cannot continue.

    Args:
        state: the state that it builds.
        batch: one per-replica batch of zeros, with class weights.
        unweighed: the same batch without class weights, as in evaluation.

    Raises:
        ModelError: see `require_train_step` and `require_test_step`.
    """
    reference = spec.model.build
    require_train_step(
        state.model,
        batch,
        accumulate=spec.train.accumulate,
        leaves=state.leaves,
        reference=reference,
        draws=state.draws,
    )
    if spec.data.is_evaluated_on:
        require_test_step(state.model, unweighed, reference=reference, draws=state.draws)


def require_evaluation(
    spec: RunSpec, state: TrainState, features: Sequence[Feature], examples: int, *, on: SetName = "validation"
) -> None:
    """Refuse a model that cannot be evaluated on the last, smaller batch of a set.

    Args:
        state: the state that it builds.
        examples: number of examples of the set.

    Raises:
        ModelError: see `require_remainder`.
    """
    left = examples % spec.train.global_batch_size
    if left:
        batch, reference = zero_examples(features, left), spec.model.build
        require_remainder(state.model, batch, examples=examples, reference=reference, draws=state.draws, on=on)


def require_evaluations(spec: RunSpec, warm: WarmState, dataset: DatasetRef, storage: Storage) -> None:
    """Refuse a model that cannot be evaluated on the last, smaller batch of the validation or the test set.

    Args:
        warm: the state that it builds.

    Raises:
        ModelError: see `require_remainder`.
    """
    for name in spec.data.is_evaluated_on:
        features: Sequence[Feature] = warm.inputs.validation
        if spec.data.validation_transform is None:
            features = load_manifest(storage, place_of_set(dataset, name)[0]).features
        require_evaluation(spec, warm.state, features, dataset.examples_of(name), on=name)


def require_best(spec: RunSpec, state: TrainState, unweighed: Sequence[Any]) -> None:
    """Refuse `checkpoint.keep_best` with a metric that no evaluation logs.

    Args:
        state: the state that it builds.
        unweighed: see `require_steps`.

    Raises:
        ModelError: the model has no such metric, or its own test_step cannot be traced.
    """
    if spec.data.has_validation and spec.checkpoint.keep_best is not None:
        require_metric(spec.checkpoint.keep_best, _logged_metrics(spec, state, "test_step", unweighed))


def _logged_metrics(spec: RunSpec, state: TrainState, step: str, batch: Sequence[Any]) -> Results:
    """Return the results of the metrics that train_step or test_step logs."""
    returned = trace_returned_metrics(state.model, step, batch, reference=spec.model.build, draws=state.draws)
    return read_results(state.model, state.accelerator.strategy, returned)


def require_callbacks(
    spec: RunSpec, state: TrainState, batch: Sequence[Any], unweighed: Sequence[Any], *, code_folder: Path
) -> StartedCallbacks:
    """Start the callbacks once, on the model as it was built, and refuse those that cannot be used.

    The train step is traced before, as the trainer does: tracing may draw random numbers.

    Args:
        state: the state that it builds.
        batch: see `require_steps`.
        unweighed: see `require_steps`.

    Returns:
        The callbacks. They must not be started again on this model.

    Raises:
        ModelError: a callback is not supported, monitors an unknown metric, sets a learning rate that cannot be set, or
            holds a value that a checkpoint cannot store.
    """
    trained = _logged_metrics(spec, state, "train_step", batch)
    started = start_callbacks(state.model, spec, code_folder=code_folder, strategy=state.accelerator.strategy)
    tested = _logged_metrics(spec, state, "test_step", unweighed) if callbacks_act_at_evaluations(spec) else Results()
    require_monitors(started.treatment.monitors, state.model, spec, trained=trained, tested=tested)
    require_learning_rate(started.callbacks, spec)
    for callback in started.callbacks:
        callback_state(callback)
    return started


def extremes_of(spec: RunSpec, dataset: DatasetRef, storage: Storage) -> Iterator[ExtremeExamples]:
    """Yield the extreme values of each dataset that a run reads without a transform."""
    data = spec.data
    if data.transform is data.batch_transform is None:
        mixture = load_manifest(storage, dataset).mixture
        for ref in [dataset] if mixture is None else map(ref_of_source, mixture.sources):
            yield ExtremeExamples.of(storage, ref)
    for name in data.own_sets if data.validation_transform is None else ():
        if dataset.own_set(name) is not None:  # the doctor has a sample of the training data only
            yield ExtremeExamples.of(storage, place_of_set(dataset, name)[0])


def require_extremes(state: TrainState, extremes: Iterable[ExtremeExamples], *, reference: str, size: int) -> None:
    """Refuse a model that cannot be trained on a value of its data.

    Args:
        state: of the model; its values stay as they are.
        extremes: see `extremes_of`.
        reference: the function's name in the run file, for messages.
        size: number of examples in a batch of one replica.

    Raises:
        ModelError: names the value, its example, and the outputs of the model.
    """
    model = state.model
    if overrides(model, "train_step"):
        return
    held = HeldValues(leaf for leaf in state.model_leaves if not (leaf.trainable or leaf.path.startswith("optimizer/")))
    with state.accelerator.strategy.scope():
        try:
            for each in extremes:
                tried = _Tried(model, each, size=size if has_fixed_batch_size(model) else 1)
                for value in each.values:
                    if found := tried.fault_of(value):
                        raise ModelError(_words(value, *found, reference, tried.outputs))
        finally:
            held.put_back()


class _Tried:
    """One model, with batches of zeros in which one feature has another value, and with examples that have it."""

    def __init__(self, model: keras.Model, extremes: ExtremeExamples, *, size: int) -> None:
        self._model = model
        self._extremes = extremes
        self._zeros = {feature.name: zeros((size, *feature.shape), feature.dtype) for feature in extremes.features}
        self.outputs = ""
        self._predicted: Any = None
        self._usable = not self._fault(self._zeros)

    def fault_of(self, value: ExtremeValue) -> tuple[str, str] | None:
        """How the model cannot be trained on a value, in words, and why; None if it can be, or who knows."""
        known = self._zeros.get(value.feature)
        if not self._usable or known is None or value.value == 0:
            return None
        fault = self._fault({**self._zeros, value.feature: np.full_like(known, value.value)})
        if not fault:
            return None
        for column, row in islice(self._extremes.rows(value), _MOST_TRIED):
            arrays = {name: np.repeat(array[None], len(known), axis=0) for name, array in row.items()}
            if not (of_row := self._fault(arrays)):
                continue
            arrays[value.feature] = arrays[value.feature].copy()
            arrays[value.feature][(slice(None), *column)] = 0
            is_it = not self._fault(arrays)
            place = f"{value.feature}[{', '.join(map(str, column))}]" if column else ""
            return ((f" as {place}" if place else "") if is_it else " with the rest of its example"), of_row
        return None

    def _fault(self, arrays: dict[str, Any]) -> str:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(unflatten(arrays))
        of_labels = self._predicted is not None and all(
            arrays[name] is array for name, array in self._zeros.items() if not name.startswith("y")
        )
        try:
            predicted = self._predicted if of_labels else self._model(x, training=False)
            loss = None if y is None else compute_loss(self._model, x, y, predicted, sample_weight)
        except DEVICE_LOST_ERRORS:
            raise
        except tf.errors.OpError as fault:
            return describe(fault)
        except (Exception, SystemExit):  # noqa: BLE001 - the loss needs something else, so nothing is known
            return "" if self._predicted is not None else "unknown"
        if self._predicted is None:
            self._predicted = predicted
            self.outputs = ", ".join(map(_shape_words, tree.flatten(predicted)))
        return "the loss is NaN" if loss is not None and bool(np.isnan(loss).any()) else ""


def _words(value: ExtremeValue, how: str, fault: str, reference: str, outputs: str) -> str:
    where = f"{value.where}: {value.feature} is {value.value}"
    if value.feature.startswith("y"):
        return message(
            f"{where}, and the loss of {reference}, whose output is {outputs}, cannot be computed with it{how}: "
            f"{fault}",
            hints=["correct the label, or give the model an output for it; classes are numbered from 0"],
        )
    return message(
        f"{where}, which {reference} cannot take{how}: {fault}",
        hints=["correct the value, or give the layer more rows, as Embedding(input_dim=...)"],
    )


def _shape_words(output: Any) -> str:
    return f"{keras.backend.standardize_dtype(output.dtype)}[{', '.join(['batch', *map(str, output.shape[1:])])}]"


def build_state_from_examples(
    spec: RunSpec,
    features: Sequence[Feature],
    batch: Sequence[Any],
    *,
    code_folder: Path,
    accelerator: Accelerator,
    reading: Reading = "examples",
    training: bool = False,
) -> TrainState:
    """Build the train state of a new run, as `build_train_state`, and refuse examples that can be read two ways.

    If an example's shapes may be those of a batch, or its list one array, a second model is built with this reading,
    and discarded. A model that declares its inputs decides; if both builds succeed, the examples are ambiguous, and are
    refused.

    Args:
        batch: one per-replica batch of zeros, with class weights.
        reading: how the examples were read, see `DatasetManifest.reading`; rows are not batches.
        training: see `build_train_state`.

    Raises:
        SourceError: the source yields batches, or may do so, or has text, which a TPU does not take.
        ModelError: the user's code or model cannot be used.
    """
    shapes = {feature.name: (feature.dtype, feature.shape) for feature in features}
    sources = spec.data.source_words
    require_placeable_text(features, accelerator, reference=sources)
    takes = partial(_takes, spec, code_folder=code_folder, accelerator=accelerator)
    others = [
        *([_as_batch(shapes, spec)] if spec.data.may_yield_batches and reading != "rows" else []),
        *([_as_one_array(shapes, spec, tree.flatten(batch)[0].shape[0])] if reading == "lists" else []),
    ]
    readings = [other for other in others if other is not None]
    try:
        state = build_train_state(
            spec, code_folder=code_folder, accelerator=accelerator, batch=batch, training=training
        )
    except ModelError as fault:
        other = next((each for each in readings if takes(each.batch, or_declares=False)), None)
        if other is None:
            raise
        details = [*other.both, *str(fault).splitlines()]
        raise SourceError(message(f"{sources}: {other.is_it}", details=details, hints=[other.remedy])) from fault
    other = next((each for each in readings if takes(each.batch, or_declares=True)), None)
    if other is not None:
        hints = [other.remedy, other.remedy_if_not]
        raise SourceError(message(f"{sources}: {other.may_be_it}", details=other.both, hints=hints))
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherReading:
    """Another reading of the examples.

    Attributes:
        batch: in this reading, without class weights.
        both: both readings in words.
        is_it: what is wrong if the model takes this reading alone.
        may_be_it: what is wrong if it takes both.
        remedy: what to do if this reading is meant.
        remedy_if_not: what to do if it is not.
    """

    batch: tuple[Any, ...]
    both: list[str]
    is_it: str
    may_be_it: str
    remedy: str
    remedy_if_not: str


def _as_batch(shapes: Shapes, spec: RunSpec) -> _OtherReading | None:
    """An example as a batch of examples; None if its shapes cannot be those of a batch."""
    length = shared_batch_size(shapes)
    if length is None:
        return None
    takes = f"{spec.model.build} takes {describe_shapes(shapes)} as"
    return _OtherReading(
        batch=unflatten({name: zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}),
        both=[
            f"as single examples: {describe_shapes(shapes)}",
            f"as batches of {length}: {describe_shapes(single_example_shapes(shapes))}",
        ],
        is_it=f"it yields batches: {takes} {length} examples, but not as one",
        may_be_it=f"it may yield batches: {takes} one example and as {length} examples",
        remedy="if they are batches, set data.batched: true, or yield from zip(x, y)",
        remedy_if_not="if they are single examples, set data.batched: false",
    )


def _as_one_array(shapes: Shapes, spec: RunSpec, size: int) -> _OtherReading | None:
    """The arrays of a list as one array; None if they are no list any more."""
    stacked: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in shapes.items():
        part = name.partition("[")[0]
        items = [each for other, each in shapes.items() if other.startswith(f"{part}[")]
        is_list = len(items) > 1 and len(set(items)) == 1
        stacked[part if is_list else name] = (dtype, (len(items), *shape)) if is_list else (dtype, shape)
    if len(stacked) == len(shapes):
        return None
    takes = f"a list of arrays: {spec.model.build} takes"
    return _OtherReading(
        batch=unflatten({name: zeros((size, *shape), dtype) for name, (dtype, shape) in stacked.items()}),
        both=[f"as several arrays: {describe_shapes(shapes)}", f"as one array: {describe_shapes(stacked)}"],
        is_it=f"it yields {takes} it as one array, but not as several",
        may_be_it=f"it yields {takes} it as one array and as several",
        remedy="for one array, stack it: np.stack([left, right])",
        remedy_if_not="for several inputs or outputs, yield a tuple: (left, right)",
    )


def require_placeable_text(features: Sequence[Feature], accelerator: Accelerator, *, reference: str) -> None:
    """Refuse text on a TPU, which computes with numbers only.

    Args:
        reference: `data.source`, for messages.

    Raises:
        SourceError: a feature is text, and the accelerator is a TPU.
    """
    texts = [feature for feature in features if feature.encoding == "text"]
    if texts and accelerator.environment.accelerator == "tpu":
        shapes = describe_shapes({feature.name: (feature.dtype, feature.shape) for feature in texts})
        raise SourceError(
            message(
                f"{reference}: the examples have {shapes}, but a TPU takes no text",
                hints=[
                    "look up the text in data.py and yield integers: keras.layers.StringLookup(vocabulary=words)(text)",
                    "or train with accelerator.kind: cpu or gpu",
                ],
            )
        )


def _takes(
    spec: RunSpec, unweighed: tuple[Any, ...], *, code_folder: Path, accelerator: Accelerator, or_declares: bool
) -> bool:
    """Whether a separate model can be built and traced with a batch.

    Args:
        unweighed: the batch, without class weights.
        or_declares: the model takes the first reading too; return False if it declares its inputs.
    """
    reference = spec.model.build
    with preserved_global_state():
        try:
            batch = apply_class_weight(unweighed, spec.train.class_weight)
            draws = StepDraws(spec.train.seed, accelerator)
            with exact_draws(draws):
                model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
                if or_declares and _declares_inputs(model):
                    return False
                frozen = create_variables(
                    model, batch, reference=reference, accelerator=accelerator, freeze_patterns=spec.init.freeze
                )
            if type(model).train_step is not keras.Model.train_step:
                leaves = leaves_of(model, frozen)
                require_train_step(model, batch, accumulate=1, leaves=leaves, reference=reference, draws=draws)
        except BatonError:
            return False
    return True


def _declares_inputs(model: keras.Model) -> bool:
    """Whether the model knows its inputs before it is called, as functional models do."""
    try:
        return bool(model.inputs)
    except (AttributeError, ValueError):
        return False
