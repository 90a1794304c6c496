"""Points around three centers; one of them may lie so far away that its loss is infinite."""

import numpy as np


def load(seed=0, count=60, far=None):
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % 3).astype("int32")
    points = (generator.normal(size=(count, 4)) + labels[:, None]).astype("float32")
    if far is not None:
        points[far] = 3e38
    return points, labels
