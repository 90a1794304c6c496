"""Finds every variable of a model, its layers, optimizer and metrics, and gives each a stable path.

The object graph of `tf.train.Checkpoint` is not enough: its keys are positions, and it misses the seed generator inside
Keras 3's `MultiHeadAttention`. Keras's own lists are not enough either: they miss raw `tf.Variable`s and
`tf.random.Generator`s in layers. So both are read, and `untracked_variables` asks the traced step for the rest.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.contracts.checkpoint import OptimizerRecord
from tasks.foundation.errors import ModelError

# TensorFlow uses this marker in a checkpoint's names.
_RESERVED = ".ATTRIBUTES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One variable of the train state.

    Attributes:
        path: its path in the state's tree.
        variable: the underlying `tf.Variable`; under a strategy it has one component per replica.
        per_replica: replicas may hold different values (moving statistics, metric sums), so each is saved.
        seed: the state of a `keras.random.SeedGenerator`; replica 0's is saved, and the others are derived from it.
        trainable: updated by the optimizer.
    """

    path: str
    variable: Any
    per_replica: bool
    seed: bool = False
    trainable: bool = False

    @property
    def components(self) -> tuple[Any, ...]:
        """The variable's components, one per replica."""
        return components(self.variable)


def components(variable: Any) -> tuple[Any, ...]:
    """Return a distributed variable's components, one per replica; or the variable itself, as the only one."""
    return tuple(variable.values) if hasattr(variable, "values") else (variable,)


def handle_ids(variable: Any) -> set[int]:
    """Return the ids of all handles by which a traced function may use a `tf.Variable`.

    TPUStrategy adds a packed handle for the components of all replicas.
    """
    packed = getattr(variable, "_packed_var", None)
    handles = [part.handle for part in components(variable)]
    return {id(handle) for handle in (handles if packed is None else [*handles, packed.packed_handle])}


def leaves_of(model: keras.Model, frozen: frozenset[int] = frozenset()) -> tuple[Leaf, ...]:
    """Return all variables of a built and compiled model.

    Args:
        model: with all its variables.
        frozen: ids of `tf.Variable`s that no longer change; replicas agree on them, so they are saved once.

    Raises:
        ModelError: an optimizer is not built, so its state would be missed; or a checkpoint cannot store a variable.
    """
    found = _Found()
    objects = list(_walk(model))
    seeds = {id(_value(item.state)) for _, item in objects if isinstance(item, keras.random.SeedGenerator)}
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
    for attribute_path, item in objects:
        found.add_item(attribute_path, item, compiled_with=model.optimizer)
    _refuse_unsavable(found.leaves)
    return tuple(found.leaves)


def _refuse_unsavable(leaves: Iterable[Leaf]) -> None:
    for leaf in leaves:
        dtype, shape = leaf.components[0].dtype, leaf.components[0].shape
        if _RESERVED in leaf.path:
            what, remedy = f"its name contains {_RESERVED}, which TensorFlow reserves", "rename its layer"
        elif not (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex or dtype.is_quantized):
            what, remedy = f"its dtype is {dtype.name}", "keep numbers in variables, and text in the layer's config"
        elif shape.num_elements() == 0:
            what, remedy = f"its shape {shape.as_list()} has no values", "remove it, or give it a size"
        else:
            continue
        raise ModelError(f"variable {leaf.path} cannot be stored in a checkpoint: {what}; {remedy}")


def other_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return the optimizers other than the compiled one, each by its attribute path."""
    return {
        attribute_path: item
        for attribute_path, item in _walk(model)
        if isinstance(item, keras.optimizers.Optimizer) and item is not model.optimizer
    }


def optimizer_records(model: keras.Model) -> dict[str, OptimizerRecord]:
    """Return what the slots of each optimizer mean, by the path of its leaves without position."""
    found: dict[str, OptimizerRecord] = {}
    optimizers = {"optimizer": model.optimizer} if model.optimizer is not None else {}
    others = {f"optimizers/{path}": each for path, each in other_optimizers(model).items()}
    for path, outer in {**optimizers, **others}.items():
        # Loss scaling wraps the optimizer that has the slots.
        for optimizer in (outer, getattr(outer, "inner_optimizer", None)):
            if optimizer is not None:
                found[f"{path}/{optimizer.name}"] = OptimizerRecord(
                    kind=keras.saving.get_registered_name(type(optimizer)),
                    accumulates=getattr(optimizer, "gradient_accumulation_steps", None) or 1,
                )
    return found


def layers_of(model: keras.Model) -> Iterator[keras.Layer]:
    """Yield every layer of a model once, at any depth, the model itself included."""
    return (item for _, item in _walk(model) if isinstance(item, keras.Layer))


def untracked_variables(function: Any, leaves: Iterable[Leaf]) -> tuple[str, ...]:
    """Return the names of variables that a traced function uses and no leaf holds.

    Args:
        function: the concrete function of the training loop.
        leaves: the variables that are saved.
    """
    known = {id(component.handle) for leaf in leaves for component in leaf.components}
    return tuple(
        variable.name
        for variable in function.graph.variables
        if not all(id(part.handle) in known for part in _parts(variable))
    )


class _Found:
    """Collects leaves; each variable once, each path once."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._variables: set[int] = set()
        self._paths: set[str] = set()

    def add(self, path: str, variable: Any, *, per_replica: bool, seed: bool = False, trainable: bool = False) -> None:
        if id(variable) in self._variables:
            return
        self._variables.add(id(variable))
        # Keras's paths repeat if layers share a name; the order of construction distinguishes them.
        unique, number = path, 1
        while unique in self._paths:
            number += 1
            unique = f"{path}~{number}"
        self._paths.add(unique)
        self.leaves.append(
            Leaf(path=unique, variable=variable, per_replica=per_replica, seed=seed, trainable=trainable)
        )

    def add_item(self, attribute_path: str, item: Any, *, compiled_with: Any) -> None:
        """Add a variable that Keras's own lists miss; what they contain is already added."""
        if isinstance(item, keras.optimizers.Optimizer) and item is not compiled_with:
            self.add_optimizer(f"optimizers/{attribute_path}", item)
        elif isinstance(item, keras.metrics.Metric):
            for number, variable in enumerate(item.variables):
                self.add(f"metrics/{attribute_path}/{number}", _value(variable), per_replica=True)
        elif isinstance(item, keras.random.SeedGenerator):
            self.add(f"seeds/{attribute_path}", _value(item.state), per_replica=False, seed=True)
        elif isinstance(item, tf.random.Generator):
            self.add(f"generators/{attribute_path}", item.state, per_replica=True)
        elif isinstance(item, tf.Variable | keras.Variable):
            self.add(f"variables/{attribute_path}", _value(item), per_replica=True)

    def add_optimizer(self, attribute_path: str, optimizer: Any) -> None:
        if not optimizer.built:
            # Optimizer names repeat; attribute paths do not.
            attribute = ".".join(["model", *attribute_path.split("/")[2:]])
            raise ModelError(
                f"optimizer {optimizer.name} of the model is not built ({attribute}), so its state cannot be saved; "
                "call optimizer.build(variables) in the function that builds the model, or remove it if train_step "
                "does not use it"
            )
        # With the index, because the paths of Nadam's and Adafactor's variables repeat.
        for index, variable in enumerate(optimizer.variables):
            self.add(f"{attribute_path}/{index}/{variable.path}", _value(variable), per_replica=False)


def _parts(variable: Any) -> tuple[Any, ...]:
    """Return the parts that have handles; TPUStrategy packs the components of all replicas into one graph variable."""
    packed = getattr(variable, "_distributed_variables", None)
    return components(variable) if packed is None else tuple(packed)


def _value(variable: Any) -> Any:
    """Return the `tf.Variable` of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


_STATEFUL_TYPES = (
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
    """Yield each object that may hold state once, with its attribute path."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(model.name, model)]
    while waiting:
        attribute_path, item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            waiting.extend((f"{attribute_path}/{key}", value) for key, value in item.items())
        elif isinstance(item, list | tuple):  # not sets: their order differs between processes
            waiting.extend((f"{attribute_path}/{index}", value) for index, value in enumerate(item))
        elif isinstance(item, _STATEFUL_TYPES):
            yield attribute_path, item
            if isinstance(item, keras.Layer | tf.Module) and not isinstance(item, tf.Variable | tf.random.Generator):
                waiting.extend((f"{attribute_path}/{name}", value) for name, value in vars(item).items())
