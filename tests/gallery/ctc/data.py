"""Signals that spell short words; labels are padded with 0, the blank."""

import numpy as np

LETTERS, FRAMES, LONGEST = 5, 16, 4


def load(examples=160):
    draw = np.random.default_rng(11)
    tones = draw.normal(size=(LETTERS + 1, 6))
    for _ in range(examples):
        length = draw.integers(2, LONGEST + 1)
        word = draw.integers(1, LETTERS + 1, size=length)
        signal = draw.normal(scale=0.3, size=(FRAMES, 6))
        for index, letter in enumerate(word):
            begin = 1 + index * 4
            signal[begin : begin + 2] += tones[letter]
        yield signal.astype("float32"), np.pad(word, (0, LONGEST - length)).astype("int32")
