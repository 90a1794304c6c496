"""The devices that hold a model's variables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tasks.foundation.model.variables import components

_SHOWN = 8


def describe_placement(variables: Iterable[Any]) -> str:
    """Count the variables on each device: `variables: 12 on each of TPU:0, TPU:1; 1 on CPU:0`.

    Args:
        variables: `tf.Variable`s; a distributed one counts on each device that holds a component of it.
    """
    counts = Counter(_device(part) for variable in variables for part in components(variable))
    of_count: dict[int, list[str]] = {}
    for device in sorted(counts, key=_in_order):
        of_count.setdefault(counts[device], []).append(device)
    parts = [
        f"{count} on {devices[0]}" if len(devices) == 1 else f"{count} on each of {_listed(devices)}"
        for count, devices in of_count.items()
    ]
    return f"variables: {'; '.join(parts)}"


def _device(variable: Any) -> str:
    """Return `TPU:0` for `/job:localhost/replica:0/task:0/device:TPU:0`."""
    return str(variable.device).rpartition("/device:")[2] or "no device"


def _in_order(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return kind, int(number) if number.isdigit() else -1


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= _SHOWN else f"{devices[0]} to {devices[-1]} ({len(devices)} devices)"
