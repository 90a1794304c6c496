"""Builds the user's model with all its variables, in the way that the model needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.model.build import build_model, create_variables
from tasks.foundation.model.first_use import all_layers_are_built
from tasks.foundation.model.keras_steps import overrides


def build_with_variables(
    spec: RunSpec, batch: Sequence[Any], *, code_folder: Path, accelerator: Accelerator
) -> tuple[keras.Model, frozenset[int]]:
    """Build the model, and create all its variables.

    Layers that are not built create them in `call` with a batch. If that fails, and the model has its own train_step,
    another model is built, whose layers create them where train_step calls them, as in Keras's fit: `call` of an
    adversarial model may take noise, and its layers would get the shapes of the batch.

    Args:
        spec: names the function and the seed.
        batch: see `create_variables`.
        code_folder: the run file's folder.
        accelerator: the process's.

    Returns:
        The model, and the ids of its frozen variables.

    Raises:
        ModelError: see `build_model` and `create_variables`.
    """

    def built(*, train_step_first: bool) -> tuple[keras.Model, frozenset[int]]:
        frozen = create_variables(
            model,
            batch,
            reference=spec.model.build,
            accelerator=accelerator,
            freeze_patterns=spec.init.freeze,
            train_step_first=train_step_first,
        )
        return model, frozen

    model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
    can_be_built_by_train_step = overrides(model, "train_step") and not all_layers_are_built(model)
    try:
        return built(train_step_first=False)
    except ModelError as fault:
        if not can_be_built_by_train_step:
            raise
        model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
        try:
            return built(train_step_first=True)
        except ModelError:
            raise fault from fault.__cause__
