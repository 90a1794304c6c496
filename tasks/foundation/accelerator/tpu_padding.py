"""What a TPU pads. Its matrices come in tiles, whose last two dimensions are filled up with zeros that cost as much.

A tile of 32-bit values is 8 sublanes of 128 lanes. The compiler may lay either dimension of an activation on either,
so what is said here is the least that padding can cost: of the two ways, the one that pads less. Source: Google Cloud's
TPU performance guide, on padding and on batch sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SUBLANES: Final = 8
LANES: Final = 128
# Below these shares there is nothing worth changing a model for.
_WORTH_SAYING = 0.25
_NAMED = 3
_MATRIX_DIMENSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Shares of zeros, each in [0, 1).

    Attributes:
        per_replica_batch: examples that one replica works on at a time.
        batch: of what is computed along the batch, if it lies on the sublanes.
        batch_on_lanes: the same, if it lies on the lanes.
        weights: of all kernels together.
        layers: of each kernel, by its path.
    """

    per_replica_batch: int
    batch: float
    batch_on_lanes: float
    weights: float
    layers: Mapping[str, float]


def padding(per_replica_batch: int, kernels: Mapping[str, Sequence[int]]) -> Padding:
    """How much of a model's work on a TPU would be padding.

    Args:
        per_replica_batch: examples that one replica works on at a time: a micro-batch, where there are any.
        kernels: shapes of the trainable variables by path; those of fewer than two dimensions are passed over.
    """
    sizes = {path: _sizes(shape) for path, shape in kernels.items() if len(shape) >= _MATRIX_DIMENSIONS}
    return Padding(
        per_replica_batch=per_replica_batch,
        batch=_share(per_replica_batch, _up(per_replica_batch, SUBLANES)),
        batch_on_lanes=_share(per_replica_batch, _up(per_replica_batch, LANES)),
        weights=_share(sum(size for size, _ in sizes.values()), sum(padded for _, padded in sizes.values())),
        layers={path: _share(size, padded) for path, (size, padded) in sizes.items()},
    )


def padding_words(found: Padding, *, kind: str) -> str:
    """What to change, with figures; empty where there is nothing worth changing, or where it is no TPU."""
    if kind != "tpu":
        return ""
    said = []
    if found.batch > 0:
        batch = found.per_replica_batch
        below = batch // SUBLANES * SUBLANES
        near = " or ".join(str(size) for size in (below, below + SUBLANES) if size)
        said.append(
            f"{batch} examples a replica are filled up to {_up(batch, SUBLANES)}, so {found.batch:.0%} of the work is "
            f"padding: let a replica have {near} (multiples of {LANES} are best)"
        )
    if found.weights >= _WORTH_SAYING:
        worst = sorted(found.layers.items(), key=lambda item: -item[1])[:_NAMED]
        layers = ", ".join(f"{path} {share:.0%}" for path, share in worst)
        said.append(
            f"{found.weights:.0%} of the weights in memory and in the work on them is padding ({layers}): layers whose "
            f"sizes are multiples of {LANES}, or at least of {SUBLANES}, have less"
        )
    return f"a TPU computes in tiles of {SUBLANES} x {LANES}: {'; '.join(said)}" if said else ""


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Numbers in an array, without and with padding."""
    *_, rows, columns = shape
    size = math.prod([*shape])
    padded = min(_up(rows, SUBLANES) * _up(columns, LANES), _up(rows, LANES) * _up(columns, SUBLANES))
    return size, size // (rows * columns) * padded if size else 0


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _share(size: int, padded: int) -> float:
    return 1 - size / padded if padded else 0.0
