"""Spectra with one or two peaks."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(20)
    at = np.arange(32)
    for index in range(examples):
        spectrum = draw.normal(scale=0.05, size=32)
        for center in draw.uniform(4, 28, size=1 + index % 2):
            spectrum += np.exp(-((at - center) ** 2) / 4)
        yield spectrum[:, None].astype("float32"), index % 2
