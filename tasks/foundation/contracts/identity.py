"""What makes a run this run. Everything in the run file that is not named here is operational and may change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import IdentityChanged

# key of the origin entry: why a change of it would make another run
IDENTITY: Mapping[str, str] = {
    "data.content_digest": "other examples",
    "data.window_shards": "another order of the examples",
    "train.seed": "other initial weights, order and dropout",
    "train.global_batch_size": "other batches",
    "model.config": "another architecture",
    "model.code": "other code in the user's own layers or train_step",
    "model.signature": "other variables",
    "model.options": "other arguments of the function that builds the model",
    "compile.optimizer": "another optimizer or learning rate",
    "compile.loss": "another loss",
    "compile.metrics": "other metrics, whose sums are part of the state",
    "compile.other": "another way to compute gradients or metrics",
}

_ABSENT = "absent"
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that differs."""

    key: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.recorded)} -> {_short(self.now)}"


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Leaves of the identity keys that differ, in the order of `IDENTITY`."""
    found: list[Difference] = []
    for key in IDENTITY:
        before = dict(_leaves(key, recorded[key])) if key in recorded else {}
        after = dict(_leaves(key, now[key])) if key in now else {}
        for leaf in dict.fromkeys([*before, *after]):
            old, new = before.get(leaf, _ABSENT), after.get(leaf, _ABSENT)
            if old != new:
                found.append(Difference(leaf, old, new))
    return tuple(found)


def identity_in_run_file(spec: RunSpec) -> dict[str, Any]:
    """The identity keys that the run file alone decides, without data or model."""
    return {
        "data.window_shards": spec.data.window_shards,
        "train.seed": spec.train.seed,
        "train.global_batch_size": spec.train.global_batch_size,
    }


def require_same_identity(recorded: Mapping[str, Any], now: Mapping[str, Any], *, home: str) -> None:
    """Refuse to continue a run as another one. Only keys that both know are compared.

    A log of an earlier version has fewer keys; its run is no other one for that.

    Raises:
        IdentityChanged: showing what differs.
    """
    both = recorded.keys() & now.keys()
    found = differences({key: recorded[key] for key in both}, {key: now[key] for key in both})
    if found:
        shown = "; ".join(str(difference) for difference in found[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise IdentityChanged(
            f"{home} was begun as another run: {shown}{more}. Put the run file back as it was, or give it another "
            "name under run: to begin a new run"
        )


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for index, below in enumerate(value):
            yield from _leaves(f"{key}[{index}]", below)
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - fits a line of a message
