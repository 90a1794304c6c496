"""Examples that may be batches: built both ways, what does the model say?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.batch_or_example import Shapes, common_length, shape_words, without_length
from tasks.foundation.dataset.class_weight import weighed
from tasks.foundation.dataset.features import unflatten
from tasks.foundation.errors import BatonError, ModelError, SourceError
from tasks.foundation.messages import message
from tasks.foundation.model.build import build_model, make_variables
from tasks.foundation.model.isolated_build import undisturbed
from tasks.foundation.model.train_step import require_train_step
from tasks.foundation.model.variables import leaves_of
from tasks.foundation.state.train_state import TrainState, build_train_state

_YIELD = "yield single examples: where a batch is at hand, yield from zip(x, y)"


def state_of_examples(
    spec: RunSpec,
    features: Sequence[Feature],
    batch: Sequence[Any],
    *,
    code_folder: Path,
    accelerator: Accelerator,
    training: bool = False,
) -> TrainState:
    """As `build_train_state`, for a run that begins: batches that a function yields are not taken for examples.

    Where each "example" may be a batch by its shapes, a second model is built with it as one, and thrown away. An
    input that the model declares decides; where both can be built, nothing tells which is meant, and it is refused.

    Args:
        spec: the run file.
        features: what the examples hold.
        batch: one per-replica batch of zeros, weighed as training's are.
        code_folder: the run file's folder.
        accelerator: the process's.
        training: see `build_train_state`.

    Raises:
        SourceError: the source yields batches, or may do so.
        ModelError: the user's code or model cannot be used.
    """
    shapes = {feature.name: (feature.dtype, feature.shape) for feature in features}
    asked = ":" in spec.data.source and spec.data.batched is None
    length = common_length(shapes) if asked else None
    try:
        state = build_train_state(
            spec, code_folder=code_folder, accelerator=accelerator, batch=batch, training=training
        )
    except ModelError as fault:
        if length is None or not _takes_batches(spec, shapes, code_folder, accelerator, or_declares=False):
            raise
        raise SourceError(
            message(
                f"{spec.data.source}: it yields batches: {spec.model.build} takes {shape_words(shapes)} as {length} "
                "examples, and not as one",
                details=[*_readings(shapes, length), *str(fault).splitlines()],
                hints=[_YIELD],
            )
        ) from fault
    if length is not None and _takes_batches(spec, shapes, code_folder, accelerator, or_declares=True):
        raise SourceError(
            message(
                f"{spec.data.source}: it may yield batches: {spec.model.build} takes {shape_words(shapes)} as one "
                f"example and as {length} examples",
                details=_readings(shapes, length),
                hints=[_YIELD, "or say data.batched: false, if they are single examples"],
            )
        )
    return state


def _readings(shapes: Shapes, length: int) -> list[str]:
    return [
        f"as single examples: {shape_words(shapes)}",
        f"as batches of {length}: {shape_words(without_length(shapes))}",
    ]


def _takes_batches(
    spec: RunSpec, shapes: Shapes, code_folder: Path, accelerator: Accelerator, *, or_declares: bool
) -> bool:
    """Whether a model of its own can be built and traced with an example as a batch.

    Args:
        spec: the run file.
        shapes: of an example.
        code_folder: the run file's folder.
        accelerator: the process's.
        or_declares: the model takes single examples too; so no, if it declares its inputs.
    """
    zeros = unflatten({name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()})
    reference = spec.model.build
    with undisturbed():
        try:
            batch = weighed(zeros, spec.train.class_weight)
            model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
            if or_declares and _declares_inputs(model):
                return False
            frozen = make_variables(
                model, batch, reference=reference, accelerator=accelerator, freezing=spec.init.freeze
            )
            if type(model).train_step is not keras.Model.train_step:
                leaves = leaves_of(model, frozen)
                require_train_step(
                    model, batch, accumulate=1, leaves=leaves, reference=reference, accelerator=accelerator
                )
        except BatonError:
            return False
    return True


def _declares_inputs(model: keras.Model) -> bool:
    """Whether it knows its inputs before it has seen a batch, as functional models do."""
    try:
        return bool(model.inputs)
    except (AttributeError, ValueError):
        return False
