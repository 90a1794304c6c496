"""What makes a run this run, as its log records it, and which changes of it can be accepted.

Which keys of the run file decide what is recorded here stands in run_file_keys.py.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.foundation.contracts.readable_values import plain
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import IdentityChanged, RunFileError
from tasks.foundation.messages import message


@dataclass(frozen=True, slots=True)
class Recorded:
    """A key of the identity.

    Attributes:
        why: a change of it would make another run, with ...
        accepted: what an accepted change does; None where the checkpoint could not be restored, so it never is.
    """

    why: str
    accepted: str | None


CALLBACKS = "train.callbacks"

_SAME_VARIABLES = "holds from that step on, if all variables stay the same"
_OTHER_BATCHES = (
    "the order is another function from that step on: examples of the epoch may be seen again or not at all"
)

IDENTITY: Mapping[str, Recorded] = {
    "data.content_digest": Recorded("other examples", _OTHER_BATCHES),
    "data.window_shards": Recorded("another order of the examples", _OTHER_BATCHES),
    "train.seed": Recorded(
        "other initial weights, order and dropout",
        "another order from that step on; weights and random streams are the checkpoint's",
    ),
    "train.global_batch_size": Recorded("other batches", _OTHER_BATCHES),
    "train.accumulate": Recorded("gradients summed in another order", "holds from that step on"),
    "train.precision": Recorded("another arithmetic", _SAME_VARIABLES),
    "train.class_weight": Recorded("another loss", "holds from that step on"),
    CALLBACKS: Recorded(
        "other callbacks, or other steps at which they act",
        "holds from that step on; what they remember begins anew, and a run that they had ended goes on",
    ),
    "init.weights": Recorded("other initial weights", "changes nothing any more: the weights are the checkpoint's"),
    "init.freeze": Recorded("other variables that are trained", _SAME_VARIABLES),
    "model.config": Recorded("another architecture", _SAME_VARIABLES),
    "model.code": Recorded("other code in the user's own layers or train_step", _SAME_VARIABLES),
    "model.signature": Recorded("other variables", None),
    "model.options": Recorded("other arguments of the function that builds the model", _SAME_VARIABLES),
    "compile.optimizer": Recorded(
        "another optimizer or learning rate", f"{_SAME_VARIABLES}; a changed learning rate replaces the checkpoint's"
    ),
    "compile.loss": Recorded("another loss", "holds from that step on"),
    "compile.metrics": Recorded("other metrics, whose sums are part of the state", _SAME_VARIABLES),
    "compile.other": Recorded("another way to compute gradients or metrics", _SAME_VARIABLES),
}

# What runs were like before these keys were recorded.
_BEFORE: Mapping[str, Any] = {
    "train.accumulate": 1,
    "train.precision": None,
    "train.class_weight": None,
    "train.callbacks": None,
    "init.weights": [],
    "init.freeze": [],
}

# Shapes that layers were built with. Their first size is that of the batch, which depends on the number of replicas:
# the identity has null there, and logs from before that have the size.
_BUILD_SHAPE = re.compile(
    r"^model\.config\..*(\bbuild_config\.(input_shape|shapes_dict)\b|\b(batch|build_input)_shape$)"
)

_ABSENT = "absent"
_SHOWN = 6
_VALUE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that differs, `key`, below the identity key `of`."""

    key: str
    recorded: Any
    now: Any
    of: str

    def __str__(self) -> str:
        before, after = str(plain(self.recorded)), str(plain(self.now))
        if before == after:  # a float32 and a double may differ in what is not shown
            before, after = str(self.recorded), str(self.now)
        before, after = _around_the_difference(before, after)
        return f"{self.key}: {before} -> {after}"


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Leaves of the identity keys that differ, in the order of `IDENTITY`."""
    found: list[Difference] = []
    for key in IDENTITY:
        before = dict(_leaves(key, recorded[key])) if key in recorded else {}
        after = dict(_leaves(key, now[key])) if key in now else {}
        for leaf in dict.fromkeys([*before, *after]):
            old, new = before.get(leaf, _ABSENT), after.get(leaf, _ABSENT)
            if old != new and not _is_any_batch(leaf, old, new):
                found.append(Difference(leaf, old, new, key))
    return tuple(found)


def _is_any_batch(leaf: str, recorded: Any, now: Any) -> bool:
    """Whether two shapes of a build differ only in the size of the batch, which does not count now."""
    if not (isinstance(recorded, list) and isinstance(now, list) and recorded and now):
        return False
    return now[0] is None and recorded[1:] == now[1:] and _BUILD_SHAPE.search(leaf) is not None


def identity_in_run_file(spec: RunSpec) -> dict[str, Any]:
    """The identity keys that the run file alone decides, without data or model."""
    identity = {
        "data.window_shards": spec.data.window_shards,
        "train.seed": spec.train.seed,
        "train.global_batch_size": spec.train.global_batch_size,
        "train.accumulate": spec.train.accumulate,
        "train.precision": spec.train.precision,
        "train.class_weight": _class_weights(spec),
        "init.weights": [source.model_dump(mode="json") for source in spec.init.weights],
        "init.freeze": list(spec.init.freeze),
    }
    # What callbacks do is told by their code, which is looked at where the model is built.
    return identity if spec.train.callbacks else identity | {CALLBACKS: None}


def _class_weights(spec: RunSpec) -> dict[str, float] | None:
    """As the log's JSON has them."""
    weights = spec.train.class_weight
    return None if weights is None else {str(label): weights[label] for label in sorted(weights)}


def accepted_keys(words: str) -> tuple[str, ...]:
    """The identity keys that `--accept` names: `optimizer,data` or `compile.optimizer`; none for no words.

    Raises:
        RunFileError: a word names no key, or one whose change can never be accepted.
    """
    known = _words()
    keys: list[str] = []
    for word in [part.strip() for part in words.split(",")] if words else []:
        if word in IDENTITY and word not in known:
            raise RunFileError(
                f"--accept {word}: with other variables the checkpoint cannot be restored; give the changed run "
                "another name under run:, so that it begins at step 0"
            )
        if word not in known:
            raise RunFileError(f"--accept {word or repr(word)} names nothing; say one or more of {', '.join(known)}")
        keys.extend(known[word])
    return tuple(dict.fromkeys(keys))


def require_same_identity(
    recorded: Mapping[str, Any], now: Mapping[str, Any], *, home: str, accept: Sequence[str] = ()
) -> tuple[Difference, ...]:
    """Refuse to continue a run as another one.

    A log of an earlier version has fewer keys. Some that came later had one meaning before (`_BEFORE`) and are compared
    with that; for lacking others it is no other run.

    Args:
        recorded: the identity in the log.
        now: that of the run file.
        home: the run's, for the message.
        accept: identity keys that may differ, see `accepted_keys`.

    Returns:
        What differs and was accepted.

    Raises:
        IdentityChanged: showing what else differs.
    """
    recorded = {**_BEFORE, **recorded}
    both = recorded.keys() & now.keys()
    found = differences({key: recorded[key] for key in both}, {key: now[key] for key in both})
    refused = tuple(each for each in found if each.of not in accept or IDENTITY[each.of].accepted is None)
    if refused:
        details = [str(difference) for difference in refused]
        raise IdentityChanged(
            message(f"{home} was begun as another run", details=details, hints=_remedies(found, home))
        )
    return found


def in_words(found: Sequence[Difference]) -> str:
    """The first few differences, and how many more there are."""
    shown = "; ".join(str(difference) for difference in found[:_SHOWN])
    return f"{shown}; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else shown


def _remedies(found: Sequence[Difference], home: str) -> list[str]:
    back = "put the run file back as it was"
    begin = "or give the run another name under run: to begin a new one"
    keys = list(dict.fromkeys(each.of for each in found))
    if any(IDENTITY[key].accepted is None for key in keys):
        return [back, begin]
    accept = f"--accept {','.join(map(_word, keys))}"
    fork = f"baton fork {shlex.quote(home)} --as NEW, then baton run FILE --set run=NEW {accept}"
    return [
        back,
        f"or go on with the change from the newest checkpoint: baton run FILE {accept}",
        f"or change a copy of the run: {fork}",
        begin,
    ]


def _words() -> dict[str, tuple[str, ...]]:
    """What can be said after `--accept`, and the keys that it names."""
    acceptable = [key for key, recorded in IDENTITY.items() if recorded.accepted is not None]
    words: dict[str, tuple[str, ...]] = {_word(key): (key,) for key in acceptable}
    for group in ("data", "model", "compile"):
        words[group] = tuple(key for key in acceptable if key.startswith(f"{group}."))
    return words | {key: (key,) for key in acceptable}


def _word(key: str) -> str:
    """The short name of a key, where that says enough: `optimizer`, but `model.config`."""
    group, _, name = key.partition(".")
    return key if group == "model" or name == "other" else name


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for index, below in enumerate(value):
            yield from _leaves(f"{key}[{index}]", below)
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def _around_the_difference(before: str, after: str) -> tuple[str, str]:
    """Two texts that differ, cut to what fits a line of a message; long ones to where they begin to differ."""
    if len(before) <= _VALUE_CHARACTERS and len(after) <= _VALUE_CHARACTERS:
        return before, after
    pairs = enumerate(zip(before, after, strict=False))
    same = next((place for place, (old, new) in pairs if old != new), min(len(before), len(after)))
    start = max(same - _VALUE_CHARACTERS // 3, 0)
    return _cut(before, start), _cut(after, start)


def _cut(text: str, start: int) -> str:
    end = start + _VALUE_CHARACTERS - 6
    return f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}"
