"""Noisy steps of a damped oscillator, with its start."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(22)
    for _ in range(examples):
        position, speed, path = draw.normal(), draw.normal(), []
        start = np.array([position, speed], "float32")
        for _ in range(11):
            speed -= 0.2 * position + 0.05 * speed
            position += 0.5 * speed
            path.append([position + draw.normal(scale=0.02)])
        path = np.array(path, "float32")
        yield {"start": start, "path": path[:-1]}, path[1:]
