"""An imbalanced problem; rare examples weigh more, and doubtful ones less."""

import numpy as np


def load(examples=200):
    draw = np.random.default_rng(23)
    for _ in range(examples):
        rare = draw.uniform() < 0.15
        x = draw.normal(loc=1.0 if rare else -0.3, size=6).astype("float32")
        doubt = draw.uniform()
        weight = (5.0 if rare else 1.0) * (1 - 0.5 * doubt)
        yield x, np.float32([rare]), np.float32(weight)
