"""Images with a disk, and the mask of the disk."""

import numpy as np


def load(examples=128):
    draw = np.random.default_rng(30)
    rows, columns = np.mgrid[0:16, 0:16]
    for _ in range(examples):
        row, column, radius = draw.uniform(4, 12), draw.uniform(4, 12), draw.uniform(2, 5)
        mask = np.hypot(rows - row, columns - column) < radius
        image = 0.6 * mask + draw.normal(scale=0.3, size=(16, 16))
        yield image[..., None].astype("float32"), mask[..., None].astype("uint8")
