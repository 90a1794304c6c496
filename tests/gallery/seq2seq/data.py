"""Numbers to be written backwards; 0 pads, 1 begins and 2 ends a sequence."""

import numpy as np

BEGIN, END, LONGEST = 1, 2, 6


def load(examples=160):
    draw = np.random.default_rng(12)
    for _ in range(examples):
        length = draw.integers(2, LONGEST + 1)
        digits = draw.integers(3, 13, size=length)
        source = np.zeros(LONGEST, "int32")
        source[:length] = digits
        spoken = np.zeros(LONGEST + 2, "int32")
        spoken[: length + 2] = [BEGIN, *digits[::-1], END]
        yield {"source": source, "target_in": spoken[:-1]}, spoken[1:]
