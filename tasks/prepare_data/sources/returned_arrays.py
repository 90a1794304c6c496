"""Arrays of many examples: x, y and sample_weight as `fit` takes them, all of the same length, whole or in batches.

Whole arrays become what `fit` makes of them (keras.src.trainers.data_adapters): floating numbers are cast to
`keras.config.floatx()`, a Series becomes a column, the numbers of a DataFrame get one dtype, and weights given once are
those of each output. Batches (of a generator, a `tf.data.Dataset` or a `keras.utils.PyDataset`) keep dtypes and shapes,
as they do in `fit`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from baton.tasks.foundation.dataset.features import (
    MAX_INPUTS,
    PARTS,
    STRING,
    Array,
    as_array,
    describe_shapes,
    dtype_name,
    holds_arrays,
    is_array,
    named_parts,
    ragged_items,
)
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.text import message
from baton.tasks.prepare_data.sources.source import LocatedExample, Row

# Sparse rows are made dense in pieces of this many bytes.
_DENSE_BYTES = 16 << 20
# The setting of a source that casts its floating numbers.
FLOATX = "floatx"
# Kinds of dtypes, as NumPy and pandas name them.
_NUMBERS = "biuf"

Named = list[tuple[str, object]]
_DATASET_CHAIN = 100
# Operations after which the first dimension of an element is no longer that of the batch.
_REGROUPING = ("Unbatch", "FlatMap", "Interleave", "Window", "Generator", "Zip", "Concatenate", "Choose")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One feature of all examples.

    `take(begin, end)` returns the array of some examples, [end - begin, *shape], or a list of arrays of different
    lengths; then the first dimension in `shape` is None. `changed` says what was done to the user's array.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    take: Callable[[int, int], Array | list[Array]]
    chunk: int = 4096
    changed: tuple[str, ...] = ()


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

    def changed(self) -> str:
        """Return what was done to the arrays, as `x: float64 cast to float32`; "" if they are as they were."""
        return "; ".join(f"{column.name}: {', '.join(column.changed)}" for column in self.columns if column.changed)


def columns_of(
    parts: Sequence[object],
    *,
    where: str,
    remedy: str,
    names: Sequence[str] = (),
    ragged: bool = False,
    floatx: str | None = None,
) -> Columns:
    """Return the features of whole arrays.

    Args:
        parts: x, (x, y) or (x, y, sample_weight), each an array, a flat dict of arrays, or a list or tuple of them.
        where: what they are, for messages.
        remedy: what to do if their lengths differ.
        names: of the features of the batch before, which decide if there are two readings.
        ragged: whether the examples of an array may differ in length; `data.pad` or `data.pack` is set.
        floatx: the dtype to which `fit` casts floating numbers; the arrays become what `fit` makes of them. None: the
            arrays are a batch, and stay as they are.

    Raises:
        SourceError: they have different lengths, can be read two ways, or a value is unsupported; shows all shapes.
    """
    try:
        length, named = _reading(parts, where=where, remedy=remedy, names=names)
        if floatx is not None:
            named = _weights_of_each_output(named)
        columns = tuple(_column(name, value, ragged=ragged, floatx=floatx) for name, value in named)
    except ValueError as fault:
        raise SourceError(message(f"{where}: {fault}", details=[f"it has {describe_parts(parts)}"])) from fault
    _require_weights(columns, where=where)
    return Columns(length=length, columns=columns)


def floatx() -> str:
    """Return the dtype to which `fit` casts floating numbers of whole arrays: float32, unless Keras is told another."""
    import keras

    return str(keras.config.floatx())


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
        options = [(length, option) for length, option in options if {name for name, _ in option} == set(names)]
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
    return isinstance(content, list | tuple) and len(content) <= MAX_INPUTS and holds_arrays(content)


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


def _weights_of_each_output(named: Named) -> Named:
    """Repeat weights that are given once for each output, as Keras does."""
    outputs = [name.removeprefix("y") for name, _ in named if name.startswith(("y/", "y["))]
    weights = next((value for name, value in named if name == "sample_weight"), None)
    if not outputs or weights is None:
        return named
    if getattr(weights, "shape", (0,))[1:] not in ((), (1,)):
        raise ValueError(
            "sample_weight has several numbers for an example; give weights for each output, as y has them"
        )
    others = [(name, value) for name, value in named if name != "sample_weight"]
    return [*others, *((f"sample_weight{output}", weights) for output in outputs)]


def _column(name: str, value: Any, *, ragged: bool, floatx: str | None) -> Column:
    if type(value).__module__.startswith("scipy.sparse"):
        return _cast(_sparse(name, value), floatx)
    if ragged and (items := ragged_items(value)) is not None:
        return _cast(_sequences(name, items), floatx)
    if _is_of_pandas("DataFrame", value):
        return _frame(name, value, floatx)
    if floatx is not None and getattr(getattr(value, "dtype", None), "name", "").startswith("bfloat16"):
        value = np.asarray(value).astype(floatx)  # NumPy itself has no such dtype
    if _is_of_pandas("Series", value):
        _require_no_gaps(name, value.to_frame())
    column = _plain(name, as_array(name, value.to_numpy() if hasattr(value, "to_numpy") else value))
    if floatx is not None and _is_of_pandas("Series", value):
        column = _as_column(column)
    return _cast(column, floatx)


def _plain(name: str, array: Array) -> Column:
    return Column(name=name, dtype=dtype_name(array), shape=array.shape[1:], take=lambda begin, end: array[begin:end])


def _as_column(series: Column) -> Column:
    """Make a column of a Series, [rows, 1]."""

    def take(begin: int, end: int) -> Array:
        return np.asarray(series.take(begin, end))[:, np.newaxis]

    return replace(series, shape=(*series.shape, 1), take=take, changed=("a Series made a column",))


def _cast(column: Column, floatx: str | None) -> Column:
    """Cast floating numbers to floatx, some rows at a time, so that memory holds the user's array only."""
    if floatx is None or not column.dtype.startswith("float") or column.dtype == floatx:
        return column

    def take(begin: int, end: int) -> Array | list[Array]:
        taken = column.take(begin, end)
        with np.errstate(over="ignore"):  # becomes infinity, which is refused later
            return [each.astype(floatx) for each in taken] if isinstance(taken, list) else taken.astype(floatx)

    return replace(column, dtype=floatx, take=take, changed=(*column.changed, f"{column.dtype} cast to {floatx}"))


def _sequences(name: str, items: Sequence[object]) -> Column:
    """Arrays of different lengths; an empty one has no dtype of its own."""
    rows = [as_array(name, item) for item in items]
    typical = next((row for row in rows if row.size), rows[0])
    rows = [row if row.size else np.zeros((0, *typical.shape[1:]), typical.dtype) for row in rows]
    shape = (None, *typical.shape[1:])
    return Column(name=name, dtype=dtype_name(typical), shape=shape, take=lambda begin, end: rows[begin:end])


def _sparse(name: str, value: Any) -> Column:
    rows = value.tocsr()
    dtype = rows.dtype.name
    row_bytes = max(1, rows.dtype.itemsize * rows.shape[1])

    def take(begin: int, end: int) -> Array:
        return as_array(name, rows[begin:end].toarray())

    chunk = max(1, _DENSE_BYTES // row_bytes)
    return Column(name=name, dtype=dtype, shape=(int(rows.shape[1]),), take=take, chunk=chunk)


def _is_of_pandas(kind: str, value: object) -> bool:
    # A value of a package's class exists only if the package is imported.
    found = getattr(sys.modules.get("pandas"), kind, None)
    return found is not None and isinstance(value, found)


def _frame(name: str, frame: Any, floatx: str | None) -> Column:
    """Return the columns of a DataFrame as one array, with the dtype that `fit` gives it.

    One column of floating numbers that are not floatx casts all to floatx, also integers and booleans. Others get the
    dtype that NumPy finds for all of them.
    """
    _require_no_gaps(name, frame)
    kinds = [_kind(dtype) for dtype in frame.dtypes]
    numbers = all(kind in _NUMBERS for kind in kinds)
    floats = {dtype.name for dtype in frame.dtypes if isinstance(dtype, np.dtype) and dtype.kind == "f"} - {floatx}
    if floatx is not None and numbers and floats:

        def take(begin: int, end: int) -> Array:
            with np.errstate(over="ignore"):
                return np.asarray(frame.iloc[begin:end].astype(floatx).to_numpy())

        changed = f"columns of {', '.join(dict.fromkeys(map(str, frame.dtypes)))} cast to {floatx}"
        return Column(name=name, dtype=floatx, shape=(len(kinds),), take=take, changed=(changed,))
    array = frame.to_numpy()
    only_text = set(kinds) == {"O"}
    if (floats and not numbers) or (not only_text and (array.dtype == object or "O" in kinds)):
        columns = ", ".join(f"{column} {dtype}" for column, dtype in zip(frame.columns, frame.dtypes, strict=True))
        remedy = f'{name}.astype("float32")' if numbers else f"give each its own input: dict({name})"
        raise ValueError(f"{name} is a DataFrame whose columns have no dtype in common ({columns}); {remedy}")
    return _plain(name, as_array(name, array))


def _require_no_gaps(name: str, frame: Any) -> None:
    """Refuse missing values in columns of numbers that are pandas' own; NumPy's have NaN, which is looked for later."""
    own = [not isinstance(dtype, np.dtype) and _kind(dtype) in _NUMBERS for dtype in frame.dtypes]
    if any(own) and frame.iloc[:, own].isna().any(axis=None):
        raise ValueError(f"{name} has missing values; fill them: {name}.fillna(0)")


def _kind(dtype: Any) -> str:
    return str(getattr(dtype, "kind", "O"))


def _require_weights(columns: Sequence[Column], *, where: str) -> None:
    """Refuse weights that cannot be weights: text, or with more dimensions than y, a last one of 1 left out."""
    labels = [column for column in columns if column.name.startswith("y")]
    most = max((len(column.shape) for column in labels), default=0)
    for column in columns:
        sizes = column.shape[:-1] if column.shape[-1:] == (1,) else column.shape
        if column.name.startswith("sample_weight") and (column.dtype == STRING or len(sizes) > most):
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


def is_tf_dataset(value: object) -> bool:
    """Whether a value is a `tf.data.Dataset`."""
    return _is_instance(value, "tensorflow", "data.Dataset")


def is_py_dataset(value: object) -> bool:
    """Whether a value is a `keras.utils.PyDataset` or `Sequence`."""
    return _is_instance(value, "keras", "utils.PyDataset")


def _is_instance(value: object, package: str, path: str) -> bool:
    # A value of a package's class exists only if the package is imported.
    found: Any = sys.modules.get(package)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None and isinstance(value, found)


def examples_of_batches(batches: Iterable[tuple[str, object]], *, ragged: bool = False) -> Iterator[LocatedExample]:
    """Take batches apart.

    Args:
        batches: pairs of place, for messages, and batch: x, (x, y) or (x, y, sample_weight), each an array, a flat dict
            or a list of arrays, [batch, ...].
        ragged: whether the examples of a batch may differ in length.

    Raises:
        SourceError: the arrays of a batch have different lengths, or another form; shows their shapes.
    """
    names: list[str] = []
    for where, batch in batches:
        columns = _columns_of_batch(where, batch, names, ragged=ragged)
        names = columns.names
        for index, row in enumerate(columns.rows()):
            yield f"{where}, its example {index}", row


def _columns_of_batch(where: str, batch: object, names: Sequence[str], *, ragged: bool) -> Columns:
    parts = batch if isinstance(batch, tuple) else (batch,)
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3:  # noqa: PLR2004 - x, y and sample_weight
        raise SourceError(f"{where}: a tuple of {len(parts)}; yield x, (x, y) or (x, y, sample_weight)")
    remedy = "give x, y and sample_weight of a batch one first dimension; for single examples, set data.batched: false"
    return columns_of(parts, where=where, remedy=remedy, names=names, ragged=ragged)


def dataset_is_batched(dataset: Any, reference: str, *, ragged: bool = False) -> bool | None:
    """Whether the elements of a `tf.data.Dataset` are batches, by their static shapes; None if that is not known.

    An element with a scalar has no batch dimension. If no first dimension is known, or if `batch()` made it, it is that
    of a batch.

    Args:
        reference: the user's function, for messages.
        ragged: whether examples may differ in length. Then vectors of unknown length are single sequences: a batch of
            numbers could not be padded or packed.

    Raises:
        SourceError: a component is ragged, and must not be; has the line that pads it.
    """
    shapes: list[Any] = []
    for spec in _leaves(dataset.element_spec):
        if type(spec).__name__ == "RaggedTensorSpec" and not ragged:
            raise SourceError(
                message(
                    f"{reference}: the tf.data.Dataset has a RaggedTensor {spec.shape}: {dataset.element_spec}",
                    hints=[
                        "pad it: n = …  # the longest, or your limit",
                        "dataset = dataset.map(lambda x, y: (x.to_tensor(shape=[None, n]), y))",
                        "or let Baton pad it: data.pad: {x: n}",
                    ],
                )
            )
        shapes.append(getattr(spec, "shape", None))
    if any(shape is not None and shape.rank == 0 for shape in shapes):
        return False
    if any(shape is None or shape.rank is None for shape in shapes):
        return None
    if ragged and all(shape is not None and shape.rank == 1 for shape in shapes):
        return False
    first = {shape[0] for shape in shapes}
    if first == {None}:
        return True
    return True if len(first) == 1 and None not in first and _ends_with_batch(dataset) else None


def _ends_with_batch(dataset: Any) -> bool:
    """Whether `batch()` is the last operation that grouped examples; no public function tells."""
    for _ in range(_DATASET_CHAIN):
        name = type(dataset).__name__
        if "BatchDataset" in name and "Unbatch" not in name:
            return True
        dataset = getattr(dataset, "_input_dataset", None)
        if dataset is None or any(word in name for word in _REGROUPING):
            return False
    return False


def describe_spec(dataset: Any) -> str:
    """Return text such as `float32[None, 8], int64[None]`."""
    specs = _leaves(dataset.element_spec)
    return ", ".join(
        f"{getattr(getattr(spec, 'dtype', None), 'name', type(spec).__name__)}{_sizes(getattr(spec, 'shape', None))}"
        for spec in specs
    )


def _sizes(shape: Any) -> str:
    return "[?]" if shape is None or shape.rank is None else str(shape.as_list())


def _leaves(spec: Any) -> Sequence[Any]:
    import tensorflow as tf

    leaves: Sequence[Any] = tf.nest.flatten(spec)
    return leaves


def number_of_batches(dataset: Any) -> int | None:
    """Return the number of batches of a `PyDataset`; None if it has no end. As in Keras, `num_batches` is `len()`."""
    try:
        found = dataset.num_batches
    except (NotImplementedError, TypeError):
        return None
    return None if found is None else int(found)
