"""The identity of a run, as its log records it, and the changes of it that a user can accept.

The fields of `RunSpec` say which keys of the run file are part of it, see base.py. Each recorded key says what another
value would mean and what an accepted change does. Values that are only compared with others, such as the configuration
of a model, may be any JSON; the types of those that code relies on are checked, wherever a home is from. An identity
may be large, and few commands look at it, so it is read when it is needed. Numbers in messages are written as people
write them: 0.001, not 0.0010000000474974513, which a float32 becomes as a double.
"""

import hashlib
import json
import math
import re
import shlex
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from baton.tasks.foundation.contracts.base import (
    CARRIED,
    FROM_THAT_STEP,
    OTHER_BATCHES,
    ChangeClass,
    Contract,
    DatasetPath,
    keys_of,
)
from baton.tasks.foundation.contracts.contents import content_differences
from baton.tasks.foundation.contracts.data_spec import DataSpec, integer_weights
from baton.tasks.foundation.contracts.run_spec import TRAIN_EXAMPLES, KeepBest, RunSpec
from baton.tasks.foundation.errors import IdentityChanged, RunFileError
from baton.tasks.foundation.masking import MASK, masked_values
from baton.tasks.foundation.text import command, message, option


@dataclass(frozen=True, slots=True)
class Recorded:
    """A key of the identity. Keys of the run file declare it on their fields, with their class.

    Attributes:
        why: completes "a change would make it another run, with ...".
        accepted: effect of an accepted change.
    """

    why: str
    accepted: str


CALLBACKS = "train.callbacks"
VALIDATION = "data.validation"
MIXTURE = "data.sources"
SIGNATURE = "model.signature"
CONTENTS = "model.contents"
TRANSFORM_CONTENTS = "data.contents"

_KEYS: Final = {
    name: (field, each)
    for name, field in keys_of(RunSpec)
    for each in field.metadata
    if isinstance(each, ChangeClass) and each.accepted
}
# Keys that no key of the run file has: what data and code are.
_MADE: Final[Mapping[str, Recorded]] = {
    "data.content_digest": Recorded("other examples", OTHER_BATCHES),
    TRANSFORM_CONTENTS: Recorded("other vocabularies, tables or arrays that transforms read", FROM_THAT_STEP),
    "model.config": Recorded("another architecture", CARRIED),
    "model.code": Recorded("other code in the user's layers or train_step", CARRIED),
    SIGNATURE: Recorded(
        "other variables",
        "is accepted with any other key; weights with other names or shapes never are: init.weights in a new run",
    ),
    CONTENTS: Recorded("other vocabularies, tables or arrays in the layers, or that their code reads", FROM_THAT_STEP),
    "compile.optimizer": Recorded(
        "another optimizer or learning rate", f"{CARRIED}; a changed learning rate replaces the checkpoint's"
    ),
    "compile.loss": Recorded("another loss", FROM_THAT_STEP),
    "compile.metrics": Recorded("other metrics, whose sums are part of the state", CARRIED),
    "compile.other": Recorded("another way to compute gradients or metrics", CARRIED),
}
_GROUPS: Final = ("data", "train", "init", "model", "compile")
_RECORDED: Final = {**{key: Recorded(each.why, each.accepted) for key, (_, each) in _KEYS.items()}, **_MADE}
IDENTITY: Mapping[str, Recorded] = {
    key: each for group in _GROUPS for key, each in _RECORDED.items() if key.partition(".")[0] == group
}
# Keys whose recorded value is the one in the run file.
_OF_RUN_FILE: Final = tuple(key for key, (_, each) in _KEYS.items() if each.plain)


# For information, as `data.source`: the code of the callbacks decides whether they changed.
CALLBACK_RECORD = "callbacks.record"
# In what the identity has of callbacks; it counts unless they ignore rows.
LOG_EVERY = "train.log_every_steps"
# In what the identity has of callbacks and transforms: the digests of their functions and classes.
CODE = "code"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError("use letters, digits, '.', '_' and '-' in the name of a file")
    return name


class CsvFile(Contract):
    """A CSV file of the epochs, written from the log."""

    name: Annotated[str, AfterValidator(_file_name)] = Field(description="file name in the folder callbacks/ of a home")
    separator: str = Field(default=",", min_length=1, max_length=1)


class CallbackRecord(Contract):
    """What Baton does in place of callbacks, and which of their hooks need a call at the end of a run."""

    keep_best: KeepBest | None = Field(default=None, description="of ModelCheckpoint, or of restore_best_weights")
    csv_files: tuple[CsvFile, ...] = Field(default=(), description="of CSVLogger")
    on_train_end: bool = Field(default=False, description="whether a callback has its own on_train_end")
    sees_rows: bool = Field(
        default=True,
        description="whether callbacks depend on the steps of rows: they act at them, have batch hooks, or monitor a "
        "training metric",
    )


def recorded_callbacks(identity: Mapping[str, Any]) -> CallbackRecord:
    """Return what a run's identity has of its callbacks."""
    return CallbackRecord.model_validate_json(json.dumps(identity.get(CALLBACK_RECORD, {})), extra="ignore")


def keep_best_of(spec: RunSpec, identity: Mapping[str, Any]) -> KeepBest | None:
    """Return which checkpoint counts as the best: by the run file, or else by its callbacks."""
    if spec.checkpoint.keep_best is not None or spec.train.callbacks is None:
        return spec.checkpoint.keep_best
    return recorded_callbacks(identity).keep_best


_SHOWN_CHARACTERS = 60
_BATCH: Final = "train.global_batch_size"
_DROP: Final = "train.drop_remainder"


def _callback_record(value: dict[str, Any]) -> dict[str, Any]:
    CallbackRecord.model_validate(value, extra="ignore")  # as `recorded_callbacks` reads it
    return value


_OBJECT = dict[str, Any] | None
_POSITIVE = Annotated[int, Field(ge=1, lt=2**63)]
_TYPES: Final[Mapping[str, Any]] = {
    "data.source": str,
    "data.folder": DatasetPath,
    "data.content_digest": str,
    "data.validation_folder": DatasetPath,
    VALIDATION: str | None,
    TRAIN_EXAMPLES: _POSITIVE,
    MIXTURE: _OBJECT,
    TRANSFORM_CONTENTS: _OBJECT,
    **{key: Annotated[_KEYS[key][0].annotation, *_KEYS[key][0].metadata] for key in _OF_RUN_FILE},
    "train.class_weight": dict[str, float] | None,
    CALLBACKS: _OBJECT,
    CALLBACK_RECORD: Annotated[dict[str, Any], AfterValidator(_callback_record)],
    "init.weights": list[Any],
    "init.freeze": list[str],
    SIGNATURE: str,
    CONTENTS: _OBJECT,
    "model.options": _OBJECT,
}


def require_types(identity: Mapping[str, Any]) -> None:
    """Refuse an identity with a value that no version of Baton writes.

    Raises:
        PydanticCustomError: names the first such key, with its value.
    """
    for key, kind in _TYPES.items():
        if key in identity:
            try:
                _adapter(kind).validate_python(identity[key])
            except ValidationError as fault:
                first = fault.errors(include_input=False, include_url=False)[0]
                below = "".join(f".{part}" for part in first["loc"])
                raise _refusal(f"{key}{below} = {_shown(identity[key])}: {first['msg']}") from fault
    examples, batch = identity.get(TRAIN_EXAMPLES), identity.get(_BATCH)
    if identity.get(_DROP) and examples is not None and batch is not None and examples < batch:
        raise _refusal(f"{_DROP} leaves no batch of {_BATCH} = {batch} in {TRAIN_EXAMPLES} = {examples}")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _refusal(words: str) -> PydanticCustomError:
    return PydanticCustomError("identity", "{words}", {"words": words})


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the sha256 of JSON with sorted keys, the first 32 digits."""
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def _validated(value: Any, handler: Callable[[Any], Any]) -> Any:
    identity = dict(handler(value))
    require_types(identity)
    return identity


# For fields of contracts: JSON has the whole identity.
AS_IDENTITY = (WrapValidator(_validated), PlainSerializer(dict))


_DIGITS_OF_FLOAT32 = 9  # always enough to identify a float32


def readable(value: Any) -> Any:
    """Replace every float32 in the value by the shortest decimal that is the same float32. For messages only.

    A float that is not equal to any float32 stays as it is: the double 0.001 is already short.
    """
    if isinstance(value, float):
        return _shortest(value)
    if isinstance(value, Mapping):
        return {key: readable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [readable(below) for below in value]
    return value


def _shortest(value: float) -> float:
    if not math.isfinite(value) or _as_float32(value) != value:
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, _DIGITS_OF_FLOAT32 + 1))
    found = next((each for each in shorter if _as_float32(each) == value), value)
    # Fewer digits can be a longer text: 999999986991104.0 becomes 1000000000000000.0.
    return min(value, found, key=lambda each: len(repr(each)))


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:  # larger than the largest float32
        return math.nan


_ABSENT = "absent"
_OPTIONS = "model.options"
# Keys that the identity of callbacks has.
_SCHEDULE = ("evaluate.every_steps", LOG_EVERY, "evaluate.every")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_YAML_VALUES = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
# Digests that say nothing to a person.
_DIGESTED = {
    "data.content_digest": "other examples",
    VALIDATION: "other validation examples",
    SIGNATURE: "other variables",
}
_OF_FILES = ("data.content_digest", VALIDATION)
_DIGESTS = re.compile(r"[0-9a-f]{16}(?: [0-9a-f]{16})*")
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
        return f"{self.key_of_run_file or self.key}: {before} -> {after}"

    @property
    def key_of_run_file(self) -> str:
        """The key of the run file that has this value; "" if none has it as it is recorded."""
        schedule = self.key.removeprefix(f"{CALLBACKS}.")
        if self.of == CALLBACKS and schedule in _SCHEDULE:
            return schedule
        return self.key if self.key in _OF_RUN_FILE or self.of == _OPTIONS else ""

    @property
    def override_back(self) -> str:
        """The `key=value` of `--set` that puts the recorded value back; "" if there is none."""
        plain = self.recorded is None or isinstance(self.recorded, bool | int | float | str)
        if not self.key_of_run_file or not plain or self.recorded in {_ABSENT, MASK}:
            return ""
        value = readable(self.recorded)
        is_word = isinstance(value, str) and _WORD.fullmatch(value) is not None and value.lower() not in _YAML_VALUES
        return f"{self.key_of_run_file}={value if is_word else json.dumps(value)}"


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the values that differ, in the order of `IDENTITY`."""
    found: list[Difference] = []
    for key in IDENTITY:
        if key in {CONTENTS, TRANSFORM_CONTENTS}:
            if isinstance(recorded.get(key), Mapping) and isinstance(now.get(key), Mapping):
                changed = content_differences(recorded[key], masked_values(now[key]))
                found += [Difference(f"{key}.{name}", "another content", words, key, words) for name, words in changed]
            continue
        # Without secrets, which are not recorded, or were by a version that did not know one for what it is.
        before = dict(leaves(key, masked_values(recorded[key]))) if key in recorded else {}
        after = dict(leaves(key, masked_values(now[key]))) if key in now else {}
        for leaf in dict.fromkeys([*before, *after]):
            old, new = before.get(leaf, _ABSENT), after.get(leaf, _ABSENT)
            if old != new:
                found.append(Difference(leaf, old, new, key, _words_of_digests(leaf, old, new)))
    return tuple(found)


def _words_of_digests(key: str, old: Any, new: Any) -> str:
    """What happened to a function, a class or a set, whose digest says nothing to a person; "" for other values."""
    if key in _DIGESTED and isinstance(old, str) and isinstance(new, str) and _ABSENT not in {old, new}:
        return f"{key}: {_DIGESTED[key]} ({old[:8]} -> {new[:8]})"
    digests = [isinstance(each, str) and _DIGESTS.fullmatch(each) is not None for each in (old, new)]
    if all(digests):
        return f"{key}: changed"
    if any(digests) and _ABSENT in {old, new}:
        return f"{key}: {'new' if old == _ABSENT else 'gone'}"
    return ""


def identity_in_run_file(spec: RunSpec) -> dict[str, Any]:
    """Return the identity keys that depend only on the run file, not on data or model."""
    identity = {
        **{key: attrgetter(key)(spec) for key in _OF_RUN_FILE},
        MIXTURE: _mixture(spec.data),
        "train.class_weight": _class_weights(spec),
        "init.weights": [source.model_dump(mode="json") for source in spec.init.weights],
        "init.freeze": list(spec.init.freeze),
    }
    identity = dict(masked_values(identity))
    identity |= {key: None for key, reference in spec.data.transform_of_key.items() if reference is None}
    # The identity of callbacks and transforms is their code, which is read when the model is built.
    return identity if spec.train.callbacks else identity | {CALLBACKS: None}


def callback_schedule(spec: RunSpec) -> dict[str, Any]:
    """Return what the identity of callbacks has of the run file: their function, and the steps at which they act."""
    rows: int | str | None = spec.train.log_every_steps
    if spec.train.epochs is not None:  # each epoch ends with a row too
        rows = "epoch" if rows is None else f"epoch, {rows}"
    return {
        "function": (spec.train.callbacks or "").partition(":")[2],
        "evaluate.every_steps": spec.evaluate.every_steps,
        LOG_EVERY: rows,
        # Left out where evaluations follow from steps alone.
        **({} if spec.evaluate.every is None else {"evaluate.every": spec.evaluate.every}),
    }


def identity_without_code(spec: RunSpec, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity as far as it is known before the user's code is imported; the rest is as recorded."""
    found = identity_in_run_file(spec)
    callbacks, options = recorded.get(CALLBACKS), recorded.get(_OPTIONS)
    if spec.train.callbacks is not None and isinstance(callbacks, Mapping):
        kept = {key: value for key, value in callbacks.items() if key != "evaluate.every"}
        found[CALLBACKS] = kept | callback_schedule(spec)
    if isinstance(options, Mapping):  # it also has what Baton passes, such as the number of steps
        given = json.loads(json.dumps(masked_values(spec.model.options), default=str))
        found[_OPTIONS] = {**options, **given}
    return found


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
            given = option("accept", word or repr(word))
            raise RunFileError(given + f": unknown key; use one or more of {', '.join(known)}")
        keys.extend(known[word])
    return tuple(dict.fromkeys(keys))


def require_same_identity(
    recorded: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    home: str,
    accept: Sequence[str] = (),
    code: Callable[[Sequence[Difference]], Sequence[str]] = lambda _: (),
    files: Callable[[], Sequence[str]] = tuple,
    before_imports: bool = False,
    fits: bool = True,
) -> tuple[Difference, ...]:
    """Refuse to continue a run with another identity.

    A key that one of the two does not have is not compared.

    Args:
        now: the identity according to the run file.
        home: the run's home, for the message.
        accept: identity keys that may differ, see `accepted_keys`.
        code: returns the lines of the message that show the changes of the user's code behind differences.
        files: returns the lines of the message that name changed files of the data.
        before_imports: whether the model is not built yet, so that more keys of it may differ than are known.
        fits: whether the weights of the newest checkpoint fit the model, so that a change can be accepted.

    Returns:
        The accepted differences.

    Raises:
        IdentityChanged: another key differs; the message shows the differences.
    """
    both = recorded.keys() & now.keys()
    found = differences({key: recorded[key] for key in both}, {key: now[key] for key in both})
    if not recorded_callbacks(recorded).sees_rows:
        found = tuple(each for each in found if each.key != f"{CALLBACKS}.{LOG_EVERY}")
    # Other variables follow from another change. Whether they can be accepted, the two models decide.
    decided = tuple(each for each in found if each.of != SIGNATURE) or found
    refused = tuple(each for each in decided if each.of not in accept)
    if refused:
        details = list(dict.fromkeys(map(str, refused)))  # two transforms may use one vocabulary
        details += files() if any(each.of in _OF_FILES for each in refused) else ()
        lines = code(refused)
        headline = message(f"{home} was started with other settings, data or code", details=details)
        back = _way_back(refused, code_is_shown=bool(lines))
        remedies = [back, *_ways_on(found, home, before_imports=before_imports, fits=fits)]
        raise IdentityChanged(message("\n".join([headline, *(f"  {line}" for line in lines)]), hints=remedies))
    return found


def difference_words(found: Sequence[Difference]) -> str:
    """Return the first few differences and the number of further ones; digests of variables only if nothing else is."""
    found = [each for each in found if each.of != SIGNATURE] or found
    shown = "; ".join(str(difference) for difference in found[:_SHOWN])
    return f"{shown}; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else shown


def _ways_on(found: Sequence[Difference], home: str, *, before_imports: bool, fits: bool) -> list[str]:
    keys = list(dict.fromkeys(_short_name(each.of) for each in found if each.of != SIGNATURE)) or [SIGNATURE]
    unknown = before_imports and any(each.of == _OPTIONS for each in found)
    if unknown:
        # What else of the model changes with them is not known yet. What does not differ is not accepted.
        keys = [*(key for key in keys if not key.startswith("model.")), "model", "compile"]
    new, accept = ("set", "run=NEW"), ("accept", ",".join(keys))
    kept = ", if all weights keep their shapes" if unknown else ""
    weights, that_fit = home, ""
    if unknown or not fits:
        weights, that_fit = json.dumps({"source": home, "strict": False}, separators=(",", ":")), " that fit"
    added = f" (with the weights of this one{that_fit}: add " + command("", ("set", f"init.weights={weights}")) + ")"
    copied = command("run", new, accept, after=f"baton fork {shlex.quote(home)} --as NEW")
    continued = [
        f"or continue with the change from the newest checkpoint{kept}: " + command("run", accept),
        f"or try the change in a copy of the run{kept}: " + copied,
    ]
    return [*(continued if fits else ()), "or start a new run: " + command("run", new) + added]


def _way_back(found: Sequence[Difference], *, code_is_shown: bool) -> str:
    """How to continue the run as it was."""
    if any(each.of in {CONTENTS, TRANSFORM_CONTENTS} for each in found):
        return "let the code read what it read when the run began; where a set decides an order, use sorted(...)"
    added = [each.key for each in found if each.of == _OPTIONS and each.recorded == _ABSENT]
    out = f"leave {', '.join(added)} out" if added else ""
    back = list(dict.fromkeys(filter(None, (each.override_back for each in found))))
    if back:
        lines = ", ".join(each.replace("=", ": ", 1) for each in back)
        sets = command("run", *(("set", each) for each in back))
        code = "the lines with -, and " if code_is_shown else ""
        before = f"{out}, and " if out else ""
        return f"{before}restore {code}{lines} in the run file, or for this command: " + sets
    if out:
        return out
    if code_is_shown:
        return "restore the lines with - in place of those with +"
    return "restore the run file, the code and the data as they were"


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
