"""Seeded pseudo-randomness that is plain arithmetic: the same on every machine and in every version of NumPy."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_CHUNK = 4096


def hashes(purpose: str, seed: int, begin: int, end: int) -> npt.NDArray[np.uint64]:
    """One hash for each index of [begin, end), uniform over 64 bits (SplitMix64, Steele et al. 2014).

    Args:
        purpose: hashes for different purposes have nothing to do with each other.
        seed: of the run.
        begin: first index.
        end: one past the last.
    """
    start = int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8], "little")
    z = np.arange(begin + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fractions(purpose: str, seed: int) -> Iterator[float]:
    """A number in [0, 1) for each index from 0 on, without end."""
    begin = 0
    while True:
        # The upper 53 bits are what a float64 holds exactly.
        yield from ((hashes(purpose, seed, begin, begin + _CHUNK) >> np.uint64(11)) * 2.0**-53).tolist()
        begin += _CHUNK


def permutation(purpose: str, seed: int, size: int) -> list[int]:
    """A permutation of range(size)."""
    return [int(index) for index in np.argsort(hashes(purpose, seed, 0, size), kind="stable")]
