"""Weights of pretrained layers, by path."""

from typing import Any

import numpy as np

SHAPES = {
    "first/kernel": (6, 8),
    "first/bias": (8,),
    "norm/gamma": (8,),
    "norm/beta": (8,),
    "norm/moving_mean": (8,),
    "norm/moving_variance": (8,),
}


def load() -> dict[str, Any]:
    draw = np.random.default_rng(3)
    return {path: draw.uniform(0.1, 1, size=shape).astype(np.float32) for path, shape in SHAPES.items()}
