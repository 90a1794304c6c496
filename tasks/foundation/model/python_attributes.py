"""The Python attributes of a model: what a trace of its steps depends on besides its variables."""

from dataclasses import dataclass
from typing import Any

import keras

from tasks.foundation.model.layers import has_finalized_state
from tasks.foundation.model.variables import layers_of

# Containers are compared by their items down to this depth.
_DEPTH = 2
# Set when callbacks are started; no step reads it.
_IGNORED = frozenset({"stop_training"})
_MISSING = object()


def python_attributes(model: keras.Model) -> dict[tuple[int, str], Any]:
    """Return the attributes of a model, its layers and its optimizer, as values that can be compared.

    Numbers and text are compared by value, and other objects by identity. Tracing a step changes none of them, unless
    the model's Python code has side effects.
    """
    return {
        (number, name): _comparable(value, _DEPTH)
        for number, item in enumerate(_items(model))
        for name, value in vars(item).items()
        if name not in _IGNORED
    }


@dataclass(frozen=True, slots=True)
class PythonAttributes:
    """The attributes of a model at one moment, which can be put back.

    Attributes:
        items: the model, its layers and its optimizer.
        compared: see `python_attributes`.
        plain: values that are numbers, text or None, by number of the item and name.
    """

    items: tuple[Any, ...]
    compared: dict[tuple[int, str], Any]
    plain: dict[tuple[int, str], Any]

    @classmethod
    def of(cls, model: keras.Model) -> "PythonAttributes":
        """The attributes as they are now."""
        items = tuple(_items(model))
        values = ((number, name, value) for number, item in enumerate(items) for name, value in vars(item).items())
        return cls(
            items, python_attributes(model), {(number, name): value for number, name, value in values if _plain(value)}
        )

    def changed(self, model: keras.Model) -> frozenset[tuple[int, str]] | None:
        """Which attributes differ now, by number of the item and name; None if the model has other layers."""
        if [id(item) for item in _items(model)] != [id(item) for item in self.items]:
            return None
        now = python_attributes(model)
        names = self.compared.keys() | now.keys()
        return frozenset(name for name in names if self.compared.get(name, _MISSING) != now.get(name, _MISSING))

    def can_be_put_back(self, model: keras.Model) -> bool:
        """Whether all that differs are numbers and texts of the user's own, which nothing else depends on."""
        changed = self.changed(model)
        return changed is not None and all(
            # A leading underscore is Keras's. `trainable`, for instance, is also kept in the variables.
            not name.startswith("_")
            and ((number, name) in self.plain or (number, name) not in self.compared)
            and _plain(vars(self.items[number]).get(name))
            for number, name in changed
        )

    def put_back(self, model: keras.Model) -> None:
        """Set what differs to these values; call it if `can_be_put_back`."""
        for number, name in self.changed(model) or ():
            # Around Keras's own `__setattr__`, which only keeps track of layers and variables.
            attributes = vars(self.items[number])
            if (number, name) in self.plain:
                attributes[name] = self.plain[number, name]
            else:
                attributes.pop(name, None)


class _Identity:
    """Equal only for the same object, which it keeps alive, because the id of a freed object is used again."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value


def _items(model: keras.Model) -> list[Any]:
    # What a layer makes of its variables is no state of its own: it follows each restore.
    return [*(layer for layer in layers_of(model) if not has_finalized_state(layer)), model.optimizer]


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def _comparable(value: Any, depth: int) -> Any:
    if _plain(value):
        return (type(value).__name__, repr(value))
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_comparable(item, depth - 1) for item in value]
    if depth and isinstance(value, dict):
        return [(_comparable(key, 0), _comparable(item, depth - 1)) for key, item in value.items()]
    return _Identity(value)
