"""Sixty small examples of several forms."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def load(form: str = "plain", examples: int = 60) -> Iterator[Any]:
    """Yield examples with x: float32 [6] and y: int64 in [0, 3).

    Args:
        form: "plain": x, y. "weighted": x, y, sample weight. "dicts": two inputs and two outputs. "sequence": x [5, 4],
            y. "alone": x. "labelled": x [7] that begins with the example's number, y. "numbered": x is the number, y.
            "divergent": x is 1, and 1e30 in the first example, y.
        examples: number of examples.
    """
    draw = np.random.default_rng(7)
    for number in range(examples):
        x = draw.normal(size=6).astype(np.float32)
        y = np.int64(number % 3)
        x[y] += 1.5
        match form:
            case "weighted":
                yield x, y, np.float32(0.5 + number % 4)
            case "dicts":
                yield {"left": x[:4], "right": x[4:]}, {"kind": y, "size": x[:1] * 2}
            case "sequence":
                yield np.stack([x[:4]] * 5) * np.arange(1, 6, dtype=np.float32)[:, None], y
            case "alone":
                yield x
            case "labelled":
                yield np.concatenate([np.float32([number]), x]), y
            case "numbered":
                yield np.full(6, number, np.float32), y
            case "divergent":
                yield (np.full(6, np.float32(1e30) if number == 0 else np.float32(1)), y)
            case _:
                yield x, y
