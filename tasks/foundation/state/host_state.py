"""The `host/` part of the train state: what Python keeps as a JSON object, such as what callbacks remember.

It lies in the checkpoint beside the model's variables and counts in the digest. A checkpoint without it, or with one
that nothing here asks for, is still the same model's.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.foundation.contracts.checkpoint import VariableRecord
from tasks.foundation.model.variables import Leaf
from tasks.foundation.state.layout import HOST, stored_name

# Not of length 0: `MaxShardSizePolicy` leaves tensors without elements out of the checkpoint.
_NOTHING = b"{}"


class HostMemory:
    """One such leaf, `host/<name>`: the bytes of its JSON, uint8 [length], of any length."""

    def __init__(self, name: str) -> None:
        # Outside of a strategy's scope: the same on every replica, and never part of a step.
        self._variable = tf.Variable(_bytes(_NOTHING), shape=[None], trainable=False, name=f"host_{name}")
        self.leaf = Leaf(path=f"{HOST}{name}", variable=self._variable, per_replica=False)

    def read(self) -> dict[str, Any]:
        """What is remembered; empty where nothing is."""
        held: dict[str, Any] = json.loads(self._variable.numpy().tobytes())
        return held

    def write(self, held: Mapping[str, Any]) -> None:
        """Remember JSON values, their order too; NaN and infinity are among them."""
        self._variable.assign(_bytes(json.dumps(held).encode()))

    def take(self, read: Mapping[str, Any]) -> None:
        """What a checkpoint holds of it, see `read_host`; nothing if it holds nothing."""
        self._variable.assign(read.get(self.leaf.path, _bytes(_NOTHING)))


def read_host(prefix: str, signature: Iterable[VariableRecord]) -> dict[str, Any]:
    """What a checkpoint's files hold below `host/`: uint8 [length], by path.

    Args:
        prefix: of the files.
        signature: the checkpoint's.
    """
    paths = [record.path for record in signature if record.path.startswith(HOST)]
    if not paths:
        return {}
    reader = tf.train.load_checkpoint(prefix)
    return {path: reader.get_tensor(stored_name(path)) for path in paths}


def _bytes(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)
