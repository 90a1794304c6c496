"""Refuses a `load` function that returns several sets, or a list of whole arrays, which may be a few examples.

Keras's data functions return `x, y` or `(x_train, y_train), (x_test, y_test)`. Iterating over that yields two items,
which with equal shapes would pass as two examples, test data included.
"""

from collections.abc import Mapping, Sequence

from tasks.foundation.dataset.example_shapes import describe_shapes, shared_batch_size, single_example_shapes
from tasks.foundation.dataset.features import flatten
from tasks.foundation.errors import SourceError
from tasks.foundation.messages import message

# Training, validation and test sets; x and y of training and test.
_MOST_SETS, _MOST_PARTS = 3, 4
_REMEDY = (
    "return the arrays of one set as a tuple: return x, y (or yield from zip(x, y)); Baton holds out "
    "data.validation_fraction of them"
)


def require_examples(reference: str, examples: object) -> None:
    """Refuse a tuple or list that may consist of whole arrays.

    Args:
        reference: the function that returned it, for messages.
        examples: what it returned.

    Raises:
        SourceError: describes both readings by their shapes.
    """
    if not isinstance(examples, tuple | list):
        return
    sets = _sets(examples)
    lengths = [length for each in sets if (length := shared_batch_size(_shapes(each))) is not None]
    if not sets or len(lengths) != len(sets):
        return
    kind = type(examples).__name__
    counted = "one set" if len(sets) == 1 else f"{len(sets)} sets"
    each = single_example_shapes(_shapes(sets[0]))
    raise SourceError(
        message(
            f"{reference}: returned a {kind} of {len(examples)}, which can be read two ways",
            details=[
                f"as {len(examples)} single examples: {_shape_of(examples[0])} and so on",
                f"as arrays: {counted} of {', '.join(map(str, lengths))} examples of {describe_shapes(each)}",
            ],
            hints=[_REMEDY, f"or, if they are {len(examples)} single examples, set data.batched: false"],
        )
    )


def _sets(examples: Sequence[object]) -> list[tuple[object, ...]]:
    """Return the sets of arrays that the items may be; empty if they can only be examples."""
    if 1 <= len(examples) <= _MOST_SETS and all(isinstance(each, tuple) for each in examples):
        return [each for each in examples if isinstance(each, tuple)]
    if not 1 < len(examples) <= _MOST_PARTS or any(isinstance(each, tuple) for each in examples):
        return []
    if len(examples) == _MOST_PARTS:
        return [tuple(examples[:2]), tuple(examples[2:])]
    return [tuple(examples)]


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
