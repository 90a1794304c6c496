"""Vectors that few hidden features explain."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(24)
    basis = draw.normal(size=(6, 12))
    for _ in range(examples):
        chosen = draw.uniform(size=6) < 0.3
        x = ((chosen * draw.uniform(0.5, 1.5, size=6)) @ basis).astype("float32")
        yield x, x
