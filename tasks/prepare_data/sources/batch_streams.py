"""Batches that a user's source gives: a `tf.data.Dataset`, a `keras.utils.PyDataset`, or a generator of batches."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tasks.foundation.errors import SourceError
from tasks.foundation.messages import message
from tasks.prepare_data.sources.base import LocatedExample
from tasks.prepare_data.sources.columns import Columns, columns_of

_DATASET_CHAIN = 100
# Operations after which the first dimension of an element is no longer that of the batch.
_REGROUPING = ("Unbatch", "FlatMap", "Interleave", "Window", "Generator", "Zip", "Concatenate", "Choose")


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
        dataset: the dataset.
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
