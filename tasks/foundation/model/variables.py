"""Every variable that a model, its layers, optimizer and metrics reach, each under one stable path.

The object graph of `tf.train.Checkpoint` is not enough: its keys are positions, and it misses the seed generator
inside Keras 3's `MultiHeadAttention`. Keras's own lists are not enough either: they leave out raw `tf.Variable`s and
`tf.random.Generator`s that a layer keeps. So both are read, and `uncovered` asks the traced step for what is left.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.errors import ModelError

# TensorFlow's own mark in the names of a checkpoint.
_RESERVED = ".ATTRIBUTES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One variable of the train state.

    Attributes:
        path: its place in the state's tree.
        variable: the underlying `tf.Variable`; under a strategy one component a replica.
        per_replica: replicas may hold different values (moving statistics, sums of metrics), so each is saved.
        seed: the state of a `keras.random.SeedGenerator`; replica 0's is saved and the others are derived from it.
        trainable: changed by the optimizer.
    """

    path: str
    variable: Any
    per_replica: bool
    seed: bool = False
    trainable: bool = False

    @property
    def components(self) -> tuple[Any, ...]:
        """The variable on each replica."""
        return components(self.variable)


def components(variable: Any) -> tuple[Any, ...]:
    """A distributed variable's copies, one a replica; the variable itself where there is no distribution."""
    return tuple(variable.values) if hasattr(variable, "values") else (variable,)


def leaves_of(model: keras.Model, frozen: frozenset[int] = frozenset()) -> tuple[Leaf, ...]:
    """All variables of a built and compiled model.

    Args:
        model: with all its variables.
        frozen: ids of `tf.Variable`s that nothing changes any more: one value for all replicas, saved once.

    Raises:
        ModelError: an optimizer has not been built, so that its state would be missed; or no checkpoint can hold a
            variable.
    """
    found = _Found()
    walked = list(_walk(model))
    seeds = {id(_value(item.state)) for _, item in walked if isinstance(item, keras.random.SeedGenerator)}
    for variable in model.variables:
        seed = id(_value(variable)) in seeds
        per_replica = not (variable.trainable or seed or id(_value(variable)) in frozen)
        path = f"model/{variable.path}"
        found.add(path, _value(variable), per_replica=per_replica, seed=seed, trainable=variable.trainable)
    if model.optimizer is not None:
        found.add_optimizer("optimizer", model.optimizer)
    for index, metric in enumerate(model.metrics):
        for number, variable in enumerate(metric.variables):
            found.add(f"metrics/{index}/{number}/{variable.path}", _value(variable), per_replica=True)
    for place, item in walked:
        found.add_item(place, item, compiled_with=model.optimizer)
    _refuse_what_no_checkpoint_holds(found.leaves)
    return tuple(found.leaves)


def _refuse_what_no_checkpoint_holds(leaves: Iterable[Leaf]) -> None:
    for leaf in leaves:
        dtype, shape = leaf.components[0].dtype, leaf.components[0].shape
        if _RESERVED in leaf.path:
            what, remedy = f"its name holds {_RESERVED}, which TensorFlow keeps for itself", "rename its layer"
        elif not (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex or dtype.is_quantized):
            what, remedy = f"its dtype is {dtype.name}", "keep numbers in variables, and texts in the layer's config"
        elif shape.num_elements() == 0:
            what, remedy = f"its shape {shape.as_list()} has no values", "leave it out, or give it a size"
        else:
            continue
        raise ModelError(f"variable {leaf.path} cannot be kept in a checkpoint: {what}; {remedy}")


def other_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Optimizers besides the one that the model is compiled with, by the path of attributes that leads to each."""
    return {
        place: item
        for place, item in _walk(model)
        if isinstance(item, keras.optimizers.Optimizer) and item is not model.optimizer
    }


def layers_of(model: keras.Model) -> Iterator[keras.Layer]:
    """Every layer that a model reaches, itself included and however nested, each once."""
    return (item for _, item in _walk(model) if isinstance(item, keras.Layer))


def uncovered(function: Any, leaves: Iterable[Leaf]) -> tuple[str, ...]:
    """Names of variables that a traced function uses and no leaf holds.

    Args:
        function: the concrete function of the training loop.
        leaves: what will be saved.
    """
    known = {id(component.handle) for leaf in leaves for component in leaf.components}
    return tuple(
        variable.name
        for variable in function.graph.variables
        if not all(id(part.handle) in known for part in _parts(variable))
    )


class _Found:
    """Collects leaves; one variable once, one path once."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._variables: set[int] = set()
        self._paths: set[str] = set()

    def add(self, path: str, variable: Any, *, per_replica: bool, seed: bool = False, trainable: bool = False) -> None:
        if id(variable) in self._variables:
            return
        self._variables.add(id(variable))
        # Keras's paths repeat where layers share a name; the order of construction tells them apart.
        unique, number = path, 1
        while unique in self._paths:
            number += 1
            unique = f"{path}~{number}"
        self._paths.add(unique)
        self.leaves.append(
            Leaf(path=unique, variable=variable, per_replica=per_replica, seed=seed, trainable=trainable)
        )

    def add_item(self, place: str, item: Any, *, compiled_with: Any) -> None:
        """What Keras's own lists leave out; what they hold is here already."""
        if isinstance(item, keras.optimizers.Optimizer) and item is not compiled_with:
            self.add_optimizer(f"optimizers/{place}", item)
        elif isinstance(item, keras.metrics.Metric):
            for number, variable in enumerate(item.variables):
                self.add(f"metrics/{place}/{number}", _value(variable), per_replica=True)
        elif isinstance(item, keras.random.SeedGenerator):
            self.add(f"seeds/{place}", _value(item.state), per_replica=False, seed=True)
        elif isinstance(item, tf.random.Generator):
            self.add(f"generators/{place}", item.state, per_replica=True)
        elif isinstance(item, tf.Variable | keras.Variable):
            self.add(f"variables/{place}", _value(item), per_replica=True)

    def add_optimizer(self, place: str, optimizer: Any) -> None:
        if not optimizer.built:
            # Names repeat; the attributes that lead to it do not.
            attribute = ".".join(["model", *place.split("/")[2:]])
            raise ModelError(
                f"optimizer {optimizer.name} of the model has not been built ({attribute}), so its state cannot be "
                "saved; call optimizer.build(variables) in the function that builds the model"
            )
        # Index and path: Nadam's and Adafactor's own paths repeat.
        for index, variable in enumerate(optimizer.variables):
            self.add(f"{place}/{index}/{variable.path}", _value(variable), per_replica=False)


def _parts(variable: Any) -> tuple[Any, ...]:
    """What has a handle of its own: TPUStrategy packs the copies of all replicas into one variable of a graph's."""
    packed = getattr(variable, "_distributed_variables", None)
    return components(variable) if packed is None else tuple(packed)


def _value(variable: Any) -> Any:
    """The `tf.Variable` behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


_INTERESTING = (
    keras.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
    keras.random.SeedGenerator,
    keras.Variable,
    tf.Variable,
    tf.random.Generator,
    tf.Module,
)


def _walk(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Objects that may hold state, with the path of attributes that leads to each; each object once."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(model.name, model)]
    while waiting:
        place, item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            waiting.extend((f"{place}/{key}", value) for key, value in item.items())
        elif isinstance(item, list | tuple):  # a set has another order in every process
            waiting.extend((f"{place}/{index}", value) for index, value in enumerate(item))
        elif isinstance(item, _INTERESTING):
            yield place, item
            if isinstance(item, keras.Layer | tf.Module) and not isinstance(item, tf.Variable | tf.random.Generator):
                waiting.extend((f"{place}/{name}", value) for name, value in vars(item).items())
