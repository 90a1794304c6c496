"""What reads an optimizer knows all of Keras's: each alone, with averages, with accumulated gradients, and wrapped."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from baton.tasks.evaluate.evaluator import keeps_averages, use_averages
from baton.tasks.foundation.model.metrics import learning_rate_of, unsettable_rate
from baton.tasks.foundation.model.variables import leaves_of, optimizer_records

WRAPPERS = {"LossScaleOptimizer", "MultiOptimizer"}
KINDS = [
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer) and name not in {"Optimizer", *WRAPPERS}
]
Wrap = Callable[[Any], Any]


def loss_scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)


def multi(optimizer: Any) -> Any:
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5), {".*kernel": optimizer})
    )


WRAPS: dict[str, Wrap] = {
    "alone": lambda optimizer: optimizer,
    "LossScaleOptimizer": loss_scaled,
    "MultiOptimizer": multi,
    "both": lambda optimizer: loss_scaled(multi(optimizer)),
}


def stepped(model: keras.Model, steps: int) -> None:
    """Apply ones as gradients, without a graph."""
    for _ in range(steps):
        grads = [keras.ops.ones(each.shape) for each in model.trainable_variables]
        model.optimizer.apply(grads, model.trainable_variables)


# Each with averages and accumulated gradients, wrapped twice; one of them with all settings. The others at night.
CASES = [
    pytest.param(
        *case, marks=[] if case[0] == "Adam" or case[1:] == ("both", True, 4) else pytest.mark.nightly, id=str(case)
    )
    for case in itertools.product(KINDS, WRAPS, (False, True), (None, 4))
]


@pytest.mark.parametrize(("kind", "wrap", "ema", "accumulates"), CASES)
def test_every_optimizer_is_read(kind: str, wrap: str, ema: bool, accumulates: int | None) -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.125])
    inner = getattr(keras.optimizers, kind)(
        learning_rate=schedule, use_ema=ema, ema_momentum=0.5, gradient_accumulation_steps=accumulates
    )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(WRAPS[wrap](inner), "mse")
    model.optimizer.build(model.trainable_variables)
    of_several = wrap in {"MultiOptimizer", "both"}
    assert keeps_averages(model) == ema
    initial = model.get_weights()
    use_averages(model)  # before the first step there are none
    for value, before in zip(model.get_weights(), initial, strict=True):
        assert np.array_equal(value, before)
    stepped(model, 5)
    # A schedule is called with the number of batches; the rate in a row is the next step's.
    assert learning_rate_of(model) == (None if of_several else 0.125)
    assert ("MultiOptimizer" in unsettable_rate(model)) == of_several
    records = optimizer_records(model)
    assert records[f"optimizer/{inner.name}"].accumulates == (accumulates or 1)
    assert leaves_of(model)
    averages = {
        (each.path.split("/")[-1].removesuffix("_average").rsplit("_", 1)[-1]): each.numpy()
        for each in model.optimizer.variables
        if each.path.endswith("_average")
    }
    use_averages(model)
    for variable, last in zip(model.trainable_variables, model.get_weights(), strict=True):
        assert np.array_equal(averages.get(variable.name, last), variable.numpy())
    assert bool(averages) == ema
