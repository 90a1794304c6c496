"""Shapes that may mean one example or a batch of examples."""

from collections.abc import Mapping, Sequence

# Name -> (dtype, shape); names as in `features.flatten`.
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def shared_batch_size(shapes: Shapes) -> int | None:
    """Return the batch size if these shapes may be a batch: x and y share one first dimension, which is above 1.

    A scalar label has no dimension, so an image with its class is one example. Without y the shapes are not conclusive.
    """
    if not any(_is_of(name, "y") for name in shapes):
        return None
    lengths = {shape[0] if shape else 0 for _, shape in shapes.values()}
    (length, *others) = lengths
    return length if not others and length > 1 else None


def single_example_shapes(shapes: Shapes) -> Shapes:
    """Return the shapes of one example of such a batch."""
    return {name: (dtype, shape[1:]) for name, (dtype, shape) in shapes.items()}


def describe_shapes(shapes: Mapping[str, tuple[str, Sequence[int | None]]]) -> str:
    """Return text such as `x float32[8] and y int64[]`."""
    words = [f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in shapes.items()]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _is_of(name: str, part: str) -> bool:
    return name == part or name.startswith((f"{part}/", f"{part}["))
