"""Sixty examples of three classes, by arithmetic."""

import numpy as np


def load():
    for index in range(60):
        x = np.sin(np.arange(4) * (index + 1)) + index % 3
        yield np.float32(x), index % 3
