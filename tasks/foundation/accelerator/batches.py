"""Batch arithmetic."""

from tasks.foundation.errors import AcceleratorError


def per_replica_batch_size(global_batch_size: int, replicas: int) -> int:
    """Examples that one replica sees in a step.

    Raises:
        AcceleratorError: the global batch does not divide evenly.
    """
    if global_batch_size % replicas:
        below = global_batch_size // replicas * replicas
        good = " or ".join(str(size) for size in (below, below + replicas) if size)
        raise AcceleratorError(
            f"train.global_batch_size = {global_batch_size} is not divisible by {replicas} replicas; try {good}"
        )
    return global_batch_size // replicas
