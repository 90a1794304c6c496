"""Points on two circles."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(6)
    for _ in range(examples):
        angle = draw.uniform(0, 2 * np.pi)
        radius = draw.choice([0.5, 1.0]) + draw.normal(scale=0.02)
        yield np.array([radius * np.cos(angle), radius * np.sin(angle)], "float32")
