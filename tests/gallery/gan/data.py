"""Short sine waves of different frequency and phase."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(4)
    time = np.linspace(0, 1, 16)
    for _ in range(examples):
        wave = np.sin(2 * np.pi * (draw.uniform(1, 2) * time + draw.uniform()))
        yield wave[:, None].astype("float32")
