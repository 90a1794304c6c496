"""Support tickets: words of title and body, tags; their priority and department."""

import numpy as np


def load(examples=160):
    draw = np.random.default_rng(5)
    for _ in range(examples):
        title = draw.integers(1, 40, size=6)
        body = draw.integers(1, 40, size=10)
        tags = (draw.uniform(size=5) < 0.4).astype("float32")
        priority = np.array([np.mean(title > 20) * 0.5 + 0.1 * tags.sum()], "float32")
        department = np.eye(3, dtype="float32")[body.sum() % 3]
        yield {"title": title, "body": body, "tags": tags}, {"priority": priority, "department": department}
