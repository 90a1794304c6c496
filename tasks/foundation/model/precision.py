"""`train.precision`: the Keras dtype policy of a build. Variables stay float32."""

from collections.abc import Mapping
from typing import Any, Final

import keras

from tasks.foundation.contracts.train_spec import TrainSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import layers_of

_POLICIES: Final[Mapping[str, str]] = {"float32": "float32", "bfloat16": "mixed_bfloat16"}


def dtype_policy_for_build(train: TrainSpec, of_module: Any, *, reference: str) -> Any:
    """Return the policy to set before the user's function is called.

    Args:
        train: with `precision`; None keeps the module's policy.
        of_module: the policy right after the module's import.
        reference: the function's name in the run file, for messages.

    Raises:
        ModelError: the module sets another policy itself.
    """
    if train.precision is None:
        return of_module
    wanted = _POLICIES[train.precision]
    if of_module.name not in {wanted, keras.config.floatx()}:
        raise _two_policies(train, of_module.name, reference)
    return wanted


def require_precision(model: keras.Model, train: TrainSpec, *, reference: str) -> None:
    """Check that the model computes in the precision that `train.precision` sets.

    Args:
        model: as the user's function returned it.
        train: with `precision`; None checks nothing.
        reference: the function's name in the run file, for messages.

    Raises:
        ModelError: the function sets another policy, or no layer uses the policy.
    """
    if train.precision is None:
        return
    now = keras.config.dtype_policy().name
    if now != _POLICIES[train.precision]:
        raise _two_policies(train, now, reference)
    # Nested models and inputs compute nothing themselves.
    computing = {
        layer.compute_dtype
        for layer in layers_of(model)
        if not isinstance(layer, keras.Model | keras.layers.InputLayer)
    }
    if computing and train.precision not in computing:
        raise ModelError(
            f"train.precision = {train.precision}, but no layer of {reference} computes in it; the layers compute in "
            f"{', '.join(sorted(map(str, computing)))}, because each was created or loaded with its own dtype; remove "
            "train.precision, or create the layers without dtype"
        )


def _two_policies(train: TrainSpec, other: str, reference: str) -> ModelError:
    return ModelError(
        f"train.precision = {train.precision}, but {reference} sets the dtype policy {other} itself; remove one of them"
    )
