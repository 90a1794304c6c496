"""Rows of a table with numbers and categories."""

import numpy as np


def load(examples=200):
    draw = np.random.default_rng(14)
    for _ in range(examples):
        age, hours = draw.uniform(18, 70), draw.uniform(10, 60)
        job, town = draw.integers(6), draw.integers(12)
        earns_more = age / 70 + hours / 60 + (job in {1, 4}) * 0.5 > 1.5
        row = {"age": [age], "hours": [hours], "job": [job], "town": [town]}
        features = {
            key: np.array(value, "int64" if key in {"job", "town"} else "float32") for key, value in row.items()
        }
        yield features, np.array([earns_more], "float32")
