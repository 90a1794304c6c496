"""Train and test steps as Keras calls them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

_X_ALONE = "where there is only x, a step of your own gets x itself and no tuple, as in Keras's fit"
SEED_REMEDY = "give keras.random functions a keras.random.SeedGenerator that a layer holds"


def has_own(model: keras.Model, name: str) -> bool:
    """Whether a method of Keras's models, such as train_step, is the user's own."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def as_fit_gives(step: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """A `train_step` or `test_step`, called as Keras's `fit` and `evaluate` do.

    Args:
        step: of the model.

    Returns:
        A function of (x,), (x, y) or (x, y, sample_weight) that hands on x itself where x is all there is.
    """

    def work(batch: Sequence[Any]) -> dict[str, Any]:
        return step(batch[0] if len(batch) == 1 else tuple(batch))

    return work


def hints_about(model: keras.Model, batch: Sequence[Any], fault: BaseException) -> list[str]:
    """What may help where a step on such a batch cannot be traced."""
    own = has_own(model, "train_step") or has_own(model, "test_step")
    hints = [_X_ALONE] if own and len(batch) == 1 else []
    # Keras's global seed generator, made by each replica's own thread, is beyond TensorFlow.
    return [*([SEED_REMEDY] if "seed_generator" in str(fault) else []), *hints]
