"""Shapes that can be read two ways: as one example, or as a batch of them."""

from collections.abc import Mapping

# Dtype and shape by name, as `features.flatten` names them.
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def common_length(shapes: Shapes) -> int | None:
    """The number of examples, if these may be a batch: one first dimension above 1 that x and y share, and all others.

    A scalar label has none, so an image with its class is one example. Without y nothing could be told from an image.
    """
    if not any(_is_of(name, "y") for name in shapes):
        return None
    lengths = {shape[0] if shape else 0 for _, shape in shapes.values()}
    (length, *others) = lengths
    return length if not others and length > 1 else None


def without_length(shapes: Shapes) -> Shapes:
    """What one example of such a batch looks like."""
    return {name: (dtype, shape[1:]) for name, (dtype, shape) in shapes.items()}


def shape_words(shapes: Shapes) -> str:
    """As `x float32[8] and y int64[]`."""
    told = [f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in shapes.items()]
    return " and ".join([", ".join(told[:-1]), told[-1]]) if len(told) > 1 else told[0]


def _is_of(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")
