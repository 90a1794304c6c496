"""The data order: a pure function of (seed, shard counts, window size, batch size, batch index).

An epoch permutes the shards. `window_shards` shards at a time form a window, which is read whole and permuted in
memory. The windows of all epochs, in order, form the stream of examples. Global batch b holds the examples
[b * B, (b + 1) * B) of the stream; it may cross the border of a window or an epoch. So the position of any batch
follows from the counts. Where the remainder is dropped, an epoch ends with its last whole batch, and the examples that
would follow are left out.

With `data.shuffle: false` nothing is permuted: every epoch has the order of the shards, which is that of the source.
Windows, batches and positions are the same arithmetic. Hashes of an index use integers only, so machines and NumPy
versions agree.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Seed = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Shards that are read and permuted together."""

    epoch: int
    number: int  # within the epoch
    shards: tuple[int, ...]  # positions in the manifest, in reading order
    examples: int
    seed: Seed  # for the permutation of its examples
    skip: int  # permuted examples that belong to earlier batches
    end: int  # permuted examples up to the end of the epoch; the others are left out


def windows(
    counts: Sequence[int],
    *,
    seed: int,
    window_shards: int,
    first_example: int,
    epoch_examples: int | None = None,
    shuffle: bool = True,
) -> Iterator[Window]:
    """Yield the windows from `first_example` of the stream on, without end.

    Args:
        counts: examples in each shard, each at least 1.
        window_shards: shards in a window, at least 1; the last window of an epoch may have fewer.
        first_example: position in the stream, from 0; it lies at `skip` in the first window.
        epoch_examples: examples after which an epoch ends, at most all. None: all.
        shuffle: whether the shards of each epoch are permuted.
    """
    length = sum(counts) if epoch_examples is None else epoch_examples
    epoch, skip = divmod(first_example, length)
    while True:
        left = length
        shards = permutation(len(counts), seed_of(seed, epoch)) if shuffle else list(range(len(counts)))
        for number, begin in enumerate(range(0, len(shards), window_shards)):
            chosen = tuple(shards[begin : begin + window_shards])
            examples = sum(counts[shard] for shard in chosen)
            end = min(examples, left)
            left -= end
            if skip >= end:
                skip -= end
                continue
            yield Window(
                epoch=epoch,
                number=number,
                shards=chosen,
                examples=examples,
                seed=seed_of(seed, epoch, number),
                skip=skip,
                end=end,
            )
            skip = 0
        epoch += 1


def seed_of(seed: int, *path: int) -> Seed:
    """Derive the seed of one permutation; seeds of different paths are independent.

    Args:
        path: (epoch,) for the shards of an epoch, (epoch, window) for the examples of a window.
    """
    digest = hashlib.sha256("/".join(map(str, ("order", seed, *path))).encode()).digest()
    # 31 bits each, so that signed and unsigned integers agree.
    return int.from_bytes(digest[:4], "little") >> 1, int.from_bytes(digest[4:8], "little") >> 1


def permutation(size: int, seed: Seed) -> list[int]:
    """Return a permutation of range(size): entry i is the item at position i."""
    return [int(index) for index in shuffled_indices(size, seed).numpy()]


def shuffled_indices(size: Any, seed: Any) -> Any:
    """Return the same permutation as an int64 tensor [size]; both arguments may be tensors, also in a graph."""
    import tensorflow as tf

    size = tf.cast(size, tf.int64)
    return tf.random.experimental.index_shuffle(tf.range(size), tf.cast(seed, tf.int64), size - 1)


def oversized_batch_warning(train_examples: int, global_batch_size: int) -> str | None:
    """Return a warning if a global batch is larger than the training data, else None."""
    if train_examples >= global_batch_size:
        return None
    return (
        f"train.global_batch_size = {global_batch_size} is larger than the number of training examples "
        f"({train_examples}): every step repeats examples. Use a smaller batch, or more data"
    )


Words = npt.NDArray[np.uint64]


def hashes(purpose: str, seed: int, begin: int, end: int) -> Words:
    """Hash each index in [begin, end): uniform 64-bit words (SplitMix64, Steele et al. 2014).

    Args:
        purpose: hashes for different purposes are independent.
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
