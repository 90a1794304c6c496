"""Images with a bar that is either horizontal or vertical."""

import numpy as np


def load(examples=200):
    draw = np.random.default_rng(1)
    for index in range(examples):
        image = draw.normal(scale=0.2, size=(10, 10, 1)).astype("float32")
        at = draw.integers(2, 8)
        if index % 2:
            image[at, 2:8] += 1
        else:
            image[2:8, at] += 1
        yield image, np.eye(2, dtype="float32")[index % 2]
