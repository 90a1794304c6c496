"""How the train state is named, described and digested: keys, the tree of plain dicts, the signature and the digest.

Every variable has a key, a path such as `model/dense/kernel`; one that may differ between replicas has a key for each.
TensorFlow keeps an object graph in a checkpoint, which says which key belongs to which variable of the tree.

The digest of a state is a tree of two levels. Each leaf has the sha256 of its bytes, and the root is the sha256 over
the sorted (path, dtype, shape, sha256 of the bytes) of all leaves. So leaves are hashed side by side, and of two states
that differ, the manifests name the variables, without reading a checkpoint.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from baton.tasks.foundation.contracts.checkpoint import VariableRecord
from baton.tasks.foundation.errors import ModelError, StateMismatch
from baton.tasks.foundation.model.variables import Leaf
from baton.tasks.foundation.text import message

# State of Python objects, see `host_memory.py`. Not part of the model: a checkpoint may lack it, or have more of it.
HOST = "host/"
# Means of the metrics that a custom `train_step` returns, see `replicas.py`. A checkpoint may lack them.
RETURNED = "metrics/returned/"

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_REMEDY = "restore the run file and the code as they were, or set another name under run: to begin a new run"


def tree_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange variables in nested dicts by the parts of their keys, for `tf.train.Checkpoint(**tree)`.

    Raises:
        ModelError: a variable has the name of a group of variables.
    """
    tree: dict[str, Any] = {}
    for key, variable in variables.items():
        *parents, name = key.split("/")
        folder = tree
        for parent in parents:
            folder = folder.setdefault(parent, {})
            if not isinstance(folder, dict):
                break
        if not isinstance(folder, dict) or name in folder:
            raise ModelError(f"variable {key} has the name of a group of variables; rename its layer")
        folder[name] = variable
    return tree


def stored_name(key: str) -> str:
    """The name of a key in `tf.train.load_checkpoint`. TensorFlow doubles the dots in names."""
    return key.replace(".", "..") + _SUFFIX


def signature_of(leaves: Iterable[Leaf]) -> tuple[VariableRecord, ...]:
    """Path, dtype and shape of each leaf, sorted by path."""
    return tuple(
        VariableRecord(
            path=leaf.path,
            dtype=leaf.components[0].dtype.name,
            shape=tuple(-1 if size is None else size for size in leaf.components[0].shape),
            per_replica=leaf.per_replica,
        )
        for leaf in sorted(leaves, key=lambda leaf: leaf.path)
    )


def signature_digest(signature: Iterable[VariableRecord]) -> str:
    """The sha256 of a signature, as the identity of a run records it."""
    text = "\n".join(record.model_dump_json() for record in of_model(signature))
    return hashlib.sha256(text.encode()).hexdigest()


def of_model(signature: Iterable[VariableRecord]) -> tuple[VariableRecord, ...]:
    """The part of a signature that belongs to the model."""
    return tuple(record for record in signature if not record.path.startswith((HOST, RETURNED)))


def require_same_signature(stored: tuple[VariableRecord, ...], mine: tuple[VariableRecord, ...], *, where: str) -> None:
    """Refuse a checkpoint of another model, and list the differences. Parts that are not the model's may differ.

    Args:
        stored: the checkpoint's signature.
        mine: the model's.
        where: address of the checkpoint, for the message.

    Raises:
        StateMismatch: listing variables that are missing, unknown, or of another shape or dtype.
    """
    before: Mapping[str, VariableRecord] = {record.path: record for record in of_model(stored)}
    now: Mapping[str, VariableRecord] = {record.path: record for record in of_model(mine)}
    if before == now:
        return
    lines = {path: f"only in the checkpoint: {text_of(before[path])}" for path in before if path not in now}
    lines |= {path: f"only in the model: {text_of(now[path])}" for path in now if path not in before}
    lines |= {
        path: f"checkpoint has {text_of(before[path])}, model has {text_of(now[path])}"
        for path in before
        if path in now and before[path] != now[path]
    }
    # List the model's own variables first: one more of them renumbers all variables of the optimizer.
    raise other_model(where, [lines[path] for path in sorted(lines, key=lambda path: not path.startswith("model/"))])


def other_model(where: str, differences: Sequence[str], hints: Sequence[str] = ()) -> StateMismatch:
    """The error for a checkpoint of another model.

    Args:
        where: address of the checkpoint.
        differences: one line for each variable.
        hints: other ways than to go back to the model that it belongs to.
    """
    return StateMismatch(message(f"{where} belongs to another model", details=differences, hints=[_REMEDY, *hints]))


def is_learning_rate(leaf: Leaf) -> bool:
    """Whether an optimizer keeps its compiled learning rate in this variable."""
    name = leaf.path.rsplit("/", 1)[-1]
    return leaf.path.startswith(("optimizer/", "optimizers/")) and name == "learning_rate"


def text_of(record: VariableRecord) -> str:
    """Path, dtype and shape of a variable, for a message."""
    return f"{record.path} {record.dtype}{list(record.shape)}{' per replica' if record.per_replica else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """The digest of a train state.

    Attributes:
        root: 64 hexadecimal digits; the log and the manifest have it.
        leaves: key to the sha256 of the leaf's bytes; the manifest has them.
    """

    root: str
    leaves: Mapping[str, str]


# One processor hashes about as fast as a disk writes; more threads than these are no gain.
DIGEST_THREADS: Final = min(4, len(os.sched_getaffinity(0)))


class LeafHasher:
    """Hashes the leaves of a state, in as many threads as call `hash_leaves`.

    Attributes:
        leaves: key to form (dtype and shape) and sha256 of the leaves that are hashed.
    """

    def __init__(self, keys: Iterable[str], value_of: Callable[[str], npt.NDArray[Any]]) -> None:
        """Begin with no leaf.

        Args:
            keys: in the order in which they are hashed; the largest first keeps all threads at work to the end.
            value_of: the value of a key. Each thread calls it for one key after the other.
        """
        self._waiting = iter(list(keys))  # taking the next of a list is one call into C, so threads can share it
        self._value_of = value_of
        self.leaves: dict[str, tuple[str, str]] = {}

    def hash_leaves(self, blocks: Callable[[memoryview], Iterable[memoryview]] = lambda data: (data,)) -> None:
        """Hash leaves until none waits.

        Args:
            blocks: the parts in which the bytes of a leaf are hashed; it may raise, to give up.
        """
        for key in self._waiting:
            value = np.asarray(self._value_of(key))
            sha256 = hashlib.sha256()
            for block in blocks(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data):  # without a copy
                sha256.update(block)
            self.leaves[key] = (f"{value.dtype.name}\0{list(value.shape)}", sha256.hexdigest())

    def digest(self) -> StateDigest:
        """The digest of all leaves; call it when every `hash_leaves` has returned."""
        return digest_of_leaves(self.leaves)


def digest_of_leaves(leaves: Mapping[str, tuple[str, str]]) -> StateDigest:
    """Compute the digest of a state from its leaves: key to form and sha256, see `LeafHasher`."""
    root = hashlib.sha256()
    for key, (form, sha256) in sorted(leaves.items()):
        root.update(f"{key}\0{form}\0{sha256}\n".encode())
    return StateDigest(root=root.hexdigest(), leaves={key: leaves[key][1] for key in sorted(leaves)})


def digest_of(keys: Iterable[str], value_of: Callable[[str], npt.NDArray[Any]]) -> StateDigest:
    """Compute the digest, the leaves side by side.

    Args:
        keys: in any order.
        value_of: the value of a key. Memory holds one value for each thread at a time.
    """
    hasher = LeafHasher(keys, value_of)
    with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="baton-digest") as pool:
        for done in [pool.submit(hasher.hash_leaves) for _ in range(DIGEST_THREADS)]:
            done.result()
    return hasher.digest()


# The key of the graph, a string among the tensors.
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def object_graph_of(variable_names: Mapping[str, str]) -> bytes:
    """The graph of the tree of plain dicts that `tree_of` makes, as `tf.train.Checkpoint(**tree).write` has it.

    Args:
        variable_names: key to the name of the variable.

    Returns:
        A serialized `TrackableObjectGraph`. Nodes are in breadth-first order, the root first.
    """
    graph = TrackableObjectGraph()
    tree = tree_of({key: _Variable(key, name) for key, name in variable_names.items()})
    waiting: list[Any] = [dict(sorted(tree.items()))]
    for item in waiting:  # grows meanwhile
        node = graph.nodes.add()
        node.has_checkpoint_values.value = True
        if isinstance(item, _Variable):
            node.attributes.add(name="VARIABLE_VALUE", full_name=item.name, checkpoint_key=stored_name(item.key))
            continue
        for name, child in item.items():
            node.children.add(node_id=len(waiting), local_name=name)
            waiting.append(child)
    data: bytes = graph.SerializeToString()
    return data


class _Variable:
    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.name = name
