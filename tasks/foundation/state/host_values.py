"""The values of variables on this host, as arrays."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.foundation.model.variables import components


class HostValues:
    """Reads the variables of a train state.

    Args:
        saved: key to variable; of a distributed one the first component is read.
        io_device: the device whose memory belongs to this process; None if the variables' host is this one.
    """

    def __init__(self, saved: Mapping[str, Any], io_device: str | None) -> None:
        self._variables = {key: components(variable)[0] for key, variable in saved.items()}
        self._io_device = io_device
        self._on_host = io_device is None and all(map(_is_on_cpu, self._variables.values()))
        self._fetched = tf.function(self._trace_fetch, jit_compile=False)

    def names(self) -> dict[str, str]:
        """Key to name of each variable."""
        return {key: variable.name.removesuffix(":0") for key, variable in self._variables.items()}

    def read(self) -> dict[str, Any]:
        """Key to value of every variable.

        On a CPU the arrays share the variables' memory, until these get new values. From an accelerator all values
        come in one batch.
        """
        values: Iterable[Any]
        if self._on_host:
            values = map(_read, self._variables.values())
        elif self._io_device is None:
            values = self._fetched()
        else:  # behind gRPC, a function cannot return to the memory of another host
            values = (_on_device(self._io_device, variable) for variable in self._variables.values())
        return dict(zip(self._variables, map(np.asarray, values), strict=True))

    def _trace_fetch(self) -> list[Any]:
        return [_on_device("/device:CPU:0", variable) for variable in self._variables.values()]


def _read(variable: Any) -> Any:
    # A third of what read_value() takes, and there may be thousands of variables.
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _on_device(device: str, variable: Any) -> Any:
    value = variable.read_value()
    with tf.device(device):
        return tf.identity(value)


def _is_on_cpu(variable: Any) -> bool:
    return bool(tf.DeviceSpec.from_string(variable.device).device_type == "CPU")
