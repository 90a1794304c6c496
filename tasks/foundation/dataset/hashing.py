"""A seeded hash of an index that is plain arithmetic: the same on every machine and in every version of NumPy."""

import hashlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


def hashes(purpose: str, seed: int, begin: int, end: int) -> Words:
    """One hash for each index of [begin, end), uniform over 64 bits (SplitMix64, Steele et al. 2014).

    Args:
        purpose: hashes for different purposes have nothing to do with each other.
        seed: of the run.
        begin: first index.
        end: one past the last.
    """
    start = int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8], "little")
    return mix(np.arange(begin + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start))


def unit_interval(words: Words) -> npt.NDArray[np.float64]:
    """Hashes as numbers in [0, 1): their upper 53 bits, which a float64 holds exactly."""
    return (words >> np.uint64(11)) * np.float64(2.0**-53)


def mix(words: Words) -> Words:
    """SplitMix64's finalizer: a bijection of 64-bit words that spreads every bit over all."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
