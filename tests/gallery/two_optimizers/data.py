"""Ratings that users gave to items."""

import numpy as np


def load(examples=200, users=20, items=15):
    draw = np.random.default_rng(19)
    taste, kind = draw.normal(size=(users, 3)), draw.normal(size=(items, 3))
    for _ in range(examples):
        user, item = draw.integers(users), draw.integers(items)
        rating = taste[user] @ kind[item] + draw.normal(scale=0.1)
        yield np.array([user, item], "int32"), np.float32([rating])
