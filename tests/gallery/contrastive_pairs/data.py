"""Pairs of handwritten-like strokes: 1 if both are of the same kind, 0 if not."""

import numpy as np


def stroke(draw, kind):
    time = np.linspace(0, 1, 12)
    shape = [time, np.sin(3 * time), time**2 - time][kind]
    return (shape + draw.normal(scale=0.1, size=12)).astype("float32")


def load(pairs=160):
    draw = np.random.default_rng(10)
    for index in range(pairs):
        kind = draw.integers(3)
        other = kind if index % 2 else (kind + draw.integers(1, 3)) % 3
        yield {"left": stroke(draw, kind), "right": stroke(draw, other)}, np.float32([index % 2])
