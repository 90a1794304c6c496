"""Finds every variable of a model, its layers, optimizer and metrics, and gives each a stable path.

The object graph of `tf.train.Checkpoint` is not enough: its keys are positions, and it misses the seed generator inside
Keras 3's `MultiHeadAttention`. Keras's own lists are not enough either: they miss raw `tf.Variable`s and
`tf.random.Generator`s in layers. So both are read, and `untracked_variables` asks the traced step for the rest.

Layers have paths too, `encoder/block/dense` for a nested one. Patterns match paths: `init.freeze` excludes what they
match from training.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from baton.tasks.foundation.contracts.checkpoint import OptimizerRecord
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.user_traceback import user_error

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


def values_in_file(
    leaves: Mapping[str, Leaf], everything: Iterable[Leaf], load: Callable[[], object]
) -> dict[str, Any]:
    """Load a file into variables, and return what it has for them; then they are as before.

    Neither Keras nor TensorFlow says that it finds nothing for a variable. So the file is loaded twice, over other
    values each time: such a variable keeps them.

    Args:
        everything: all leaves that the file may change, as those of the optimizer.

    Returns:
        The arrays of those that the file has, by the keys of `leaves`; those of the first replica.
    """
    before = [(part, part.numpy()) for leaf in everything for part in leaf.components]
    found: list[dict[str, Any]] = []
    try:
        for _ in range(2):
            for part in (part for leaf in leaves.values() for part in leaf.components):
                value = part.numpy()
                part.assign((value == 0).astype(value.dtype))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about entries that are ignored
                load()
            found.append({path: np.array(leaf.components[0].numpy()) for path, leaf in leaves.items()})
    finally:
        for part, value in before:
            part.assign(value)
    first, again = found
    return {path: value for path, value in first.items() if value.tobytes() == again[path].tobytes()}


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
        frozen: ids of `tf.Variable`s that no longer change; replicas agree on them, so they are saved once.

    Raises:
        ModelError: an optimizer is not built, so its state would be missed; or a checkpoint cannot store a variable.
    """
    found = _Collected()
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
        for optimizer in with_inner_optimizers(outer):
            found[f"{path}/{optimizer.name}"] = OptimizerRecord(
                kind=keras.saving.get_registered_name(type(optimizer)),
                accumulates=getattr(optimizer, "gradient_accumulation_steps", None) or 1,
            )
    return found


def with_inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it wraps: loss scaling wraps one, a `MultiOptimizer` one or more.

    What an optimizer is set to (`use_ema`, clipping, accumulation), its iterations and its slots are those of the
    wrapped ones; a wrapper has defaults in their place.
    """
    yield optimizer
    one = getattr(optimizer, "inner_optimizer", None)
    several = optimizer.optimizers if isinstance(optimizer, keras.optimizers.MultiOptimizer) else ()
    for inner in several if one is None else (one,):
        yield from with_inner_optimizers(inner)


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


class _Collected:
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


def named_layers(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
    """Yield each layer with its path, parents first; the model itself has an empty path.

    The order is that in which Keras saves: first the layers of Functional and Sequential models, then attributes by
    name. A layer that can be reached by several paths has the first.
    """
    seen: set[int] = set()
    yield from _below("", model, seen)


def own_values(layer: keras.Layer) -> dict[str, Any]:
    """Return what a layer itself saves, under the keys that Keras saves it by: "0", "1" and so on."""
    store: dict[str, Any] = {}
    try:
        layer.save_own_variables(store)
    except Exception:  # noqa: BLE001 - the user's method may expect an HDF5 file
        return {}
    return {str(key): value for key, value in store.items()}


def stateful_layers_warning(model: keras.Model, *, shuffle: bool) -> str | None:
    """Return a warning if layers go on from batch to batch with the same rows, but these are shuffled; else None."""
    paths = [path or layer.name for path, layer in named_layers(model) if getattr(layer, "stateful", None) is True]
    if not shuffle or not paths:
        return None
    return (
        f"{', '.join(paths)}: stateful=True goes on with each row of a batch where that row of the one before ended, "
        "but the examples are shuffled; set data.shuffle: false, which keeps the order of the source"
    )


def has_finalized_state(item: Any) -> bool:
    """Whether a layer makes constants of its variables, as `Normalization` does, and computes with these."""
    return isinstance(item, keras.Layer) and callable(getattr(item, "finalize_state", None))


def finalize_layers(model: keras.Model) -> None:
    """Let layers make the constants that follow from their variables, as Keras does after it has loaded weights.

    Functions that Keras has compiled for a caller's `predict` hold the earlier constants, so they are dropped.

    Raises:
        ModelError: a layer's `finalize_state` raised.
    """
    layers = list(named_layers(model))
    finalized = [(path, layer) for path, layer in layers if has_finalized_state(layer)]
    for path, layer in finalized:
        try:
            layer.finalize_state()
        except Exception as fault:
            raise ModelError(user_error(f"layer {path}: finalize_state raised", fault)) from fault
    for _, layer in layers if finalized else ():
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None


def _below(name: str, layer: keras.Layer, seen: set[int]) -> Iterator[tuple[str, keras.Layer]]:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield name, layer
    ordered = layer.layers if isinstance(layer, keras.Sequential | keras.Model) and hasattr(layer, "layers") else []
    attributes = [value for _, value in sorted(vars(layer).items())]
    for child in _layers_in([ordered, *attributes], set()):
        yield from _below(f"{name}/{child.name}" if name else child.name, child, seen)


def _layers_in(value: Any, seen: set[int]) -> Iterator[keras.Layer]:
    """Yield the layers in nested containers, in order."""
    if isinstance(value, keras.Layer):
        yield value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:  # a set has no order
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _layers_in(item, seen)


def matches_path(patterns: Iterable[str], path: str) -> bool:
    """Whether a pattern matches a path or one of its parents: `encoder` matches everything below it too.

    Args:
        patterns: as in `fnmatch`; `*` also matches slashes.
        path: names joined by slashes.
    """
    parts = path.split("/")
    beginnings = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(beginning, pattern) for pattern in patterns for beginning in beginnings)


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


_SHOWN = 8


def describe_placement(variables: Iterable[Any]) -> str:
    """Count the variables on each device: `variables: 12 on each of TPU:0, TPU:1; 1 on CPU:0`.

    Args:
        variables: `tf.Variable`s; a distributed one counts on each device that holds a component of it.
    """
    counts = Counter(_device(part) for variable in variables for part in components(variable))
    of_count: dict[int, list[str]] = {}
    for device in sorted(counts, key=_in_order):
        of_count.setdefault(counts[device], []).append(device)
    parts = [
        f"{count} on {devices[0]}" if len(devices) == 1 else f"{count} on each of {_listed(devices)}"
        for count, devices in of_count.items()
    ]
    return f"variables: {'; '.join(parts)}"


def _device(variable: Any) -> str:
    """Return `TPU:0` for `/job:localhost/replica:0/task:0/device:TPU:0`."""
    return str(variable.device).rpartition("/device:")[2] or "no device"


def _in_order(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return kind, int(number) if number.isdigit() else -1


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= _SHOWN else f"{devices[0]} to {devices[-1]} ({len(devices)} devices)"
