"""Points near a spiral in five dimensions."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(33)
    directions = draw.normal(size=(3, 5))
    for _ in range(examples):
        time = draw.uniform(0, 6)
        x = np.array([time / 3, np.cos(time), np.sin(time)]) @ directions
        x = (x + draw.normal(scale=0.05, size=5)).astype("float32")
        yield x, x
