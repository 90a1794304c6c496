"""Images of stripes; the target is the image itself."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(26)
    rows, columns = np.mgrid[0:8, 0:8]
    for _ in range(examples):
        angle = draw.uniform(0, np.pi)
        image = 0.5 + 0.5 * np.sin(rows * np.cos(angle) + columns * np.sin(angle) + draw.uniform(0, 6))
        image = image[..., None].astype("float32")
        yield image, image
