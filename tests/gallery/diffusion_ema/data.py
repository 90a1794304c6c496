"""Images of crosses at different places."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(8)
    for _ in range(examples):
        image = np.zeros((8, 8, 1), "float32")
        row, column = draw.integers(1, 7, size=2)
        image[row - 1 : row + 2, column] = 1
        image[row, column - 1 : column + 2] = 1
        yield image
