"""Sentences of two grammars, of very different lengths."""

import numpy as np


def load(step=1, sentences=60):
    draw = np.random.default_rng(step)
    for _ in range(sentences):
        length = draw.integers(3, 20)
        tokens = 1 + (draw.integers(16) + step * np.arange(length)) % 16
        yield tokens[:-1].astype("int32"), tokens[1:].astype("int32")
