"""How the train state lies in a checkpoint: keys, the tree of plain dicts, and the signature."""

from collections.abc import Iterable, Mapping
from typing import Any

from tasks.foundation.contracts.checkpoint import VariableRecord
from tasks.foundation.errors import ModelError, StateMismatch
from tasks.foundation.messages import message
from tasks.foundation.model.variables import Leaf

# Where the state keeps what Python remembers. No variables of the model's: they may be missing, or be left over.
HOST = "host/"
# And means of what an own train_step returns, see `state.returned`; checkpoints of before have none.
RETURNED = "metrics/returned/"

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_REMEDY = "put run file and code back as they were, or give the run another name under run: to begin a new one"


def tree_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of variables by key, for `tf.train.Checkpoint(**tree)`.

    Raises:
        ModelError: a variable is named like a group of variables.
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
            raise ModelError(f"variable {key} is named like a group of variables; rename its layer")
        folder[name] = variable
    return tree


def stored_name(key: str) -> str:
    """The name under which `tf.train.load_checkpoint` knows a key; TensorFlow doubles dots in names."""
    return key.replace(".", "..") + _SUFFIX


def signature_of(leaves: Iterable[Leaf]) -> tuple[VariableRecord, ...]:
    """Paths, dtypes and shapes, in order."""
    return tuple(
        VariableRecord(
            path=leaf.path,
            dtype=leaf.components[0].dtype.name,
            shape=tuple(-1 if size is None else size for size in leaf.components[0].shape),
            per_replica=leaf.per_replica,
        )
        for leaf in sorted(leaves, key=lambda leaf: leaf.path)
    )


def of_model(signature: Iterable[VariableRecord]) -> tuple[VariableRecord, ...]:
    """A signature without what may be missing or left over: which variables the model has."""
    return tuple(record for record in signature if not record.path.startswith((HOST, RETURNED)))


def require_same_signature(stored: tuple[VariableRecord, ...], mine: tuple[VariableRecord, ...], *, where: str) -> None:
    """Refuse a checkpoint of another model, with a difference that can be read. What is not the model's may differ.

    Raises:
        StateMismatch: listing variables that are missing, unknown, or of another shape or dtype.
    """
    before: Mapping[str, VariableRecord] = {record.path: record for record in of_model(stored)}
    now: Mapping[str, VariableRecord] = {record.path: record for record in of_model(mine)}
    if before == now:
        return
    lines = {path: f"only in the checkpoint: {_text(before[path])}" for path in before if path not in now}
    lines |= {path: f"only in the model: {_text(now[path])}" for path in now if path not in before}
    lines |= {
        path: f"checkpoint has {_text(before[path])}, model has {_text(now[path])}"
        for path in before
        if path in now and before[path] != now[path]
    }
    # The model's own variables first: the optimizer's, numbered, all differ once one of those does.
    ordered = [lines[path] for path in sorted(lines, key=lambda path: not path.startswith("model/"))]
    raise StateMismatch(message(f"{where} belongs to another model", details=ordered, hints=[_REMEDY]))


def is_learning_rate(leaf: Leaf) -> bool:
    """Whether this is the variable in which an optimizer keeps the learning rate that it was made with."""
    name = leaf.path.rsplit("/", 1)[-1]
    return leaf.path.startswith(("optimizer/", "optimizers/")) and name == "learning_rate"


def _text(record: VariableRecord) -> str:
    return f"{record.path} {record.dtype}{list(record.shape)}{' per replica' if record.per_replica else ''}"
