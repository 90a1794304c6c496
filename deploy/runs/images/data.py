"""Images of four shapes."""

from collections.abc import Iterator
from typing import Any

import numpy as np

SIZE = 24


def load(examples: int = 3200) -> Iterator[tuple[Any, Any]]:
    """Yield an image, uint8 [24, 24, 3], and its class: 0 disc, 1 square, 2 ring, 3 cross."""
    yield from _drawn(examples, seed=17)


def load_validation(examples: int = 800) -> Iterator[tuple[Any, Any]]:
    """Yield images that are not among those of `load`."""
    yield from _drawn(examples, seed=18)


def _drawn(examples: int, seed: int) -> Iterator[tuple[Any, Any]]:
    draw = np.random.default_rng(seed)
    for number in range(examples):
        kind = number % 4
        yield _image(draw, kind), np.int64(kind)


def _image(draw: np.random.Generator, kind: int) -> Any:
    row, column = np.mgrid[:SIZE, :SIZE] - draw.uniform(8, 16, (2, 1, 1))
    reach = draw.uniform(4, 8)
    distance, side = np.hypot(row, column), np.maximum(abs(row), abs(column))
    arms = (np.minimum(abs(row), abs(column)) < reach / 4) & (side < reach)
    inside = [distance < reach, side < 0.9 * reach, abs(distance - reach) < reach / 4, arms][kind]
    paper = draw.integers(0, 256, 3)
    ink = (paper + draw.integers(90, 166, 3)) % 256  # always seen on the paper
    image = np.where(inside[..., None], ink, paper) + draw.normal(0, 6, (SIZE, SIZE, 3))
    return image.clip(0, 255).astype(np.uint8)
