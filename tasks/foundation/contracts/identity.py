"""The identity of a run, as its log records it, and the changes of it that a user can accept.

The fields of `RunSpec` say which keys of the run file are part of it, see change_class.py.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.foundation.contracts.callback_record import LOG_EVERY, recorded_callbacks
from tasks.foundation.contracts.contents import content_differences
from tasks.foundation.contracts.data_spec import DataSpec
from tasks.foundation.contracts.identity_keys import (
    CALLBACKS,
    CONTENTS,
    IDENTITY,
    MIXTURE,
    SHUFFLE,
    SIGNATURE,
    TRANSFORM_CONTENTS,
    TRANSFORMS,
    VALIDATION,
)
from tasks.foundation.contracts.lazy_identity import LazyIdentity, digest_of
from tasks.foundation.contracts.mixture import integer_weights
from tasks.foundation.contracts.readable_values import readable
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import IdentityChanged, RunFileError
from tasks.foundation.masking import masked_values
from tasks.foundation.messages import message

_IN_RUN_FILE = (
    "data.window_shards",
    "train.seed",
    "train.global_batch_size",
    "train.drop_remainder",
    "train.accumulate",
    "train.precision",
    "train.class_weight",
    "init.weights",
    "init.freeze",
)

# The values of keys that earlier versions did not record.
_BEFORE: Mapping[str, Any] = {
    MIXTURE: None,
    SHUFFLE: True,
    VALIDATION: None,
    "train.drop_remainder": False,
    "train.accumulate": 1,
    "train.precision": None,
    "train.class_weight": None,
    "train.callbacks": None,
    "init.weights": [],
    "init.freeze": [],
    **dict.fromkeys(TRANSFORMS),
}

# Shapes that layers were built with. Their first dimension is the batch, which depends on the number of replicas. The
# identity has null there; logs of earlier versions have the size.
_BUILD_SHAPE = re.compile(
    r"^model\.config\..*(\bbuild_config\.(input_shape|shapes_dict)\b|\b(batch|build_input)_shape$)"
)

_ABSENT = "absent"
_SHOWN = 6
_VALUE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs: `key`, below the identity key `of`."""

    key: str
    recorded: Any
    now: Any
    of: str
    words: str = ""  # instead of the values

    def __str__(self) -> str:
        if self.words:
            return self.words
        before, after = str(readable(self.recorded)), str(readable(self.now))
        if before == after:  # a float32 and a double can differ in the digits that are not shown
            before, after = str(self.recorded), str(self.now)
        before, after = shorten_to_difference(before, after)
        return f"{self.key}: {before} -> {after}"


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the values that differ, in the order of `IDENTITY`."""
    found: list[Difference] = []
    for key in IDENTITY:
        if key in {CONTENTS, TRANSFORM_CONTENTS}:
            if isinstance(recorded.get(key), Mapping) and isinstance(now.get(key), Mapping):
                changed = content_differences(masked_values(recorded[key]), masked_values(now[key]))
                found += [Difference(f"{key}.{name}", "another content", words, key, words) for name, words in changed]
            continue
        # Without secrets: they are not recorded, but earlier versions did.
        before = dict(leaves(key, masked_values(recorded[key]))) if key in recorded else {}
        after = dict(leaves(key, masked_values(now[key]))) if key in now else {}
        for leaf in dict.fromkeys([*before, *after]):
            old, new = before.get(leaf, _ABSENT), after.get(leaf, _ABSENT)
            if old != new and not _differs_in_batch_size(leaf, old, new):
                found.append(Difference(leaf, old, new, key))
    return tuple(found)


def _differs_in_batch_size(leaf: str, recorded: Any, now: Any) -> bool:
    """Return whether two build shapes differ only in the batch size, which is no longer recorded."""
    if not (isinstance(recorded, list) and isinstance(now, list) and recorded and now):
        return False
    return now[0] is None and recorded[1:] == now[1:] and _BUILD_SHAPE.search(leaf) is not None


def identity_in_run_file(spec: RunSpec) -> dict[str, Any]:
    """Return the identity keys that depend only on the run file, not on data or model."""
    identity = {
        MIXTURE: _mixture(spec.data),
        SHUFFLE: spec.data.shuffle,
        "data.window_shards": spec.data.window_shards,
        "train.seed": spec.train.seed,
        "train.global_batch_size": spec.train.global_batch_size,
        "train.drop_remainder": spec.train.drop_remainder,
        "train.accumulate": spec.train.accumulate,
        "train.precision": spec.train.precision,
        "train.class_weight": _class_weights(spec),
        "init.weights": [source.model_dump(mode="json") for source in spec.init.weights],
        "init.freeze": list(spec.init.freeze),
    }
    identity = dict(masked_values(identity))
    identity |= {key: None for key, reference in spec.data.transform_of_key.items() if reference is None}
    # The identity of callbacks and transforms is their code, which is read when the model is built.
    return identity if spec.train.callbacks else identity | {CALLBACKS: None}


def part_in_run_file(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a recorded identity what follows from the run file that it is from.

    What is not set leaves no trace, so that logs from before there were transforms and mixtures have the same digest.
    """
    part = {key: identity[key] for key in _IN_RUN_FILE if key in identity}
    part |= {MIXTURE: identity[MIXTURE]} if identity.get(MIXTURE) is not None else {}
    part |= {SHUFFLE: False} if identity.get(SHUFFLE) is False else {}
    part |= {key: True for key in TRANSFORMS if identity.get(key) is not None}
    return part if identity.get(CALLBACKS, "") is not None else part | {CALLBACKS: None}


def is_as_in_run_file(recorded: Mapping[str, Any], spec: RunSpec) -> bool:
    """Whether the recorded identity is known to be that of a run file, by its digest alone; False: compare them."""
    if not isinstance(recorded, LazyIdentity):
        return False
    identity = {**identity_in_run_file(spec), **spec.data.transform_of_key}
    return recorded.in_run_file == digest_of(part_in_run_file(identity))


def _mixture(data: DataSpec) -> dict[str, Any] | None:
    """Return the proportions of a mixture in the order of its sources, however the run file scales them."""
    if not data.sources:
        return None
    return {"weights": list(integer_weights(each.weight for each in data.sources)), "exhausted": data.exhausted}


def _class_weights(spec: RunSpec) -> dict[str, float] | None:
    """Return the class weights with keys as in the log's JSON."""
    weights = spec.train.class_weight
    return None if weights is None else {str(label): weights[label] for label in sorted(weights)}


def accepted_keys(words: str) -> tuple[str, ...]:
    """Return the identity keys that `--accept` names, such as `optimizer,data` or `compile.optimizer`.

    Raises:
        RunFileError: a word is not a key.
    """
    known = _accept_words()
    keys: list[str] = []
    for word in [part.strip() for part in words.split(",")] if words else []:
        if word not in known:
            raise RunFileError(f"--accept {word or repr(word)}: unknown key; use one or more of {', '.join(known)}")
        keys.extend(known[word])
    return tuple(dict.fromkeys(keys))


def require_same_identity(
    recorded: Mapping[str, Any], now: Mapping[str, Any], *, home: str, accept: Sequence[str] = ()
) -> tuple[Difference, ...]:
    """Refuse to continue a run with another identity.

    Logs of earlier versions have fewer keys. Some missing keys have a known earlier value (`_BEFORE`); the others are
    not compared.

    Args:
        recorded: the identity in the log.
        now: the identity according to the run file.
        home: the run's home, for the message.
        accept: identity keys that may differ, see `accepted_keys`.

    Returns:
        The accepted differences.

    Raises:
        IdentityChanged: another key differs; the message shows the differences.
    """
    recorded = {**_BEFORE, **recorded}
    both = recorded.keys() & now.keys()
    found = differences({key: recorded[key] for key in both}, {key: now[key] for key in both})
    if recorded_callbacks(recorded).ignores_rows:
        found = tuple(each for each in found if each.key != f"{CALLBACKS}.{LOG_EVERY}")
    # Other variables follow from another change. Whether they can be accepted, the two models decide.
    decided = tuple(each for each in found if each.of != SIGNATURE) or found
    refused = tuple(each for each in decided if each.of not in accept)
    if refused:
        details = list(dict.fromkeys(map(str, refused)))  # two transforms may use one vocabulary
        raise IdentityChanged(
            message(
                f"{home} was started with other settings, data or code", details=details, hints=_remedies(found, home)
            )
        )
    return found


def difference_words(found: Sequence[Difference]) -> str:
    """Return the first few differences and the number of further ones; digests of variables only if nothing else is."""
    found = [each for each in found if each.of != SIGNATURE] or found
    shown = "; ".join(str(difference) for difference in found[:_SHOWN])
    return f"{shown}; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else shown


def _remedies(found: Sequence[Difference], home: str) -> list[str]:
    revert = "restore the run file as it was"
    if any(each.of in {CONTENTS, TRANSFORM_CONTENTS} for each in found):
        revert = "let the code read what it read when the run began; where a set decides an order, use sorted(...)"
    begin = f"or set another name under run: to start a new run; init.weights: {home} begins it with these weights"
    keys = list(dict.fromkeys(each.of for each in found if each.of != SIGNATURE)) or [SIGNATURE]
    accept = f"--accept {','.join(map(_short_name, keys))}"
    fork = f"baton fork {shlex.quote(home)} --as NEW, then baton run FILE --set run=NEW {accept}"
    return [
        revert,
        f"or continue with the change from the newest checkpoint: baton run FILE {accept}",
        f"or try the change in a copy of the run: {fork}",
        begin,
    ]


def _accept_words() -> dict[str, tuple[str, ...]]:
    """Return the words that `--accept` takes, and the keys that each names."""
    words: dict[str, tuple[str, ...]] = {_short_name(key): (key,) for key in IDENTITY}
    for group in ("data", "model", "compile"):
        words[group] = tuple(key for key in IDENTITY if key.startswith(f"{group}."))
    return words | {key: (key,) for key in IDENTITY}


def _short_name(key: str) -> str:
    """Return the short name of a key if it is unambiguous: `optimizer`, but `model.config`."""
    group, _, name = key.partition(".")
    return key if group == "model" or name == "other" else name


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values below a key, as `key.name` and `key[0]`."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from leaves(f"{key}.{name}", below)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for index, below in enumerate(value):
            yield from leaves(f"{key}[{index}]", below)
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def shorten_to_difference(before: str, after: str) -> tuple[str, str]:
    """Shorten two different texts to fit one line of a message, starting near their first difference."""
    if len(before) <= _VALUE_CHARACTERS and len(after) <= _VALUE_CHARACTERS:
        return before, after
    pairs = enumerate(zip(before, after, strict=False))
    same = next((index for index, (old, new) in pairs if old != new), min(len(before), len(after)))
    start = max(same - _VALUE_CHARACTERS // 3, 0)
    return _cut(before, start), _cut(after, start)


def _cut(text: str, start: int) -> str:
    end = start + _VALUE_CHARACTERS - 6
    return f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}"
