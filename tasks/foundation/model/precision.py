"""`train.precision`: Keras's dtype policy for a build. Variables stay float32 in either."""

from collections.abc import Mapping
from typing import Any, Final

import keras

from tasks.foundation.contracts.run_spec import TrainSpec
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import layers_of

_POLICIES: Final[Mapping[str, str]] = {"float32": "float32", "bfloat16": "mixed_bfloat16"}


def policy_to_build_with(train: TrainSpec, of_module: Any, *, reference: str) -> Any:
    """The policy that is set before the user's function is called.

    Args:
        train: its `precision`; left out, the module's policy holds.
        of_module: the policy right after the module was imported.
        reference: what the user calls the model, for messages.

    Raises:
        ModelError: the module has set another one itself: one of the two would be passed over in silence.
    """
    if train.precision is None:
        return of_module
    wanted = _POLICIES[train.precision]
    if of_module.name not in {wanted, keras.config.floatx()}:
        raise _two_policies(train, of_module.name, reference)
    return wanted


def require_precision(model: keras.Model, train: TrainSpec, *, reference: str) -> None:
    """See that what was built is what `train.precision` asks for.

    Args:
        model: just built by the user's function.
        train: see `policy_to_build_with`.
        reference: what the user calls the model, for messages.

    Raises:
        ModelError: the function has set a policy of its own, or no layer took the one that was set.
    """
    if train.precision is None:
        return
    now = keras.config.dtype_policy().name
    if now != _POLICIES[train.precision]:
        raise _two_policies(train, now, reference)
    # Models within the model and inputs compute nothing themselves.
    computing = {
        layer.compute_dtype
        for layer in layers_of(model)
        if not isinstance(layer, keras.Model | keras.layers.InputLayer)
    }
    if computing and train.precision not in computing:
        raise ModelError(
            f"train.precision = {train.precision}, and no layer of {reference} computes in it, but in "
            f"{', '.join(sorted(map(str, computing)))}: each was given a dtype of its own, or was loaded with one; "
            "leave train.precision out, or build the layers without dtype"
        )


def _two_policies(train: TrainSpec, other: str, reference: str) -> ModelError:
    return ModelError(
        f"train.precision = {train.precision}, and {reference} sets the dtype policy {other} itself; keep one of them"
    )
