"""What a user's function returned that is refused before it is read: no end, several sets, two readings.

Keras's data functions return `(x_train, y_train), (x_test, y_test)`. Iterating over that yields two items, which with
equal shapes would pass as two examples, test data included. So several sets are refused in all the forms in which
people return them (tuples, four or six arrays, a dict, datasets), with the lines that make two functions of one, for
`data.source` and `data.validation`. A list of whole arrays that may also be a few examples is refused with both
readings by their shapes. A source that never ends is noticed before it fills the disk.
"""

import itertools
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.tasks.foundation.dataset.features import (
    describe_shapes,
    flatten,
    shared_batch_size,
    single_example_shapes,
)
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.text import listed, message
from baton.tasks.prepare_data.sources.returned_arrays import describe_spec, is_py_dataset, is_tf_dataset

_HINT = "set data.examples: N to take the first N examples, or let the source end after one pass over the data"
# Training, validation and test sets.
_MOST_SETS = 3
_REMEDY = (
    "return the arrays of one set as a tuple: return x, y (or yield from zip(x, y)); Baton holds out "
    "data.validation_fraction of them"
)
_ONE_SET = "or return one set: return x, y (or yield from zip(x, y)); Baton holds out data.validation_fraction of it"
# How people name sets, in the order in which Baton takes them.
_NAMES: Final = (("train", "training"), ("val", "valid", "validation", "dev", "eval"), ("test",))
_NAMED_PART = re.compile(rf"([A-Za-z]\w*?)_({'|'.join(itertools.chain(*_NAMES))})", re.IGNORECASE)
_PARTS_IN_ORDER = ("x", "features", "images", "inputs", "y", "labels", "targets")


@dataclass(frozen=True, slots=True)
class _Set:
    """One of several sets.

    Attributes:
        content: x, (x, y) or (x, y, sample_weight); or a dataset.
        body: the lines of a function that returns it; `{sets}` stands for the call that returns all.
    """

    content: object
    body: tuple[str, ...]

    @classmethod
    def taken(cls, content: object, index: str) -> "_Set":
        """The set that an index takes from what was returned."""
        return cls(content, (f"return {{sets}}[{index}]",))

    @property
    def shapes(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of its arrays by name; empty if they are not known."""
        if is_dataset(self.content):
            return {}
        return _shapes(self.content if isinstance(self.content, tuple) else (self.content,))


def refuse_several_sets(
    reference: str, returned: object, options: Mapping[str, Any], *, datasets_only: bool = False
) -> None:
    """Refuse a training set that is returned with a validation or test set, and a dataset with anything else.

    Args:
        reference: the function that returned it, `data.py:load`.
        options: `data.options`, which the lines to paste pass on.
        datasets_only: whether only several datasets are refused, because `data.batched` says what arrays are.

    Raises:
        SourceError: has the lines that make two functions of one, and the keys that name them.
    """
    sets = list(_sets_of(returned))
    if len(sets) == 1 and isinstance(returned, tuple | list):
        kinds = ", ".join(type(each).__name__ for each in returned)
        raise SourceError(
            f"{reference}: returned a {type(returned).__name__} of {kinds}; return the training data alone: "
            "return train_dataset"
        )
    if len(sets) < 2 or (datasets_only and not any(is_dataset(each.content) for each in sets)):  # noqa: PLR2004 - several
        return
    module, _, name = reference.rpartition(":")
    call = f"{name}_sets({'**options' if options else ''})"
    parameters = "**options" if options else ""
    functions = (name, f"{name}_validation", f"{name}_test")
    lines = []
    for function, each in zip(functions, sets, strict=False):
        lines += ["", f"def {function}({parameters}):", *(f"    {line.replace('{sets}', call)}" for line in each.body)]
    keys = [f"source: {reference}"]
    for key, function in zip(("validation", "test"), functions[1 : len(sets)], strict=False):
        source = f"{module}:{function}"
        own = f"{{source: {source}, options: {json.dumps(dict(options), default=str)}}}" if options else source
        keys.append(f"{key}: {own}")
    text = [
        f"{reference}: returned {_words(sets)}; a function returns one set, and data.validation names the other one",
        f"  rename {name} to {name}_sets in {module}, and paste below it:",
        *(f"    {line}".rstrip() for line in lines[1:]),
        "  and name them in the run file under data, in place of source and validation_fraction:",
        *(f"    {line}" for line in keys),
    ]
    hints = [_ONE_SET]
    same = len({repr(each.shapes) for each in sets}) == 1  # others are no two examples of one form
    if isinstance(returned, tuple | list) and same and not any(is_dataset(each.content) for each in sets):
        if all(isinstance(each, tuple) for each in returned):
            hints.append("or, if they are several inputs and outputs, return lists: return [x1, x2], [y1, y2]")
        hints.append(f"or, if they are {_items(returned)}, set data.batched: false")
    raise SourceError(message("\n".join(text), hints=hints))


def is_dataset(value: object) -> bool:
    """Whether a value is a dataset of TensorFlow or Keras."""
    return is_tf_dataset(value) or is_py_dataset(value)


def _words(sets: Sequence[_Set]) -> str:
    shapes = [each.shapes for each in sets]
    if not all(shapes):
        contents = [each.content for each in sets]
        kinds = [describe_spec(each) if is_tf_dataset(each) else type(each).__name__ for each in contents]
        return f"{len(sets)} sets ({listed(kinds)})"
    lengths = ", ".join(str(next(iter(each.values()))[1][0]) for each in shapes)
    return f"{len(sets)} sets of {lengths} examples of {describe_shapes(single_example_shapes(shapes[0]))}"


def _items(returned: Sequence[object]) -> str:
    return f"{len(returned)} single examples: {_shape_of(returned[0])} and so on"


def _sets_of(returned: object) -> Iterator[_Set]:
    """Yield the sets that a value certainly, or possibly, consists of; nothing if it is one, or single examples."""
    if isinstance(returned, Mapping):
        yield from _sets_of_names(returned)
    elif isinstance(returned, tuple | list):
        datasets = [(index, each) for index, each in enumerate(returned) if is_dataset(each)]
        if datasets:
            yield from (_Set.taken(each, str(index)) for index, each in datasets[:_MOST_SETS])
            return
        for sets in _ways(returned):
            if all(shared_batch_size(each.shapes) is not None for each in sets):
                yield from sets
                return


def _ways(returned: Sequence[object]) -> Iterator[list[_Set]]:
    """Yield the ways in which arrays may be several sets."""
    number = len(returned)
    if 1 < number <= _MOST_SETS and all(isinstance(each, tuple) for each in returned):
        yield [_Set.taken(each, str(index)) for index, each in enumerate(returned)]
        return
    if number == 3 and isinstance(returned[2], tuple):  # noqa: PLR2004 - x, y, validation_data as `fit` takes it
        sets = [_Set.taken(tuple(returned[:2]), ":2"), _Set.taken(returned[2], "2")]
        one, other = (single_example_shapes(each.shapes) for each in sets)
        if one == other:
            yield sets
    # Six arrays of one shape are as many examples.
    if number in {4, 6} and not any(isinstance(each, tuple) for each in returned) and not _is_of_equals(returned, 6):
        yield [_Set.taken(tuple(returned[at : at + 2]), f"{at}:{at + 2}") for at in range(0, number, 2)]
        # As scikit-learn's train_test_split returns them.
        yield [_Set.taken(tuple(returned[at :: number // 2]), f"{at}::{number // 2}") for at in range(number // 2)]


def _is_of_equals(returned: Sequence[object], number: int) -> bool:
    return len(returned) == number and len({_shape_of(each) for each in returned}) == 1


def _sets_of_names(returned: Mapping[Any, object]) -> Iterator[_Set]:
    """Yield the sets of a dict: of sets by name, as `train` and `val`, or of arrays, as `x_train` and `y_train`."""
    if not returned or not all(isinstance(key, str) for key in returned):
        return
    named = {key: _NAMED_PART.fullmatch(key) for key in returned}
    for names in _NAMES:
        of_set = [key for key in returned if key.lower() in names]
        parts = [key for key, found in named.items() if found is not None and found[2].lower() in names]
        if len(of_set) == 1 and all(any(key.lower() in each for each in _NAMES) for key in returned):
            yield _Set.taken(returned[of_set[0]], json.dumps(of_set[0]))
        elif parts and all(found is not None for found in named.values()):
            parts.sort(key=_order_of_part)
            content = tuple(returned[key] for key in parts)
            items = ", ".join(f"sets[{json.dumps(key)}]" for key in parts)
            yield _Set(content if len(content) > 1 else content[0], ("sets = {sets}", f"return {items}"))


def _order_of_part(key: str) -> int:
    part = key.rpartition("_")[0].lower()
    return _PARTS_IN_ORDER.index(part) if part in _PARTS_IN_ORDER else len(_PARTS_IN_ORDER)


def refuse_two_readings(reference: str, examples: object) -> None:
    """Refuse a list that may consist of the arrays of one set.

    Args:
        reference: the function that returned it, for messages.
        examples: what it returned.

    Raises:
        SourceError: describes both readings by their shapes.
    """
    if not isinstance(examples, tuple | list) or not 1 <= len(examples) <= _MOST_SETS:
        return
    if len(examples) > 1 and any(isinstance(each, tuple) for each in examples):
        return
    shapes = _shapes(examples[0] if isinstance(examples[0], tuple) else tuple(examples))
    length = shared_batch_size(shapes)
    if length is None:
        return
    raise SourceError(
        message(
            f"{reference}: returned a {type(examples).__name__} of {len(examples)}, which can be read two ways",
            details=[
                f"as {_items(examples)}",
                f"as arrays: one set of {length} examples of {describe_shapes(single_example_shapes(shapes))}",
            ],
            hints=[_REMEDY, f"or, if they are {len(examples)} single examples, set data.batched: false"],
        )
    )


def _shapes(parts: tuple[object, ...]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape by name; empty if they are not arrays, which `flatten` reports later."""
    try:
        return {name: (array.dtype.name, array.shape) for name, array in flatten(parts).items()}
    except ValueError:
        return {}


def _shape_of(example: object) -> str:
    shapes = _shapes(example if isinstance(example, tuple) else (example,))
    words = ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in shapes.items())
    return f"({words})" if isinstance(example, tuple) else words


def require_end(reference: str, returned: object) -> None:
    """Refuse an iterable that says itself that it has no end: a repeated dataset, `itertools.cycle`.

    Of a generator only reading tells, see `endless_warning`.

    Args:
        reference: the user's function, for messages.

    Raises:
        SourceError: it has no end; names data.examples.
    """
    reason = _reason(returned)
    if reason is not None:
        raise endless_error(reference, reason)


def endless_error(reference: str, reason: str) -> SourceError:
    """Return the error for a source that has no end."""
    return SourceError(message(f"{reference}: its examples have no end ({reason})", hints=[_HINT]))


def endless_warning(reference: str, examples: int) -> str:
    """Return the warning for a source that may have no end."""
    return f"{reference}: {examples:,} examples so far, and no end; if it has none, stop and {_HINT}"


def _reason(returned: object) -> str | None:
    cardinality = getattr(returned, "cardinality", None)
    if callable(cardinality) and type(returned).__module__.startswith("tensorflow"):
        return "a tf.data.Dataset with repeat()" if int(cardinality()) == -1 else None
    if isinstance(returned, itertools.cycle | itertools.count):
        return f"itertools.{type(returned).__name__}"
    if isinstance(returned, itertools.repeat) and operator.length_hint(returned, -1) == -1:
        return "itertools.repeat"
    return None
