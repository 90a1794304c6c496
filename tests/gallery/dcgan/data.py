"""Images of squares of different sizes."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(17)
    for _ in range(examples):
        image = np.zeros((8, 8, 1), "float32")
        row, column = draw.integers(0, 4, size=2)
        size = draw.integers(2, 5)
        image[row : row + size, column : column + size] = 1
        yield image
