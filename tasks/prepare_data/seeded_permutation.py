"""A seeded permutation. It uses integer arithmetic only, so machines and NumPy versions agree."""

from collections.abc import Iterator

import numpy as np

from tasks.foundation.dataset.hashing import Words, hashes, mix

_CHUNK = 4096
_ROUNDS = 8


def permuted_positions(purpose: str, seed: int, size: int) -> Iterator[int]:
    """Yield the new position of index 0, 1, 2, …: a permutation of range(size) that is never held in memory.

    A Feistel network permutes the smallest range of 4^k numbers that contains `size`; a number outside of `size` is
    permuted again until it is inside (cycle walking: Black and Rogaway 2002).

    Args:
        purpose: permutations for different purposes are independent.
        seed: the run's seed.
        size: at most 2^62.
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


def _feistel(values: Words, keys: Words, half_bits: int) -> Words:
    """Permute range(4^half_bits). Each round is invertible, so the result is a bijection."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return left << bits | right
