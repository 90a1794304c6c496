"""Finds what in a model depends on how a global batch is split over replicas, or on one batch size.

A step that is a mean over the examples gives the same result on any number of replicas, except for rounding.
Statistics over one replica's examples, random masks, and clipping before the gradients are summed do not. A fixed batch
size prevents the evaluation of the last, smaller batch of a set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree

from tasks.foundation.contracts.data_spec import SetName
from tasks.foundation.errors import ModelError
from tasks.foundation.machine.devices import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.model.build import trace_test_step
from tasks.foundation.model.keras_steps import overrides
from tasks.foundation.model.randomness import StepDraws
from tasks.foundation.model.variables import layers_of
from tasks.foundation.user_errors import user_error

_HINTS = (
    "do not fix the model's batch size: use keras.Input without batch_size and batch_shape",
    "or choose train.global_batch_size and data.validation_fraction so that no smaller batch is left",
)
_HINT_OF_TEST = "or choose train.global_batch_size and the number of test examples so that no smaller batch is left"


def require_remainder(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    examples: int,
    reference: str,
    accelerator: Accelerator,
    on: SetName = "validation",
    draws: StepDraws | None = None,
) -> None:
    """Check that a model can be evaluated on a smaller batch, before training starts.

    Args:
        model: with all its variables.
        batch: the last batch, of NumPy arrays.
        examples: number of examples of the set, for the message.
        reference: the function's name in the run file, for messages.
        accelerator: the step is traced for its replicas.
        on: the set, for the message.
        draws: seeds of the step's random operations.

    Raises:
        ModelError: `test_step` cannot be traced with the batch.
    """
    left = len(tree.flatten(tuple(batch))[0])
    try:
        trace_test_step(model, batch, accelerator, draws)
    except DEVICE_LOST_ERRORS:
        raise
    except (Exception, SystemExit) as fault:
        what = (
            f"{reference}: it cannot be evaluated: the {examples} {on} examples end with a batch of {left}, "
            "which test_step does not take:"
        )
        hints = _HINTS if on == "validation" else (_HINTS[0], _HINT_OF_TEST)
        raise ModelError(user_error(what, fault, hints=hints)) from fault


_SHOWN = 4
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
_MEAN_OF_WEIGHTS = "mean_with_sample_weight"
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """A part of a model whose result depends on the number of replicas.

    Attributes:
        part: the layer, loss or setting, for messages.
        why: the reason.
    """

    part: str
    why: str


def batch_dependent_parts(model: keras.Model) -> tuple[Dependence, ...]:
    """Return the parts of a built and compiled model that depend on the number of replicas.

    A layer with a `keras.random.SeedGenerator` counts as random unless all its rates are 0. What a custom layer
    computes over the examples of its batch is not detected, nor whether a Keras mask reaches the loss. A custom
    `train_step` cannot be inspected, so it is listed.
    """
    return tuple(dict.fromkeys((*_layers(model), *_steps(model), *_losses(model), *_clipping(model))))


def describe_dependence(parts: Sequence[Dependence]) -> str:
    """Describe what a run with another number of replicas computes differently."""
    if not parts:
        return (
            "the same examples form the same global batches, and no layer is known to depend on how they are split: "
            "losses continue as before, to float tolerance"
        )
    of_reason: dict[str, list[str]] = {}
    for each in parts:
        of_reason.setdefault(each.why, []).append(each.part)
    named = "; ".join(f"{_abridged(names)} ({why})" for why, names in of_reason.items())
    return (
        "the same examples form the same global batches, but losses differ by more than rounding, because these "
        f"depend on which examples share a replica, or on the number of replicas: {named}"
    )


def _abridged(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _layers(model: keras.Model) -> Iterator[Dependence]:
    for layer in layers_of(model):
        path = layer.path or layer.name
        if isinstance(layer, keras.layers.BatchNormalization):
            if layer.trainable and not layer.synchronized:
                why = "statistics of one replica's examples; synchronized=True uses those of all replicas"
                yield Dependence(part=path, why=why)
        elif _is_random(layer):
            yield Dependence(part=path, why="random, each replica draws its own values")


def _is_random(layer: keras.Layer) -> bool:
    # Recurrent cells hold a generator even if their dropout is 0.
    rates = [rate for name in _RATES if isinstance(rate := getattr(layer, name, None), int | float)]
    keeps = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return keeps and (any(rates) or not rates)


def _steps(model: keras.Model) -> Iterator[Dependence]:
    if overrides(model, "train_step"):
        why = "the replicas' gradients are summed, so a loss that Keras does not scale must be divided by their number"
        yield Dependence(part=f"train_step of {type(model).__name__}", why=why)


def _losses(model: keras.Model) -> Iterator[Dependence]:
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", None) == _MEAN_OF_WEIGHTS:
            yield Dependence(part=f"loss {loss.name}", why="a mean over the weights of one replica's examples")


def _clipping(model: keras.Model) -> Iterator[Dependence]:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    for name in _CLIPPING:
        if value := getattr(optimizer, name, None):
            part = f"{name} = {value} of optimizer {optimizer.name}"
            yield Dependence(part=part, why="clips each replica's gradients before they are summed")
