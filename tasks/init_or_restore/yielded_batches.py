"""Refuses a user's source whose examples can be read two ways, by building the model both ways.

What is yielded may be a batch instead of an example, and a list of arrays may be one array instead of several inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
from keras import tree

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.dataset import Feature, Reading
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.class_weight import apply_class_weight
from tasks.foundation.dataset.example_shapes import Shapes, describe_shapes, shared_batch_size, single_example_shapes
from tasks.foundation.dataset.features import unflatten, zeros
from tasks.foundation.errors import BatonError, ModelError, SourceError
from tasks.foundation.messages import message
from tasks.foundation.model.build import build_model, create_variables
from tasks.foundation.model.isolated_build import preserved_global_state
from tasks.foundation.model.step_draws import StepDraws
from tasks.foundation.model.traced_draws import exact_draws
from tasks.foundation.model.train_step import require_train_step
from tasks.foundation.model.variables import leaves_of
from tasks.foundation.state.train_state import TrainState, build_train_state


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
        spec: the run file.
        features: the features of the examples.
        batch: one per-replica batch of zeros, with class weights.
        code_folder: the run file's folder.
        accelerator: the accelerator of the process.
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
class _Reading:
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


def _as_batch(shapes: Shapes, spec: RunSpec) -> _Reading | None:
    """An example as a batch of examples; None if its shapes cannot be those of a batch."""
    length = shared_batch_size(shapes)
    if length is None:
        return None
    takes = f"{spec.model.build} takes {describe_shapes(shapes)} as"
    return _Reading(
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


def _as_one_array(shapes: Shapes, spec: RunSpec, size: int) -> _Reading | None:
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
    return _Reading(
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
        features: of the examples.
        accelerator: the accelerator of the process.
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
        spec: the run file.
        unweighed: the batch, without class weights.
        code_folder: the run file's folder.
        accelerator: the accelerator of the process.
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
                require_train_step(
                    model,
                    batch,
                    accumulate=1,
                    leaves=leaves,
                    reference=reference,
                    accelerator=accelerator,
                    draws=draws,
                )
        except BatonError:
            return False
    return True


def _declares_inputs(model: keras.Model) -> bool:
    """Whether the model knows its inputs before it is called, as functional models do."""
    try:
        return bool(model.inputs)
    except (AttributeError, ValueError):
        return False
