"""Pieces of a text in characters; the target is the next character."""

import numpy as np

WORDS = ("red", "green", "blue", "round", "square", "flat")


def load(examples=160, length=12):
    draw = np.random.default_rng(29)
    text = " ".join(draw.choice(WORDS, size=600))
    letters = sorted(set(text))
    codes = np.array([letters.index(letter) for letter in text], "uint8")
    for begin in range(0, examples * length, length):
        yield codes[begin : begin + length], codes[begin + 1 : begin + length + 1]
