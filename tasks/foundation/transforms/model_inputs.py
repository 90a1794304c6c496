"""What a model sees of the prepared examples: the transforms of the run file, and the features after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message

if TYPE_CHECKING:
    from tasks.foundation.dataset.transformed_batches import SeededFunction, TrainingFunctions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What the model trains and is evaluated on.

    Attributes:
        train: features of the training batches.
        validation: features of the validation examples.
        training_functions: transforms of the training data; None if there are none.
        validation_function: transform of the validation examples; None if there is none.
    """

    train: tuple[Feature, ...]
    validation: tuple[Feature, ...]
    training_functions: "TrainingFunctions | None" = None
    validation_function: "SeededFunction | None" = None


def model_inputs(spec: RunSpec, features: Sequence[Feature], code_folder: Path) -> ModelInputs:
    """Load and trace the transforms of the run file.

    Args:
        spec: the run file.
        features: of the prepared examples.
        code_folder: the run file's folder.

    Raises:
        ModelError: a transform cannot be used, or training and validation examples have different inputs.
    """
    data, seed = spec.data, spec.train.seed
    prepared = tuple(features)
    if data.transform is data.batch_transform is data.validation_transform is None:
        return ModelInputs(train=prepared, validation=prepared)
    from tasks.foundation.dataset.transformed_batches import TrainingFunctions
    from tasks.foundation.model.isolated_build import preserved_global_state
    from tasks.foundation.transforms.user_transform import load_transform

    example = load_transform("data.transform", data.transform, code_folder, seed=seed)
    batch = load_transform("data.batch_transform", data.batch_transform, code_folder, seed=seed)
    of_validation = load_transform("data.validation_transform", data.validation_transform, code_folder, seed=seed)
    with preserved_global_state():  # tracing gives names to layers that are not built yet
        train = prepared if example is None else example.features(prepared)
        if batch is not None:
            train = batch.features(train, batch=spec.train.global_batch_size)
        validation = prepared if of_validation is None else of_validation.features(prepared)
    if data.has_validation:
        _require_same_inputs(train, validation)
    functions = TrainingFunctions(example=example, batch=batch) if example or batch else None
    return ModelInputs(
        train=train, validation=validation, training_functions=functions, validation_function=of_validation
    )


def _require_same_inputs(train: Sequence[Feature], validation: Sequence[Feature]) -> None:
    """A model would accept bytes where it was trained on floats, and be evaluated on something else."""
    seen, evaluated = _inputs(train), _inputs(validation)
    if seen != evaluated:
        raise ModelError(
            message(
                "validation examples have other inputs than training examples after their transforms",
                details=[f"training: {seen}", f"validation: {evaluated}"],
                hints=["set data.validation_transform to a function that returns x with the training shape and dtype"],
            )
        )


def _inputs(features: Sequence[Feature]) -> str:
    inputs = [each for each in features if each.name == "x" or each.name.startswith(("x/", "x["))]
    return ", ".join(f"{each.name} {each.dtype}{list(each.shape)}" for each in inputs)
