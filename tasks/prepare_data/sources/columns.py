"""Arrays of many examples: x, y and sample_weight as `fit` takes them, all of the same length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tasks.foundation.dataset.example_shapes import describe_shapes
from tasks.foundation.dataset.features import PARTS, Array, as_array, named_parts
from tasks.foundation.dataset.structure import is_array, ragged_items
from tasks.foundation.dataset.text_values import STRING, dtype_name
from tasks.foundation.errors import SourceError
from tasks.foundation.messages import message
from tasks.prepare_data.sources.base import Row

# A list with more arrays than this is a stack of rows, never a list of inputs.
MAX_INPUTS = 16
# Sparse rows are made dense in pieces of this many bytes.
_DENSE_BYTES = 16 << 20

Named = list[tuple[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One feature of all examples.

    `take(begin, end)` returns the array of some examples, [end - begin, *shape], or a list of arrays of different
    lengths; then the first dimension in `shape` is None.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    take: Callable[[int, int], Array | list[Array]]
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The features of `length` examples."""

    length: int
    columns: tuple[Column, ...]

    def rows(self) -> Iterator[Row]:
        """Yield the examples in order."""
        chunk = min(column.chunk for column in self.columns)
        for begin in range(0, self.length, chunk):
            end = min(begin + chunk, self.length)
            taken = {column.name: column.take(begin, end) for column in self.columns}
            for index in range(end - begin):
                yield Row({name: _item(values, index) for name, values in taken.items()})

    @property
    def names(self) -> list[str]:
        """The names of the features, in order."""
        return [column.name for column in self.columns]

    def described(self) -> str:
        """Return text such as `x float32[8] and y int64[]`."""
        return describe_shapes({column.name: (column.dtype, column.shape) for column in self.columns})


def columns_of(
    parts: Sequence[object], *, where: str, remedy: str, names: Sequence[str] = (), ragged: bool = False
) -> Columns:
    """Return the features of whole arrays.

    Args:
        parts: x, (x, y) or (x, y, sample_weight), each an array, a flat dict of arrays, or a list or tuple of them.
        where: what they are, for messages.
        remedy: what to do if their lengths differ.
        names: of the features of the batch before, which decide if there are two readings.
        ragged: whether the examples of an array may differ in length; `data.pad` or `data.pack` is set.

    Raises:
        SourceError: they have different lengths, can be read two ways, or a value is unsupported; shows all shapes.
    """
    try:
        length, named = _reading(parts, where=where, remedy=remedy, names=names)
        columns = tuple(_column(name, value, ragged=ragged) for name, value in named)
    except ValueError as fault:
        raise SourceError(message(f"{where}: {fault}", details=[f"it has {describe_parts(parts)}"])) from fault
    _require_weights(columns, where=where)
    return Columns(length=length, columns=columns)


def describe_parts(parts: Sequence[object]) -> str:
    """Return text such as `x float32[40, 8] and y int64[40]`, whatever the values are."""
    named: Named = []
    for part, content in zip(PARTS, parts, strict=False):
        try:
            named += named_parts(part, content, content if _may_be_several(content) else None)
        except ValueError:
            named.append((part, content))
    words = [f"{name} {describe_value(value)}" for name, value in named]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else (words or ["nothing"])[0]


def describe_value(value: object) -> str:
    """Return dtype and shape of a value, or its type."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None:
        sizes = list(getattr(shape, "as_list", lambda: shape)()) if getattr(shape, "rank", 0) is not None else "?"
        return f"{getattr(dtype, 'name', None) or type(value).__name__}{sizes}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _reading(parts: Sequence[object], *, where: str, remedy: str, names: Sequence[str]) -> tuple[int, Named]:
    """Return the one way in which all arrays have the same length."""
    options = [(length, option) for option in _options(parts) if (length := _length_of_all(option)) is not None]
    if len(options) > 1 and names:
        # A last batch may have as many examples as the list has arrays.
        options = [(length, option) for length, option in options if [name for name, _ in option] == list(names)]
    if len(options) == 1:
        length, named = options[0]
        if length == 0:
            raise SourceError(f"{where}: it has no examples: {describe_parts(parts)}; give at least one")
        return length, named
    if options:
        raise SourceError(
            message(
                f"{where}: it can be read two ways",
                details=[f"as {length} examples: {_named_shapes(option)}" for length, option in options],
                hints=[
                    "for one array, stack it: np.stack([left, right])",
                    'for several inputs, name them: {"left": left, "right": right}',
                ],
            )
        )
    raise SourceError(message(f"{where}: its arrays have different lengths: {describe_parts(parts)}", hints=[remedy]))


def _options(parts: Sequence[object]) -> Iterator[Named]:
    """Yield all ways to name the arrays: a list may be several arrays or one."""
    ways: list[list[Named]] = []
    for part, content in zip(PARTS, parts, strict=False):
        several = _may_be_several(content)
        of_part = [list(named_parts(part, content, content))] if several else []
        if not several or _may_be_one(content):
            of_part.append(list(named_parts(part, content, None)))
        ways.append(of_part)
    for way in product(*ways):
        yield [named for of_part in way for named in of_part]


def _may_be_several(content: Any) -> bool:
    return isinstance(content, list | tuple) and 0 < len(content) <= MAX_INPUTS and any(map(is_array, content))


def _may_be_one(content: Any) -> bool:
    """Whether the arrays of a list may be rows of one array; a tuple is always several arrays, as in Keras."""
    return isinstance(content, list) and len(set(map(describe_value, content))) == 1


def _length_of_all(named: Named) -> int | None:
    lengths = {_length(value) for _, value in named}
    return lengths.pop() if len(lengths) == 1 else None


def _length(value: object) -> int | None:
    shape = getattr(value, "shape", None)
    if shape is not None:
        try:
            return int(shape[0]) if len(shape) and shape[0] is not None else None
        except ValueError:  # a tensor of unknown rank
            return None
    return len(value) if isinstance(value, list | tuple) else None


def _named_shapes(named: Named) -> str:
    return ", ".join(f"{name} {describe_value(value)}" for name, value in named)


def _column(name: str, value: object, *, ragged: bool) -> Column:
    if type(value).__module__.startswith("scipy.sparse"):
        return _sparse(name, value)
    if ragged and (items := ragged_items(value)) is not None:
        return _sequences(name, items)
    array = as_array(name, _from_pandas(name, value))

    def take(begin: int, end: int) -> Array:
        return array[begin:end]

    return Column(name=name, dtype=dtype_name(array), shape=array.shape[1:], take=take, chunk=4096)


def _sequences(name: str, items: Sequence[object]) -> Column:
    """Arrays of different lengths; an empty one has no dtype of its own."""
    rows = [as_array(name, item) for item in items]
    typical = next((row for row in rows if row.size), rows[0])
    rows = [row if row.size else np.zeros((0, *typical.shape[1:]), typical.dtype) for row in rows]

    def take(begin: int, end: int) -> list[Array]:
        return rows[begin:end]

    return Column(name=name, dtype=dtype_name(typical), shape=(None, *typical.shape[1:]), take=take, chunk=4096)


def _sparse(name: str, value: Any) -> Column:
    rows = value.tocsr()
    dtype = rows.dtype.name
    row_bytes = max(1, rows.dtype.itemsize * rows.shape[1])

    def take(begin: int, end: int) -> Array:
        return as_array(name, rows[begin:end].toarray())

    chunk = max(1, _DENSE_BYTES // row_bytes)
    return Column(name=name, dtype=dtype, shape=(int(rows.shape[1]),), take=take, chunk=chunk)


def _from_pandas(name: str, value: Any) -> object:
    """Return a DataFrame or Series as an array; pandas itself is not imported."""
    if not hasattr(value, "to_numpy"):
        return value
    array = value.to_numpy()
    if array.dtype == object and hasattr(value, "columns") and len(set(map(str, value.dtypes))) > 1:
        columns = ", ".join(f"{column} {kind}" for column, kind in zip(value.columns, value.dtypes, strict=True))
        raise ValueError(
            f"{name} is a DataFrame whose columns have different kinds ({columns}); give each its own input: "
            "dict(frame), or encode them: frame.apply(lambda column: column.astype('category').cat.codes)"
        )
    return array


def _require_weights(columns: Sequence[Column], *, where: str) -> None:
    """Refuse weights that cannot be weights: text, or with more dimensions than y."""
    labels = [column for column in columns if column.name.startswith("y")]
    most = max((len(column.shape) for column in labels), default=0)
    for column in columns:
        if column.name.startswith("sample_weight") and (column.dtype == STRING or len(column.shape) > most):
            shapes = describe_shapes({each.name: (each.dtype, each.shape) for each in (*labels, column)})
            raise SourceError(
                f"{where}: {column.name} cannot weigh the labels: an example has {shapes}; give one number for each "
                "example, or for each step of y, or return (x, y) alone"
            )


def _item(values: Array | list[Array], index: int) -> Array:
    item = values[index]
    if isinstance(item, np.ndarray):
        return item
    scalar = np.empty((), np.asarray(values).dtype)
    scalar[()] = item
    return scalar


def is_table(value: object) -> bool:
    """Whether a value is one array of many examples: of NumPy, TensorFlow, pandas or scipy.sparse; not a list."""
    return not isinstance(value, Mapping | list | tuple) and is_array(value)
