"""What makes a train step depend on how a global batch is shared out to replicas.

A step that is a mean over the examples is the same on any number of replicas, but for rounding. Statistics over the
examples of one replica, random masks and clipping before the gradients are summed are not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import keras

from tasks.foundation.model.keras_steps import has_own
from tasks.foundation.model.variables import layers_of

_SHOWN = 4
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
_MEAN_OF_WEIGHTS = "mean_with_sample_weight"
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """A part of a model whose result depends on the number of replicas."""

    part: str
    why: str


def batch_dependent_parts(model: keras.Model) -> tuple[Dependence, ...]:
    """What of a built and compiled model depends on the number of replicas, and why; empty if nothing does.

    Layers that keep a `keras.random.SeedGenerator` are taken to draw, unless all their rates are 0. What a layer
    of the user's own computes over the examples of its batch cannot be seen from here, nor whether a mask of Keras's
    reaches the loss; of a `train_step` of the user's own nothing can, so it is named.
    """
    return tuple(dict.fromkeys((*_layers(model), *_steps(model), *_losses(model), *_clipping(model))))


def dependence_words(parts: Sequence[Dependence]) -> str:
    """What follows for a run that goes on with another number of replicas."""
    if not parts:
        return (
            "the same examples form the same global batches, and no layer is known to depend on how they are shared "
            "out: losses go on as they would have, to float tolerance"
        )
    of_reason: dict[str, list[str]] = {}
    for each in parts:
        of_reason.setdefault(each.why, []).append(each.part)
    named = "; ".join(f"{_listed(names)} ({why})" for why, names in of_reason.items())
    return (
        "the same examples form the same global batches, but losses will differ by more than rounding, for these "
        f"depend on which examples share a replica, or on their number: {named}"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _layers(model: keras.Model) -> Iterator[Dependence]:
    for layer in layers_of(model):
        path = layer.path or layer.name
        if isinstance(layer, keras.layers.BatchNormalization):
            if layer.trainable and not layer.synchronized:
                why = "statistics of one replica's examples; synchronized=True has those of all"
                yield Dependence(part=path, why=why)
        elif _draws(layer):
            yield Dependence(part=path, why="random, each replica draws its own")


def _draws(layer: keras.Layer) -> bool:
    # Recurrent cells keep a generator whether or not they use it.
    rates = [rate for name in _RATES if isinstance(rate := getattr(layer, name, None), int | float)]
    keeps = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return keeps and (any(rates) or not rates)


def _steps(model: keras.Model) -> Iterator[Dependence]:
    if has_own(model, "train_step"):
        why = "the replicas' gradients are summed, so a loss that is not Keras's is to be divided by their number"
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
            yield Dependence(part=part, why="clips each replica's gradients before their sum")
