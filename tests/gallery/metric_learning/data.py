"""Anchors and positives: row k of both is of class k."""

import numpy as np

CLASSES = 6


def load(examples=96):
    draw = np.random.default_rng(25)
    centers = draw.normal(size=(CLASSES, 8))
    for _ in range(examples):
        noise = draw.normal(scale=0.4, size=(2, CLASSES, 8))
        yield (centers + noise).astype("float32")
