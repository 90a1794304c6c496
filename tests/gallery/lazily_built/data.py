"""Documents as counts of words."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(18)
    topics = draw.dirichlet(np.full(30, 0.3), size=4)
    for index in range(examples):
        yield draw.multinomial(25, topics[index % 4]).astype("float32"), index % 4
