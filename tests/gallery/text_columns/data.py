"""Orders as a tf.data.Dataset: two columns of strings, a sentence, and a number."""

import numpy as np
import tensorflow as tf

SHOPS = [f"shop-{number}" for number in range(12)]
COLOURS = ["red", "green", "blue", "black"]
WORDS = ["fast", "slow", "good", "bad", "cheap", "dear", "late", "nice"]


def load(examples=200):
    draw = np.random.default_rng(15)
    rows = {
        "shop": draw.choice(SHOPS, size=examples),
        "colour": draw.choice(COLOURS, size=examples),
        "review": np.array([" ".join(draw.choice(WORDS, size=draw.integers(2, 7))) for _ in range(examples)]),
        "price": draw.uniform(1, 9, size=examples).astype("float32"),
    }
    again = np.array(["good" in text or "nice" in text for text in rows["review"]], "float32")
    return tf.data.Dataset.from_tensor_slices((rows, again))
