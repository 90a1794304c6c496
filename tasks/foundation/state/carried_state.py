"""Which values of a checkpoint a model keeps whose variables differ, after an accepted change.

A change in mid-run (a layer is unfrozen, Adam becomes AdamW, a metric is added) gives the train state other variables.
Each variable of either side has a *meaning*: a weight is its path; a slot is its optimizer, its name, and the variable
it belongs to; a metric's sum is the metric's name and its own. Positions count for nothing, because one more variable
moves all that come after it. A variable keeps its value if the checkpoint has one of the same meaning, dtype and shape.
Other slots, metrics and seeds begin fresh, or are dropped.

Weights are what was trained, so none is dropped, and none begins fresh but in a layer that keeps others (as those of
`enable_lora`): then the checkpoint belongs to another model. A change can therefore only add weights, and a rewind to a
checkpoint before several changes keeps what these changes kept.

The result follows from the two trees alone. It is computed at each restore of a checkpoint from before a change, so no
kill can come between the change and what it does to the state.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.foundation.contracts.checkpoint import CarriedState, CheckpointManifest, OptimizerRecord, VariableRecord
from tasks.foundation.state.layout import of_model, other_model, text_of

_METRIC = re.compile(r"metrics/(\d+)/(\d+)/(.+)")
_OPTIMIZER = re.compile(r"(optimizer|optimizers/.+)/(\d+)/(?:([^/]+)/)?(.+)")
_SEED = re.compile(r"model/(?:.+/)?seed_generator_state(?:~\d+)?")
_WEIGHTS = ("model/", "variables/")
_SCALES_LOSS = "LossScaleOptimizer"
# Both of their slots are averages of gradients and of squared gradients. Names alone do not tell: the momentum of SGD
# is a sum of steps.
_LIKE_ADAM = frozenset({"adam", "adamw", "nadam", "lamb"})

Meaning = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTree:
    """The variables of a train state, and what the slots among them mean.

    Attributes:
        signature: path, dtype and shape of each variable; what is not the model's is passed over.
        optimizers: by the path under which their variables lie, without position.
    """

    signature: Iterable[VariableRecord]
    optimizers: Mapping[str, OptimizerRecord]


def is_same_tree(stored: CheckpointManifest, mine: StateTree) -> bool:
    """Whether all variables have the same paths, shapes and meanings, so that a restore is an ordinary one."""
    same = of_model(stored.signature) == of_model(mine.signature)
    return same and all(mine.optimizers.get(path) == each for path, each in stored.optimizers.items())


def carry(stored: CheckpointManifest, mine: StateTree, *, where: str, home: str) -> CarriedState:
    """Return which values of a checkpoint a model keeps.

    Args:
        stored: the checkpoint's manifest.
        mine: the model's tree.
        where: address of the checkpoint, for the message.
        home: address of the run's home, for the message.

    Raises:
        StateMismatch: weights have other names or shapes.
    """
    before = StateTree(signature=stored.signature, optimizers=stored.optimizers)
    carried, refused = carried_between(before, mine)
    if refused:
        fitting = f"or set init.weights: {{source: {home}, strict: false}} there too, for the weights that fit"
        raise other_model(where, refused, hints=[fitting])
    return carried


def carried_between(before: StateTree, now: StateTree) -> tuple[CarriedState, list[str]]:
    """Return what becomes of the variables, and a line for each weight that cannot be carried."""
    old, new = _Meanings(before), _Meanings(now)
    kept: dict[str, str] = {}
    refused: list[str] = []
    for meaning, mine in new.records.items():
        stored = old.records.get(meaning, ())
        # Of several that share a name, the order tells, unless one of them may have come or gone.
        shared = len(mine) > 1 or new.shares_a_name(meaning)
        if len(stored) != len(mine) or (shared and not _in_order(meaning, old, new)):
            continue
        for was, now_is in zip(stored, mine, strict=True):
            if (was.dtype, was.shape) == (now_is.dtype, now_is.shape):
                if _means_the_same(meaning, old, new):
                    kept[now_is.path] = was.path
            elif _is_weight(was):
                refused.append(f"checkpoint has {text_of(was)}, model has {text_of(now_is)}")
    taken = set(kept.values())
    fresh, dropped = _others(new, kept), _others(old, taken)
    unequal = {record.path for record in dropped} & {record.path for record in fresh}
    lost = [record for record in dropped if _is_weight(record) and record.path not in unequal]
    refused += [f"only in the checkpoint: {text_of(record)}" for record in lost]
    layers = {_layer(path) for path in kept if path.startswith(_WEIGHTS) and not _SEED.fullmatch(path)}
    refused += [
        f"only in the model: {text_of(record)}"
        for record in fresh
        if _is_weight(record) and record.path not in unequal and _layer(record.path) not in layers
    ]
    return (
        CarriedState(
            kept=dict(sorted(kept.items())),
            fresh=tuple(sorted(record.path for record in fresh)),
            dropped=tuple(sorted(record.path for record in dropped)),
        ),
        refused,
    )


def is_average_of(path: str) -> str | None:
    """Return the name that an optimizer gives the variable whose average (`use_ema`) this is; None if it is none."""
    found = _OPTIMIZER.fullmatch(path)
    return found[4].removesuffix("_average") if found and found[4].endswith("_average") else None


def is_iteration(path: str) -> bool:
    """Whether an optimizer counts its calls in this variable."""
    found = _OPTIMIZER.fullmatch(path)
    return found is not None and found[4] == "iteration"


def optimizer_path(path: str) -> str | None:
    """Return the path of the optimizer that a variable belongs to, without position; None if it belongs to none."""
    found = _OPTIMIZER.fullmatch(path)
    return None if found is None else f"{found[1]}/{found[3]}" if found[3] else found[1]


class _Meanings:
    """The variables of a tree by their meaning, those of the same meaning in the order of the model."""

    def __init__(self, tree: StateTree) -> None:
        self.optimizers: dict[tuple[str, bool], OptimizerRecord] = {}
        records = of_model(tree.signature)
        self.trained = {record.path for record in records if _is_weight(record) and not record.per_replica}
        joined = Counter("_".join(record.path.split("/")[1:]) for record in records if _is_weight(record))
        self._joined_twice = [name for name, number in joined.items() if number > 1]
        found: dict[Meaning, list[tuple[tuple[int, ...], VariableRecord]]] = defaultdict(list)
        for record in records:
            meaning, position = self._meaning(record.path, tree.optimizers)
            found[meaning].append((position, record))
        self.records: dict[Meaning, tuple[VariableRecord, ...]] = {
            meaning: tuple(record for _, record in sorted(each, key=lambda one: one[0]))
            for meaning, each in found.items()
        }

    def shares_a_name(self, meaning: Meaning) -> bool:
        """Whether a slot has the name of two weights' slots: Keras joins the parts of their paths by `_`."""
        return any(meaning[-1].startswith(f"{name}_") for name in self._joined_twice)

    def _meaning(self, path: str, optimizers: Mapping[str, OptimizerRecord]) -> tuple[Meaning, tuple[int, ...]]:
        if found := _METRIC.fullmatch(path):
            return ("metrics", found[3]), (int(found[1]), int(found[2]))
        if not (found := _OPTIMIZER.fullmatch(path)):
            return (path,), ()
        prefix, position, name, slot = found.groups()
        scales = False
        if name is not None:
            # Checkpoints of earlier versions do not say the class; by default the name does.
            record = optimizers.get(f"{prefix}/{name}") or OptimizerRecord(kind=re.sub(r"_\d+$", "", name))
            scales = _plain(record.kind) == _plain(_SCALES_LOSS)
            self.optimizers[prefix, scales] = record
        return (prefix, "scale" if scales else "", slot), (int(position),)


def _in_order(meaning: Meaning, old: _Meanings, new: _Meanings) -> bool:
    return meaning[0] == "metrics" or old.trained == new.trained


def _means_the_same(meaning: Meaning, old: _Meanings, new: _Meanings) -> bool:
    """Whether two variables of one meaning by name are the same thing: what a slot holds depends on the optimizer."""
    if len(meaning) != 3:  # noqa: PLR2004 - of a slot: optimizer, whether it scales the loss, name
        return True
    prefix, scale, slot = meaning
    before, now = (each.optimizers.get((prefix, bool(scale))) for each in (old, new))
    if before is None or now is None or slot == "iteration" or slot.endswith("_average"):
        return True
    if slot.endswith("_gradient_accumulator"):
        return before.accumulates == now.accumulates
    kinds = {_plain(before.kind), _plain(now.kind)}
    return len(kinds) == 1 or kinds <= _LIKE_ADAM


def _plain(kind: str) -> str:
    """An optimizer's class or default name: `AdamW`, `adamw` and `adam_w` are the same."""
    return kind.replace("_", "").lower()


def _others(meanings: _Meanings, kept: Iterable[str]) -> list[VariableRecord]:
    known = set(kept)
    return [record for each in meanings.records.values() for record in each if record.path not in known]


def _is_weight(record: VariableRecord) -> bool:
    return record.path.startswith(_WEIGHTS) and not _SEED.fullmatch(record.path)


def _layer(path: str) -> str:
    return path.rpartition("/")[0]
