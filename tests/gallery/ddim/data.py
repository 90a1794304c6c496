"""Images of slopes in different directions."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(19)
    rows, columns = np.mgrid[0:8, 0:8] / 7 - 0.5
    for _ in range(examples):
        angle = draw.uniform(0, 2 * np.pi)
        yield (0.5 + np.cos(angle) * rows + np.sin(angle) * columns)[..., None].astype("float32")
