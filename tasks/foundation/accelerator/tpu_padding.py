"""The padding of a model on a TPU, which computes in tiles and fills them up with zeros.

A tile of 32-bit values has 8 sublanes and 128 lanes. The compiler may put either of the last two dimensions on the
lanes, so these figures are lower bounds: they assume the layout that pads less. Source: Google Cloud's TPU performance
guide, on padding and on batch sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SUBLANES: Final = 8
LANES: Final = 128
# Below this share, changing a model does not pay.
_MIN_SHARE = 0.25
_NAMED = 3
_MATRIX_DIMENSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Shares of padding, each in [0, 1).

    Attributes:
        per_replica_batch: examples that one replica processes at a time.
        batch: padding of the batch dimension on the sublanes.
        batch_on_lanes: padding of the batch dimension on the lanes.
        weights: padding of all kernels together.
        layers: padding of each kernel, by path.
    """

    per_replica_batch: int
    batch: float
    batch_on_lanes: float
    weights: float
    layers: Mapping[str, float]


def padding(per_replica_batch: int, kernels: Mapping[str, Sequence[int]]) -> Padding:
    """The share of a model's work on a TPU that would be padding.

    Args:
        per_replica_batch: examples that one replica processes at a time: a micro-batch, if batches are cut into those.
        kernels: shapes of the trainable variables by path; shapes of fewer than two dimensions are ignored.
    """
    sizes = {path: _sizes(shape) for path, shape in kernels.items() if len(shape) >= _MATRIX_DIMENSIONS}
    return Padding(
        per_replica_batch=per_replica_batch,
        batch=_share(per_replica_batch, _pad(per_replica_batch, SUBLANES)),
        batch_on_lanes=_share(per_replica_batch, _pad(per_replica_batch, LANES)),
        weights=_share(sum(size for size, _ in sizes.values()), sum(padded for _, padded in sizes.values())),
        layers={path: _share(size, padded) for path, (size, padded) in sizes.items()},
    )


def padding_words(found: Padding, *, kind: str) -> str:
    """Advice with figures; empty if no change pays, or if `kind` is not tpu."""
    if kind != "tpu":
        return ""
    advice = []
    if found.batch > 0:
        batch = found.per_replica_batch
        below = batch // SUBLANES * SUBLANES
        near = " or ".join(str(size) for size in (below, below + SUBLANES) if size)
        advice.append(
            f"{batch} examples per replica are padded to {_pad(batch, SUBLANES)}, so {found.batch:.0%} of the work is "
            f"padding: use {near} per replica (multiples of {LANES} are best)"
        )
    if found.weights >= _MIN_SHARE:
        worst = sorted(found.layers.items(), key=lambda item: -item[1])[:_NAMED]
        layers = ", ".join(f"{path} {share:.0%}" for path, share in worst)
        advice.append(
            f"{found.weights:.0%} of the weights' memory and work is padding ({layers}): use layer sizes that are "
            f"multiples of {LANES}, or at least of {SUBLANES}"
        )
    return f"a TPU computes in tiles of {SUBLANES} x {LANES}: {'; '.join(advice)}" if advice else ""


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Number of values in an array, without and with padding."""
    *_, rows, columns = shape
    size = math.prod([*shape])
    padded = min(_pad(rows, SUBLANES) * _pad(columns, LANES), _pad(rows, LANES) * _pad(columns, SUBLANES))
    return size, size // (rows * columns) * padded if size else 0


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _share(size: int, padded: int) -> float:
    return 1 - size / padded if padded else 0.0
