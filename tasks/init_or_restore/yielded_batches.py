"""Refuses a user's source that yields batches instead of examples, by building the model both ways."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

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

_BATCHES = "if they are batches, set data.batched: true, or yield from zip(x, y)"


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
    """Build the train state of a new run, as `build_train_state`, and refuse batches that are yielded as examples.

    If an example's shapes may be those of a batch, a second model is built with it as a batch, and discarded. A model
    that declares its inputs decides; if both builds succeed, the shapes are ambiguous, and are refused.

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
    ambiguous = spec.data.may_yield_batches and reading == "examples"
    length = shared_batch_size(shapes) if ambiguous else None
    try:
        state = build_train_state(
            spec, code_folder=code_folder, accelerator=accelerator, batch=batch, training=training
        )
    except ModelError as fault:
        if length is None or not _takes_batches(spec, shapes, code_folder, accelerator, or_declares=False):
            raise
        raise SourceError(
            message(
                f"{sources}: it yields batches: {spec.model.build} takes {describe_shapes(shapes)} as "
                f"{length} examples, but not as one",
                details=[*_readings(shapes, length), *str(fault).splitlines()],
                hints=[_BATCHES],
            )
        ) from fault
    if length is not None and _takes_batches(spec, shapes, code_folder, accelerator, or_declares=True):
        raise SourceError(
            message(
                f"{sources}: it may yield batches: {spec.model.build} takes {describe_shapes(shapes)} as one "
                f"example and as {length} examples",
                details=_readings(shapes, length),
                hints=[_BATCHES, "if they are single examples, set data.batched: false"],
            )
        )
    return state


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


def _readings(shapes: Shapes, length: int) -> list[str]:
    return [
        f"as single examples: {describe_shapes(shapes)}",
        f"as batches of {length}: {describe_shapes(single_example_shapes(shapes))}",
    ]


def _takes_batches(
    spec: RunSpec, shapes: Shapes, code_folder: Path, accelerator: Accelerator, *, or_declares: bool
) -> bool:
    """Whether a separate model can be built and traced with an example as a batch.

    Args:
        spec: the run file.
        shapes: shapes of an example.
        code_folder: the run file's folder.
        accelerator: the accelerator of the process.
        or_declares: the model takes single examples too; return False if it declares its inputs.
    """
    batched = unflatten({name: zeros(shape, dtype) for name, (dtype, shape) in shapes.items()})
    reference = spec.model.build
    with preserved_global_state():
        try:
            batch = apply_class_weight(batched, spec.train.class_weight)
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
