"""Pads sequences of different lengths to one length, as `data.pad` in the run file says."""

from collections.abc import Iterable, Mapping

import numpy as np

from tasks.foundation.contracts.sequences import PadRule
from tasks.foundation.dataset.features import Array
from tasks.foundation.errors import SourceError


class Padding:
    """Pads the features that `data.pad` names; the others stay as they are."""

    def __init__(self, rules: Mapping[str, PadRule]) -> None:
        """Pad by these rules; a name is that of a feature, `tokens` for `x/tokens` or `y/tokens` too."""
        self._rules = rules
        self._of_feature: dict[str, tuple[str, PadRule]] = {}

    def apply(self, where: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return an example with the named features padded at their end.

        Args:
            where: its position in the source, for messages.
            arrays: the example, named arrays [n, ...].

        Raises:
            SourceError: it has no such feature, or one that is no sequence, is too long, or cannot hold the value.
        """
        if not self._of_feature:
            self._of_feature = {
                feature_named(name, arrays, key=f"data.pad.{name}"): (name, rule) for name, rule in self._rules.items()
            }
        return {
            feature: _padded(where, array, *self._of_feature[feature]) if feature in self._of_feature else array
            for feature, array in arrays.items()
        }


def feature_named(name: str, features: Iterable[str], *, key: str) -> str:
    """Return the feature that a name in the run file means.

    Args:
        name: `x`, `y/labels`, or `tokens` for `x/tokens` or `y/tokens`.
        features: the features of an example.
        key: the key of the run file, for messages.

    Raises:
        SourceError: there is none, or more than one.
    """
    known = list(features)
    found = [feature for feature in (name, f"x/{name}", f"y/{name}") if feature in known]
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(f"{key}: the examples have {' and '.join(found)}; write one of them in full")
    raise SourceError(f"{key}: the examples have no such feature; they have {', '.join(known)}")


def _padded(where: str, array: Array, name: str, rule: PadRule) -> Array:
    key = f"data.pad.{name}"
    if array.ndim == 0:
        raise SourceError(f"{where}: {key}: {name} is a single value, not a sequence; remove it from data.pad")
    if len(array) > rule.length:
        if rule.longer == "refuse":
            raise SourceError(
                f"{where}: {name} has length {len(array)}, but {key} is {rule.length}; set a larger length, or "
                f"longer: truncate ({name}: {{length: {rule.length}, longer: truncate}})"
            )
        return array[: rule.length]
    padded = np.full((rule.length, *array.shape[1:]), _filling(array, key, rule), array.dtype)
    padded[: len(array)] = array
    return padded


def _filling(array: Array, key: str, rule: PadRule) -> object:
    """Return what fills the rest, of the array's dtype."""
    if array.dtype == object:  # text
        return rule.value.encode() if isinstance(rule.value, str) else b""
    if not isinstance(rule.value, str):
        with np.errstate(all="ignore"):
            filling = np.asarray(rule.value).astype(array.dtype)
        # Float32 holds 0.1 only nearly; whole numbers are held exactly, or not at all.
        if array.dtype.kind in "fc" or filling == rule.value:
            return filling
    raise SourceError(f"{key}.value: {rule.value!r}: the feature has dtype {array.dtype}; set a value that it can hold")
