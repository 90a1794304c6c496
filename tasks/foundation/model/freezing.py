"""`init.freeze`: layers and variables that are not trained."""

from collections.abc import Sequence
from difflib import get_close_matches

import keras

from tasks.foundation.errors import ModelError
from tasks.foundation.model.layers import named_layers
from tasks.foundation.model.patterns import selects


def freeze(model: keras.Model, patterns: Sequence[str], *, reference: str) -> frozenset[int]:
    """Take layers and variables out of training. Call when they exist, before the optimizer is built.

    A layer that is frozen runs as Keras has it: BatchNormalization with its moving statistics, which stay as they are.
    A variable that is selected alone is not trained, and its layer runs as before.

    Args:
        model: built; compiled before or after.
        patterns: of paths of layers (encoder/block_1, encoder/*) or of variables (*/bias).
        reference: what the user calls the model, for messages.

    Returns:
        The ids of the underlying `tf.Variable`s that were trained before and are not any more.

    Raises:
        ModelError: a pattern matches nothing, or nothing is left to be trained.
    """
    if not patterns:
        return frozenset()
    before = list(model.trainable_variables)
    layers = [(name, layer) for name, layer in named_layers(model) if name]
    variables = [(variable.path, variable) for variable in model.variables]
    for pattern in patterns:
        found = [layer for name, layer in layers if selects((pattern,), name)]
        for layer in found:
            layer.trainable = False
        own = [variable for path, variable in variables if selects((pattern,), path)]
        for variable in own:
            variable.trainable = False
        if not found and not own:
            names = list(dict.fromkeys([*(name for name, _ in layers), *(path for path, _ in variables)]))
            near = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ModelError(
                f"init.freeze: {pattern} matches no layer and no variable of {reference}; near it: {', '.join(near)}"
            )
    left = {id(variable) for variable in model.trainable_variables}
    if not left:
        raise ModelError(
            f"init.freeze: {', '.join(patterns)} leaves nothing of {reference} to be trained; freeze less, or use "
            "baton export if the weights are good as they are"
        )
    return frozenset(id(variable.value) for variable in before if id(variable) not in left)
