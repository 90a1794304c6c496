"""Random graphs of up to eight nodes; whether a graph has a triangle."""

import numpy as np

NODES = 8


def load(examples=160):
    draw = np.random.default_rng(15)
    for _ in range(examples):
        upper = np.triu(draw.uniform(size=(NODES, NODES)) < draw.uniform(0.1, 0.4), 1)
        edges = (upper | upper.T).astype("float32")
        features = np.stack([edges.sum(axis=1), np.ones(NODES)], axis=1)
        has_triangle = np.trace(edges @ edges @ edges) > 0
        yield {"features": features.astype("float32"), "edges": edges}, np.float32([has_triangle])
