"""Images with a spot in one of four corners."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(20)
    for _ in range(examples):
        corner = draw.integers(4)
        image = draw.normal(scale=0.3, size=(8, 8, 1)).astype("float32")
        image[4 * (corner // 2) + 1 : 4 * (corner // 2) + 3, 4 * (corner % 2) + 1 : 4 * (corner % 2) + 3] += 1
        yield image, corner
