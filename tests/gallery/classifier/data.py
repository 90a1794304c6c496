"""Points of three spirals."""

import numpy as np


def load(examples=200):
    draw = np.random.default_rng(0)
    for index in range(examples):
        arm = index % 3
        radius = draw.uniform(0.1, 1)
        angle = 4 * radius + 2 * np.pi * arm / 3 + draw.normal(scale=0.1)
        yield np.array([radius * np.cos(angle), radius * np.sin(angle)], "float32"), arm
