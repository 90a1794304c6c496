"""The data order: a pure function of (seed, counts of the shards, window size, batch size, batch index).

An epoch permutes the shards. `window_shards` of them at a time form a window, which is read whole and permuted in
memory. The windows of all epochs, one after the other, are the stream of examples; global batch b is the examples
[b * B, (b + 1) * B) of it, across the borders of windows and epochs. So any batch is found by counting.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Seed = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Shards that are read and permuted together."""

    epoch: int
    number: int  # within the epoch
    shards: tuple[int, ...]  # positions in the manifest, in the order in which they are read
    examples: int
    seed: Seed  # of the permutation of its examples
    skip: int  # how many of the permuted examples belong to earlier batches


def windows(counts: Sequence[int], *, seed: int, window_shards: int, first_example: int) -> Iterator[Window]:
    """The windows from an example of the stream on, without end.

    Args:
        counts: examples in each shard, each at least 1.
        seed: of the run.
        window_shards: shards in a window, at least 1; the last window of an epoch takes what is left.
        first_example: position in the stream, from 0; it lies in the first window returned, at `skip`.

    Raises:
        ValueError: there are no shards, an empty one, or a number is out of its range.
    """
    if not counts or min(counts) < 1:
        raise ValueError(f"counts={list(counts)}: an epoch needs shards, each with at least 1 example")
    if window_shards < 1 or first_example < 0:
        raise ValueError(f"window_shards={window_shards} must be at least 1, first_example={first_example} at least 0")
    epoch, skip = divmod(first_example, sum(counts))
    while True:
        shards = permutation(len(counts), seed_of(seed, epoch))
        for number, begin in enumerate(range(0, len(shards), window_shards)):
            chosen = tuple(shards[begin : begin + window_shards])
            examples = sum(counts[shard] for shard in chosen)
            if skip >= examples:
                skip -= examples
                continue
            yield Window(
                epoch=epoch,
                number=number,
                shards=chosen,
                examples=examples,
                seed=seed_of(seed, epoch, number),
                skip=skip,
            )
            skip = 0
        epoch += 1


def seed_of(seed: int, *path: int) -> Seed:
    """A seed for one permutation, unrelated to that of any other path.

    Args:
        seed: of the run.
        path: (epoch,) for an epoch's shards, (epoch, window) for a window's examples.
    """
    digest = hashlib.sha256("/".join(map(str, ("order", seed, *path))).encode()).digest()
    # 31 bits each: the same in a signed and an unsigned integer.
    return int.from_bytes(digest[:4], "little") >> 1, int.from_bytes(digest[4:8], "little") >> 1


def permutation(size: int, seed: Seed) -> list[int]:
    """A permutation of range(size): entry i is what stands at position i."""
    return [int(index) for index in shuffled_indices(size, seed).numpy()]


def shuffled_indices(size: Any, seed: Any) -> Any:
    """The same permutation as a tensor, int64 [size]; both arguments may be tensors, in a graph too."""
    import tensorflow as tf

    size = tf.cast(size, tf.int64)
    return tf.random.experimental.index_shuffle(tf.range(size), tf.cast(seed, tf.int64), size - 1)


def repeats_words(train_examples: int, global_batch_size: int) -> str | None:
    """What follows where a batch is larger than the data; None where it is not."""
    if train_examples >= global_batch_size:
        return None
    return (
        f"train.global_batch_size = {global_batch_size} is more than the {train_examples} training examples: every "
        "step has some of them more than once. Take a smaller batch, or more data"
    )
