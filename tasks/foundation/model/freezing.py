"""`init.freeze`: excludes layers and variables from training."""

from collections.abc import Sequence
from difflib import get_close_matches

import keras

from tasks.foundation.errors import ModelError
from tasks.foundation.model.layers import named_layers
from tasks.foundation.model.patterns import matches_path


def freeze(model: keras.Model, patterns: Sequence[str], *, reference: str) -> frozenset[int]:
    """Set layers and variables to not trainable. Call when they exist, and before the optimizer is built.

    A frozen layer runs as in Keras: BatchNormalization uses its moving statistics, which do not change. A variable
    that is frozen alone is not trained, and its layer runs as before.

    Args:
        model: built; compiled or not.
        patterns: match paths of layers (encoder/block_1, encoder/*) or of variables (*/bias).
        reference: the function's name in the run file, for messages.

    Returns:
        The ids of the underlying `tf.Variable`s that were trainable before.

    Raises:
        ModelError: a pattern matches nothing, or no trainable variable is left.
    """
    if not patterns:
        return frozenset()
    before = list(model.trainable_variables)
    layers = [(name, layer) for name, layer in named_layers(model) if name]
    variables = [(variable.path, variable) for variable in model.variables]
    for pattern in patterns:
        found = [layer for name, layer in layers if matches_path((pattern,), name)]
        for layer in found:
            layer.trainable = False
        own = [variable for path, variable in variables if matches_path((pattern,), path)]
        for variable in own:
            variable.trainable = False
        if not found and not own:
            names = list(dict.fromkeys([*(name for name, _ in layers), *(path for path, _ in variables)]))
            near = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ModelError(
                f"init.freeze: {pattern} matches no layer or variable of {reference}; similar names: {', '.join(near)}"
            )
    left = {id(variable) for variable in model.trainable_variables}
    if not left:
        raise ModelError(
            f"init.freeze: {', '.join(patterns)} leaves no trainable variable in {reference}; freeze less, or use "
            "baton export if the weights need no training"
        )
    return frozenset(id(variable.value) for variable in before if id(variable) not in left)
