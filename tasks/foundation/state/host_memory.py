"""The train state in this host's memory: state of Python objects, the values of variables, and memory for copies.

The `host/` part of the train state is state of Python objects as JSON, such as that of callbacks. It is saved beside
the model's variables and counts in the digest. A checkpoint without it, or with one that this process does not use,
belongs to the same model. Values of type bytes, such as the numbers of large arrays, follow the JSON text as they are,
after one zero byte, which JSON never has. The text has their places.

A snapshot reads all variables at once (`HostValues`), and copies them into memory that is kept from one to the next
(`PageBuffer`).
"""

import json
import mmap
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import tensorflow as tf

from baton.tasks.foundation.contracts.checkpoint import VariableRecord
from baton.tasks.foundation.model.variables import Leaf, components
from baton.tasks.foundation.state.digest import HOST, stored_name

# Never of length 0: `MaxShardSizePolicy` leaves tensors without elements out of the checkpoint.
_EMPTY = b"{}"
_PLACE, _END = "place after the text", b"\0"


class HostState:
    """One leaf `host/<name>`: a JSON object and values of type bytes, uint8 [length], of any length."""

    def __init__(self, name: str) -> None:
        # Outside of a strategy's scope: it is the same on every replica, and never part of a step.
        self._variable = tf.Variable(_uint8(_EMPTY), shape=[None], trainable=False, name=f"host_{name}")
        self.leaf = Leaf(path=f"{HOST}{name}", variable=self._variable, per_replica=False)

    def read(self) -> dict[str, Any]:
        """The JSON object, with values of type bytes; empty until something is written."""
        text, _, tail = self._variable.numpy().tobytes().partition(_END)

        def placed(held: dict[str, Any]) -> Any:
            if held.keys() != {_PLACE}:
                return held
            begin, size = held[_PLACE]
            return tail[begin : begin + size]

        value: dict[str, Any] = json.loads(text, object_hook=placed)
        return value

    def write(self, value: Mapping[str, Any]) -> int:
        """Keep a JSON object; the order of its keys, NaN and infinity are kept too.

        Args:
            value: values of type bytes are allowed anywhere in it.

        Returns:
            Its size in bytes.
        """
        tail: list[bytes] = []
        size = 0

        def place(held: Any) -> dict[str, list[int]]:
            nonlocal size
            if not isinstance(held, bytes):
                raise TypeError(f"a {type(held).__name__} is no JSON")
            tail.append(held)
            size += len(held)
            return {_PLACE: [size - len(held), len(held)]}

        text = json.dumps(value, default=place).encode()
        whole = b"".join([text, _END, *tail] if tail else [text])
        self._variable.assign(_uint8(whole))
        return len(whole)

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take this leaf's value from what `read_host_state` returned; empty if the checkpoint has none."""
        self._variable.assign(stored.get(self.leaf.path, _uint8(_EMPTY)))


def read_host_state(prefix: str, signature: Iterable[VariableRecord]) -> dict[str, Any]:
    """Read everything below `host/` from a checkpoint's files.

    Args:
        prefix: path prefix of the files.
        signature: the checkpoint's.

    Returns:
        Path to value, uint8 [length].
    """
    paths = [record.path for record in signature if record.path.startswith(HOST)]
    if not paths:
        return {}
    reader = tf.train.load_checkpoint(prefix)
    return {path: reader.get_tensor(stored_name(path)) for path in paths}


def _uint8(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


class HostValues:
    """Reads the variables of a train state.

    Attributes:
        on_host: whether they are in this process's own memory, and a CPU trains.

    Args:
        saved: key to variable; of a distributed one the first component is read.
        io_device: the device whose memory belongs to this process; None if the variables' host is this one.
    """

    def __init__(self, saved: Mapping[str, Any], io_device: str | None) -> None:
        self._variables = {key: components(variable)[0] for key, variable in saved.items()}
        self._io_device = io_device
        self.on_host = io_device is None and all(map(_is_on_cpu, self._variables.values()))
        self._fetched: dict[tuple[str, ...], Any] = {}

    def names(self) -> dict[str, str]:
        """Key to name of each variable."""
        return {key: variable.name.removesuffix(":0") for key, variable in self._variables.items()}

    def read(self, keys: Sequence[str]) -> dict[str, Any]:
        """Key to value of some variables.

        On a CPU the arrays share the variables' memory, until these get new values. From an accelerator all values
        come in one batch.
        """
        values: Iterable[Any]
        variables = [self._variables[key] for key in keys]
        if self.on_host:
            values = map(_read, variables)
        elif self._io_device is None:
            traced = self._fetched.get(tuple(keys))
            if traced is None:
                traced = self._fetched[tuple(keys)] = tf.function(partial(_fetch, variables), jit_compile=False)
            values = traced()
        else:  # behind gRPC, a function cannot return to the memory of another host
            values = (_on_device(self._io_device, variable) for variable in variables)
        return dict(zip(keys, map(np.asarray, values), strict=True))


def _read(variable: Any) -> Any:
    # A third of what read_value() takes, and there may be thousands of variables.
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _fetch(variables: Iterable[Any]) -> list[Any]:
    return [_on_device("/device:CPU:0", variable) for variable in variables]


def _on_device(device: str, variable: Any) -> Any:
    value = variable.read_value()
    with tf.device(device):
        return tf.identity(value)


def _is_on_cpu(variable: Any) -> bool:
    return bool(tf.DeviceSpec.from_string(variable.device).device_type == "CPU")


# An area grows in steps of this size, so a copy that is a little larger fits as well.
_STEP_BYTES: Final = 2 << 20
# Linux 5.14 and later: fill pages in, and leave their content alone. Python has no name for it.
_MADV_POPULATE_WRITE: Final = 23
# Filled in at a time: a few milliseconds, in which no other Python thread runs.
_PART_BYTES: Final = 8 << 20


class PageBuffer:
    """One area of memory that begins at a page. Its size is that of the largest copy so far.

    New memory costs more than the copy itself, because the system fills it with zeros page by page. So it is kept.
    """

    def __init__(self) -> None:
        self._area: mmap.mmap | None = None
        self._lent: memoryview | None = None

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return 0 if self._area is None else len(self._area)

    def reserve(self, size: int) -> threading.Thread | None:
        """Get memory for a copy of `size` bytes ready beside other work, if there is none yet.

        Args:
            size: of the copy, in bytes.

        Returns:
            The thread that does it; None if there is memory already.
        """
        if self._area is not None:
            return None
        self._area = _new_area(size)
        # Nothing depends on it: memory that is not ready in time is made ready by the copy.
        thread = threading.Thread(target=_get_ready, args=(self._area,), name="baton-page-buffer", daemon=True)
        thread.start()
        return thread

    def borrow(self, size: int) -> memoryview:
        """Memory of `size` bytes, with any content, until it is given back.

        While it is lent, another one gets memory of its own.
        """
        if self._area is None or self._lent is not None or len(self._area) < size:
            self._area = None  # freed first, unless it is lent
            self._area = _new_area(size)
        self._lent = memoryview(self._area)[:size]
        return self._lent

    def give_back(self, memory: memoryview) -> None:
        """Call it when the content is no longer needed; more than once does no harm."""
        if memory is self._lent:
            self._lent = None


def _new_area(size: int) -> mmap.mmap:
    size = -(-max(size, 1) // _STEP_BYTES) * _STEP_BYTES
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _get_ready(area: mmap.mmap) -> None:
    with suppress(OSError):  # an older kernel
        for begin in range(0, len(area), _PART_BYTES):
            area.madvise(_MADV_POPULATE_WRITE, begin, min(_PART_BYTES, len(area) - begin))
