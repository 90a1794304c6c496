"""Seeded pseudo-randomness that is plain arithmetic: the same on every machine and in every version of NumPy."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_CHUNK = 4096
_ROUNDS = 8

_Words = npt.NDArray[np.uint64]


def hashes(purpose: str, seed: int, begin: int, end: int) -> _Words:
    """One hash for each index of [begin, end), uniform over 64 bits (SplitMix64, Steele et al. 2014).

    Args:
        purpose: hashes for different purposes have nothing to do with each other.
        seed: of the run.
        begin: first index.
        end: one past the last.
    """
    start = int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8], "little")
    return _mix(np.arange(begin + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start))


def fractions(purpose: str, seed: int) -> Iterator[float]:
    """A number in [0, 1) for each index from 0 on, without end."""
    begin = 0
    while True:
        # The upper 53 bits are what a float64 holds exactly.
        yield from ((hashes(purpose, seed, begin, begin + _CHUNK) >> np.uint64(11)) * 2.0**-53).tolist()
        begin += _CHUNK


def positions(purpose: str, seed: int, size: int) -> Iterator[int]:
    """A permutation of range(size) that is never held: where index 0, 1, 2, … goes.

    A Feistel network permutes the smallest range of 4^k numbers that holds `size`; what falls outside goes through it
    again until it falls inside (cycle walking: Black and Rogaway 2002).

    Args:
        purpose: permutations for different purposes have nothing to do with each other.
        seed: of the run.
        size: at most 2^62 items.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = hashes(f"{purpose}/rounds", seed, 0, _ROUNDS)
    for begin in range(0, size, _CHUNK):
        values = np.arange(begin, min(begin + _CHUNK, size), dtype=np.uint64)
        outside = np.ones(len(values), np.bool_)
        while outside.any():
            values[outside] = _feistel(values[outside], keys, half_bits)
            outside = values >= np.uint64(size)
        yield from values.tolist()


def _feistel(values: _Words, keys: _Words, half_bits: int) -> _Words:
    """A bijection of range(4^half_bits), whatever the rounds do: each can be undone."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << bits | right


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
