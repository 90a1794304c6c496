"""Windows of a series of three measurements; the next hours of the first one are to be predicted."""

import numpy as np


def load(past=24, future=4, every=2):
    draw = np.random.default_rng(13)
    hours = np.arange(360)
    day = np.sin(2 * np.pi * hours / 24)
    series = np.stack([day + 0.01 * hours, np.roll(day, 5), draw.normal(size=360)], axis=1)
    series[:, 0] += 0.1 * np.cumsum(draw.normal(scale=0.1, size=360))
    series = ((series - series.mean(axis=0)) / series.std(axis=0)).astype("float32")
    for begin in range(0, len(series) - past - future, every):
        yield series[begin : begin + past], series[begin + past : begin + past + future, 0]
