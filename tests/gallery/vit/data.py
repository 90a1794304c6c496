"""Images of blobs in one of four quarters."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(2)
    rows, columns = np.mgrid[0:12, 0:12]
    for index in range(examples):
        quarter = index % 4
        top, left = draw.uniform(1, 5, size=2) + 6 * np.array([quarter // 2, quarter % 2])
        blob = np.exp(-((rows - top) ** 2 + (columns - left) ** 2) / 6)
        noise = draw.normal(scale=0.1, size=(12, 12, 3))
        yield (255 * np.clip(blob[..., None] + noise, 0, 1)).astype("uint8"), quarter
