"""What `load` returns, where arrays of many examples would be taken for a few examples.

`return x, y` and `return (x_train, y_train), (x_test, y_test)` are what functions of Keras's return. Iterated, they are
two things, and of equal shapes they would pass as two examples, test data among them.
"""

from collections.abc import Mapping, Sequence

from tasks.foundation.dataset.batch_or_example import common_length, shape_words, without_length
from tasks.foundation.dataset.features import flatten
from tasks.foundation.errors import SourceError
from tasks.foundation.messages import message

# Training, validation and test data; x, y and sample_weight; x and y of training and test data.
_MOST_SETS, _MOST_PARTS = 3, 4
_REMEDY = (
    "yield the examples one by one, as yield from zip(x, y), of one set only: what is held out is "
    "data.validation_fraction of it"
)


def require_examples(reference: str, examples: object) -> None:
    """Refuse a tuple or list that can be read as whole arrays of examples.

    Args:
        reference: of the function that returned it, for messages.
        examples: what it returned.

    Raises:
        SourceError: naming both readings by their shapes.
    """
    if not isinstance(examples, tuple | list):
        return
    sets = _sets(examples)
    lengths = [length for each in sets if (length := common_length(_shapes(each))) is not None]
    if not sets or len(lengths) != len(sets):
        return
    kind = type(examples).__name__
    counted = "one set" if len(sets) == 1 else f"{len(sets)} sets"
    each = without_length(_shapes(sets[0]))
    raise SourceError(
        message(
            f"{reference}: returned a {kind} of {len(examples)}, which can be read two ways",
            details=[
                f"as {len(examples)} single examples: {_words(examples[0])} and so on",
                f"as arrays: {counted} of {', '.join(map(str, lengths))} examples of {shape_words(each)}",
            ],
            hints=[_REMEDY, f"or say data.batched: false, if they are {len(examples)} single examples"],
        )
    )


def _sets(examples: Sequence[object]) -> list[tuple[object, ...]]:
    """The sets of arrays that they may be; none if they can only be examples."""
    if 1 <= len(examples) <= _MOST_SETS and all(isinstance(each, tuple) for each in examples):
        return [each for each in examples if isinstance(each, tuple)]
    if not 1 < len(examples) <= _MOST_PARTS or any(isinstance(each, tuple) for each in examples):
        return []
    if len(examples) == _MOST_PARTS:
        return [tuple(examples[:2]), tuple(examples[2:])]
    return [tuple(examples)]


def _shapes(parts: tuple[object, ...]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape by name; nothing where they are no arrays, which `flatten` says better when it is their turn."""
    try:
        return {name: (array.dtype.name, array.shape) for name, array in flatten(parts).items()}
    except ValueError:
        return {}


def _words(example: object) -> str:
    shapes = _shapes(example if isinstance(example, tuple) else (example,))
    told = ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in shapes.items())
    return f"({told})" if isinstance(example, tuple) else told
