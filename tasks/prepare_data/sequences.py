"""Pads sequences of different lengths to one length, as `data.pad` in the run file says.

Packs sequences into rows of one length, as `data.pack` in the run file says.

A sequence goes into the first of the open rows that has room for it, or into a new one; the oldest open row is closed
when there are too many. So rows follow from the order of the source alone. This is first fit for bin packing, with a
bounded number of open bins.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from baton.tasks.foundation.contracts.data_spec import PackSpec, PadRule
from baton.tasks.foundation.dataset.features import Array, flatten, unflatten
from baton.tasks.foundation.errors import SourceError


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
    raise SourceError(
        f"{key}: the examples have no such feature; they have {', '.join(known)}. Name one of these, or yield it "
        "as one of the inputs: a dict of arrays"
    )


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


# More open rows fill better, and cost memory and time.
_OPEN_ROWS = 64
_TOKENS, _SEGMENTS, _POSITIONS, _WEIGHT = "tokens", "segment_ids", "positions", "sample_weight"
_KEY = "data.pack"

# Name, dtype and shape of one array of an example; the first dimension of a sequence is its length.
Kind = tuple[str, str, tuple[int, ...]]


@dataclass(slots=True)
class _PackedRow:
    """Sequences that share a row, one after the other."""

    used: int = 0
    sequences: list[dict[str, Array]] = field(default_factory=list)


class Packing:
    """Packs the records of the training and validation part, each on its own.

    A row is x: {<name>: [length, ...], segment_ids: int32 [length], positions: int32 [length]}; a bare x is named
    `tokens`. Segments count from 1 and are 0 where the row is filled up with zeros; positions count from 0 in each
    segment. Labels and weights are packed alike. Where there are labels without weights, sample_weight: float32
    [length] is 1 for a token and 0 for the filling.
    """

    def __init__(self, spec: PackSpec, *, group: str | None = None) -> None:
        """Pack nothing yet.

        Args:
            spec: `data.pack`.
            group: `data.split_by`; this feature is left out of the rows.
        """
        self._spec = spec
        self._group = group
        self._kinds: tuple[Kind, ...] = ()
        self.sequences = self.tokens = self.rows = 0

    def check(self, where: str, arrays: Mapping[str, Array]) -> None:
        """Refuse an example that is no sequence, or too long for a row. The first one says what the rows hold.

        Args:
            where: its position in the source, for messages.

        Raises:
            SourceError: its arrays have different first dimensions or none, or hold text; it is too long; or its inputs
                cannot be those of a row.
        """
        packed = {name: array for name, array in arrays.items() if not self._is_group(name)}
        lengths = {len(array) if array.ndim else None for array in packed.values()}
        if len(lengths) != 1 or None in lengths:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in packed.items())
            raise SourceError(
                f"{where}: {_KEY} needs sequences of one length in each example, but this one has {shapes}; yield "
                "(tokens, labels) with a label for each token, or remove data.pack"
            )
        if texts := [name for name, array in packed.items() if array.dtype == object]:
            raise SourceError(f"{where}: {_KEY} packs numbers, but {texts[0]} is text; give its tokens' numbers")
        (length,) = lengths
        if length is not None and length > self._spec.length and self._spec.longer == "refuse":
            raise SourceError(
                f"{where}: it has {length} tokens, but {_KEY}.length is {self._spec.length}; set a larger length, or "
                f"longer: split (pack: {{length: {self._spec.length}, longer: split}})"
            )
        if not self._kinds:
            self._kinds = tuple((name, array.dtype.name, array.shape) for name, array in packed.items())
            self._arrays(_PackedRow())  # refuses names that a row cannot have

    @property
    def kinds(self) -> list[Kind]:
        """Names, dtypes and shapes of the rows, once an example has been checked."""
        return [(name, array.dtype.name, array.shape) for name, array in self._arrays(_PackedRow()).items()]

    def pack(self, parts: Iterable[tuple[bool, bytes]]) -> Iterator[tuple[bool, bytes]]:
        """Yield (held out, record) of each row.

        Args:
            parts: (held out, record) of each sequence that was checked.
        """
        from baton.tasks.foundation.dataset.shards import encode

        open_rows: tuple[list[_PackedRow], list[_PackedRow]] = ([], [])
        for held_out, record in parts:
            for row in self._add(open_rows[held_out], self._decode(record)):
                yield held_out, encode(self._arrays(row))
        for held_out, rows in zip((False, True), open_rows, strict=True):
            for row in rows:
                yield held_out, encode(self._arrays(row))

    def described(self) -> str:
        """Return text such as `20 sequences of 512 tokens in 5 rows of 128, 80% filled`."""
        filled = self.tokens / (self.rows * self._spec.length)
        return (
            f"{self.sequences:,} sequences of {self.tokens:,} tokens in {self.rows:,} rows of {self._spec.length}, "
            f"{filled:.1%} filled"
        )

    def _is_group(self, name: str) -> bool:
        return self._group is not None and name in {self._group, f"x/{self._group}", f"y/{self._group}"}

    def _add(self, rows: list[_PackedRow], sequence: dict[str, Array]) -> Iterator[_PackedRow]:
        """Put a sequence into a row; yield the rows that are closed."""
        length = len(next(iter(sequence.values())))
        self.sequences += 1
        self.tokens += length
        for begin in range(0, length, self._spec.length):
            piece = {name: array[begin : begin + self._spec.length] for name, array in sequence.items()}
            size = min(length - begin, self._spec.length)
            row = next((row for row in rows if row.used + size <= self._spec.length), None)
            if row is None:
                self.rows += 1
                row = _PackedRow()
                rows.append(row)
            row.sequences.append(piece)
            row.used += size
            if row.used == self._spec.length:
                rows.remove(row)
                yield row
            elif len(rows) > _OPEN_ROWS:
                yield rows.pop(0)

    def _decode(self, record: bytes) -> dict[str, Array]:
        from tensorflow.core.example.example_pb2 import Example

        found = Example.FromString(record).features.feature
        return {
            name: np.frombuffer(found[name].bytes_list.value[0], dtype).reshape(-1, *shape[1:])
            for name, dtype, shape in self._kinds
        }

    def _arrays(self, row: _PackedRow) -> dict[str, Array]:
        """Return a row as named arrays, its inputs sorted by name."""
        length = self._spec.length
        filled = {name: np.zeros((length, *shape[1:]), dtype) for name, dtype, shape in self._kinds}
        segments, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
        begin = 0
        for number, sequence in enumerate(row.sequences, start=1):
            end = begin + len(next(iter(sequence.values())))
            for name, array in sequence.items():
                filled[name][begin:end] = array
            segments[begin:end] = number
            positions[begin:end] = np.arange(end - begin)
            begin = end
        x, *others = unflatten(filled)
        inputs = _named_inputs(x)
        inputs |= {_SEGMENTS: segments, _POSITIONS: positions}
        if len(others) == 1:
            others.append(_same_structure(others[0], (segments > 0).astype(np.float32)))
        return flatten((dict(sorted(inputs.items())), *others))


def _named_inputs(x: object) -> dict[str, object]:
    """Return the inputs of a row by name."""
    if isinstance(x, tuple):
        raise SourceError(f"{_KEY} names the inputs, but x is a list of {len(x)} arrays; yield a dict of arrays")
    inputs = dict(x) if isinstance(x, Mapping) else {_TOKENS: x}
    if taken := sorted({_SEGMENTS, _POSITIONS} & set(inputs)):
        raise SourceError(f"{_KEY} adds the input {taken[0]}, but the examples have one; rename it")
    return inputs


def _same_structure(labels: object, weights: Array) -> object:
    """Return weights as labels are: an array, or one for each output."""
    if isinstance(labels, Mapping):
        return dict.fromkeys(labels, weights)
    return tuple(weights for _ in labels) if isinstance(labels, tuple) else weights
