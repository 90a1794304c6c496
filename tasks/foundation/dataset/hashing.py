"""A seeded hash of an index. It uses integer arithmetic only, so machines and NumPy versions agree."""

import hashlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


def hashes(purpose: str, seed: int, begin: int, end: int) -> Words:
    """Hash each index in [begin, end): uniform 64-bit words (SplitMix64, Steele et al. 2014).

    Args:
        purpose: hashes for different purposes are independent.
        seed: the run's seed.
        begin: first index.
        end: one past the last index.
    """
    start = int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8], "little")
    return mix(np.arange(begin + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start))


def unit_interval(words: Words) -> npt.NDArray[np.float64]:
    """Convert hashes to numbers in [0, 1): the upper 53 bits, which a float64 represents exactly."""
    return (words >> np.uint64(11)) * np.float64(2.0**-53)


def mix(words: Words) -> Words:
    """SplitMix64's finalizer: a bijection on 64-bit words in which each input bit affects every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
