"""Batch arithmetic: replicas share a global batch, and each may cut its share into micro-batches."""

from collections.abc import Iterator

from tasks.foundation.errors import AcceleratorError
from tasks.foundation.messages import counted


def per_replica_batch_size(global_batch_size: int, replicas: int, accumulate: int = 1) -> int:
    """Examples of one replica in a step; a multiple of `accumulate`.

    Args:
        global_batch_size: examples of a step over all replicas, at least 1.
        replicas: model copies, at least 1.
        accumulate: micro-batches of one replica in a step, at least 1.

    Raises:
        AcceleratorError: the global batch is not divisible; the message names the nearest sizes that are.
    """
    parts = replicas * accumulate
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        good = " or ".join(str(size) for size in (below, below + parts) if size)
        cut = counted(replicas, "replica") + ("" if accumulate == 1 else f" of {accumulate} micro-batches")
        others = "" if accumulate == 1 else _other_cuts(global_batch_size, replicas, accumulate)
        raise AcceleratorError(
            f"train.global_batch_size = {global_batch_size} is not divisible by {cut}; try {good}{others}"
        )
    return global_batch_size // replicas


def micro_batch_size(global_batch_size: int, replicas: int, accumulate: int) -> int:
    """Examples of one micro-batch of one replica. Arguments and errors: see `per_replica_batch_size`."""
    return per_replica_batch_size(global_batch_size, replicas, accumulate) // accumulate


def _other_cuts(global_batch_size: int, replicas: int, accumulate: int) -> str:
    """The nearest values of train.accumulate below and above that divide this batch, if any."""
    if global_batch_size % replicas:
        return ""
    divisors = list(_divisors(global_batch_size // replicas))
    near = [
        *([max(below)] if (below := [each for each in divisors if each < accumulate]) else []),
        *([min(above)] if (above := [each for each in divisors if each > accumulate]) else []),
    ]
    return f"; or train.accumulate = {' or '.join(map(str, near))}"


def _divisors(number: int) -> Iterator[int]:
    for each in range(1, int(number**0.5) + 1):
        if number % each == 0:
            yield each
            yield number // each
