"""The identity of a run, as its log records it, and the changes of it that a user can accept.

The fields of `RunSpec` say which keys of the run file are part of it, see base.py. Each recorded key says what another
value would mean and what an accepted change does. Values that are only compared with others, such as the configuration
of a model, may be any JSON; the types of those that code relies on are checked, wherever a home is from. An identity
may be large, and few commands look at it, so it is read when it is needed. Numbers in messages are written as people
write them: 0.001, not 0.0010000000474974513, which a float32 becomes as a double.

A run must go on with the same contents of a vocabulary, a table, an array or a file that a layer keeps, but an entry of
the log stays small. So a record of contents has the number of items, the first of them as they are, and a digest of
each of at most 32 blocks: enough to tell two contents apart, and to say where they differ first. Floats are recorded by
two numbers of each block, and compared with a tolerance: the same formula has other last bits on another processor,
which is no other content.
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
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from tasks.foundation.contracts.base import Contract, DatasetPath
from tasks.foundation.contracts.data_spec import DataSpec, integer_weights
from tasks.foundation.contracts.run_spec import TRAIN_EXAMPLES, KeepBest, RunSpec
from tasks.foundation.errors import IdentityChanged, RunFileError
from tasks.foundation.messages import MASK, masked_values, message

_MOST_BLOCKS: Final = 32
_DIGITS: Final = 8
_FIRST_CHARACTERS: Final = 4000
_ITEM_CHARACTERS: Final = 60
_TOLERANCE: Final = 1e-5


def block_length(number: int) -> int:
    """Return the number of items of a block: a power of two, so that contents of similar sizes have equal blocks."""
    length = 1
    while length * _MOST_BLOCKS < number:
        length *= 2
    return length


def record_of_items(items: Sequence[str], *, what: str, item: str, start: int = 0) -> dict[str, Any]:
    """Return the record of a sequence of texts.

    Args:
        items: the texts.
        what: names the content in messages, as "vocabulary of layer `words`".
        item: names one of its items, as "token".
        start: number of the first item, as its users count.
    """
    first: list[str] = []
    left = _FIRST_CHARACTERS
    for each in items:
        short = each if len(each) <= _ITEM_CHARACTERS else f"{each[:_ITEM_CHARACTERS]}..."
        left -= len(short) + 4
        if left < 0:
            break
        first.append(short)
    length = block_length(len(items))
    return {
        "what": what,
        "item": item,
        "start": start,
        "size": len(items),
        "first": first,
        "blocks": [
            hashlib.sha256(json.dumps(items[begin : begin + length]).encode()).hexdigest()[:_DIGITS]
            for begin in range(0, len(items), length)
        ],
    }


def record_of_floats(
    blocks: Sequence[tuple[float, float]], *, what: str, dtype: str, shape: Sequence[int]
) -> dict[str, Any]:
    """Return the record of an array of floats.

    Args:
        blocks: a weighted sum and a norm of each block, see `block_length`.
        what: names the content in messages.
        dtype: of the array.
        shape: of the array.
    """
    return {
        "what": what,
        "dtype": dtype,
        "shape": list(shape),
        "floats": [float(f"{number:.9g}") for block in blocks for number in block],
    }


def content_differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the contents that differ, by their names in the records, each with a sentence that says where."""
    for name in dict.fromkeys([*recorded, *now]):
        before, after = recorded.get(name), now.get(name)
        if not all(each is None or _is_record(each) for each in (before, after)):
            yield name, f"the record of {name} cannot be read"
        elif before is None or after is None:
            present: Any = before or after
            yield name, f"{present['what']} {'is new' if before is None else 'is gone'}"
        elif found := _difference(before, after):
            yield name, f"{after['what']} changed: {found}"


def _is_record(record: Any) -> bool:
    """Whether a record is one of this module; a home may be a stranger's."""
    if not isinstance(record, Mapping) or not isinstance(record.get("what"), str):
        return False
    if "floats" not in record:
        kinds = {"item": str, "start": int, "size": int, "first": list, "blocks": list}
        return all(isinstance(record.get(key), kind) for key, kind in kinds.items())
    return all(
        isinstance(record.get(key), list) and all(isinstance(number, int | float) for number in record[key])
        for key in ("floats", "shape")
    )


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Where two records differ first; "" if they do not."""
    for key in ("dtype", "shape"):
        if before.get(key) != now.get(key):
            return f"its {key} was {before.get(key)}, is {now.get(key)}"
    if {*before} ^ {*now} or len(before.get("floats", ())) != len(now.get("floats", ())):
        return "it is of another kind"
    return _difference_of_floats(before, now) if "floats" in now else _difference_of_items(before, now)


def _difference_of_items(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    item, start = now["item"], now["start"]
    sizes = f"it has {now['size']} {item}s instead of {before['size']}" if now["size"] != before["size"] else ""
    where = ""
    if start != before["start"]:
        where = f"it begins with {item} {start} instead of {before['start']}"
    elif (index := _first(before["first"], now["first"])) is not None:
        where = f"{item} {start + index} was {before['first'][index]}, is {now['first'][index]}"
    elif (index := _first(before["blocks"], now["blocks"])) is not None:
        length = block_length(now["size"])
        if length == block_length(before["size"]):
            where = _among(item, start + index * length, start + min((index + 1) * length, now["size"]) - 1)
    return "; ".join(filter(None, (sizes, where)))


def _difference_of_floats(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    sums: Sequence[tuple[float, float]] = list(zip(before["floats"], now["floats"], strict=True))
    size = math.prod(now["shape"])
    length = block_length(size)
    for index in range(0, len(sums), 2):
        largest = max(sums[index + 1])
        if any(abs(new - old) > _TOLERANCE * largest for old, new in sums[index : index + 2]):
            begin = index // 2 * length
            return _among("value", begin, min(begin + length, size) - 1)
    return ""


def _among(item: str, begin: int, end: int) -> str:
    return f"{item} {begin} differs" if begin == end else f"the first {item} that differs is among {begin} to {end}"


def _first(before: Sequence[Any], now: Sequence[Any]) -> int | None:
    """The first position at which two sequences differ, as far as both go."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((index for index, (old, new) in pairs if old != new), None)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A key of the identity.

    Attributes:
        why: completes "a change would make it another run, with ...".
        accepted: effect of an accepted change.
    """

    why: str
    accepted: str


CALLBACKS = "train.callbacks"
VALIDATION = "data.validation"
MIXTURE = "data.sources"
SHUFFLE = "data.shuffle"
SIGNATURE = "model.signature"
CONTENTS = "model.contents"
TRANSFORM_CONTENTS = "data.contents"

_CARRIED = (
    "applies from that step on: weights, and all that means the same, keep their values; other slots, metrics and "
    "seeds begin fresh"
)
_OTHER_BATCHES = "changes the data order from that step on: examples of the current epoch may repeat or be left out"

IDENTITY: Mapping[str, Recorded] = {
    "data.content_digest": Recorded("other examples", _OTHER_BATCHES),
    MIXTURE: Recorded("another mixture of the examples", _OTHER_BATCHES),
    VALIDATION: Recorded(
        "another validation set, so that early stopping, keep-best and the curves would compare two sets",
        "applies from that step on; the best checkpoint is chosen anew, on the new set",
    ),
    SHUFFLE: Recorded("another order of the examples", _OTHER_BATCHES),
    "data.window_shards": Recorded("another order of the examples", _OTHER_BATCHES),
    "data.transform": Recorded("another transform of the training examples", "applies from that step on"),
    "data.batch_transform": Recorded("another transform of the training batches", "applies from that step on"),
    "data.validation_transform": Recorded(
        "another transform of the validation examples", "applies to evaluations from that step on"
    ),
    TRANSFORM_CONTENTS: Recorded(
        "other vocabularies, tables or arrays that transforms read", "applies from that step on"
    ),
    "train.seed": Recorded(
        "other initial weights, order and dropout",
        "another order, and other draws without a generator, from that step on; weights and generators are the "
        "checkpoint's",
    ),
    "train.global_batch_size": Recorded("other batches", _OTHER_BATCHES),
    "train.drop_remainder": Recorded("other batches from the second epoch on", _OTHER_BATCHES),
    "train.accumulate": Recorded("gradients summed in another order", "applies from that step on"),
    "train.precision": Recorded("another arithmetic", _CARRIED),
    "train.class_weight": Recorded("another loss", "applies from that step on"),
    CALLBACKS: Recorded(
        "other callbacks, or other steps at which they act",
        "applies from that step on; the callbacks start with fresh state, and a run that they had stopped continues",
    ),
    "init.weights": Recorded("other initial weights", "has no effect: the weights come from the checkpoint"),
    "init.freeze": Recorded("other trainable variables", _CARRIED),
    "model.config": Recorded("another architecture", _CARRIED),
    "model.code": Recorded("other code in the user's layers or train_step", _CARRIED),
    SIGNATURE: Recorded(
        "other variables",
        "is accepted with any other key; weights with other names or shapes never are: init.weights in a new run",
    ),
    "model.options": Recorded("other arguments of the function that builds the model", _CARRIED),
    CONTENTS: Recorded(
        "other vocabularies, tables or arrays in the layers, or that their code reads", "applies from that step on"
    ),
    "compile.optimizer": Recorded(
        "another optimizer or learning rate", f"{_CARRIED}; a changed learning rate replaces the checkpoint's"
    ),
    "compile.loss": Recorded("another loss", "applies from that step on"),
    "compile.metrics": Recorded("other metrics, whose sums are part of the state", _CARRIED),
    "compile.other": Recorded("another way to compute gradients or metrics", _CARRIED),
}


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
    SHUFFLE: bool,
    "data.window_shards": _POSITIVE,
    TRANSFORM_CONTENTS: _OBJECT,
    "train.seed": int,
    _BATCH: _POSITIVE,
    _DROP: bool,
    "train.accumulate": _POSITIVE,
    "train.precision": str | None,
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
# Keys whose recorded value is the one in the run file, and those that the identity of callbacks has.
_OF_RUN_FILE = frozenset(
    ("data.shuffle", "data.window_shards", "train.seed", _BATCH, _DROP, "train.accumulate", "train.precision")
)
_SCHEDULE = ("evaluate.every_steps", LOG_EVERY, "evaluate.every")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_YAML_VALUES = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
# Digests that say nothing to a person.
_DIGESTED = {
    "data.content_digest": "other examples",
    VALIDATION: "other validation examples",
    SIGNATURE: "other variables",
}
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
        before = dict(leaves(key, recorded[key])) if key in recorded else {}
        # Without secrets, which are not recorded.
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
    """Return the identity as far as it is known before the user's code is imported; the rest is as recorded.

    Args:
        spec: the run file.
        recorded: the identity in the log.
    """
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
            raise RunFileError(f"--accept {word or repr(word)}: unknown key; use one or more of {', '.join(known)}")
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
) -> tuple[Difference, ...]:
    """Refuse to continue a run with another identity.

    A key that one of the two does not have is not compared.

    Args:
        recorded: the identity in the log.
        now: the identity according to the run file.
        home: the run's home, for the message.
        accept: identity keys that may differ, see `accepted_keys`.
        code: returns the lines of the message that show the changes of the user's code behind differences.
        files: returns the lines of the message that name changed files of the data.
        before_imports: whether the model is not built yet, so that more keys of it may differ than are known.

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
        details += files() if any(each.of == "data.content_digest" for each in refused) else ()
        lines = code(refused)
        headline = message(f"{home} was started with other settings, data or code", details=details)
        back = _way_back(refused, code_is_shown=bool(lines))
        remedies = [back, *_ways_on(found, home, before_imports=before_imports)]
        raise IdentityChanged(message("\n".join([headline, *(f"  {line}" for line in lines)]), hints=remedies))
    return found


def difference_words(found: Sequence[Difference]) -> str:
    """Return the first few differences and the number of further ones; digests of variables only if nothing else is."""
    found = [each for each in found if each.of != SIGNATURE] or found
    shown = "; ".join(str(difference) for difference in found[:_SHOWN])
    return f"{shown}; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else shown


def _ways_on(found: Sequence[Difference], home: str, *, before_imports: bool) -> list[str]:
    keys = list(dict.fromkeys(_short_name(each.of) for each in found if each.of != SIGNATURE)) or [SIGNATURE]
    if before_imports and any(each.of == _OPTIONS for each in found):
        # What else of the model changes with them is not known yet. What does not differ is not accepted.
        keys = [*(key for key in keys if not key.startswith("model.")), "model", "compile"]
    accept, quoted = f"--accept {','.join(keys)}", shlex.quote(home)
    copied = f"baton fork {quoted} --as NEW, then baton run FILE --set run=NEW {accept}"
    weights = f"--set init.weights={quoted}"
    return [
        f"or continue with the change from the newest checkpoint: baton run FILE {accept}",
        f"or try the change in a copy of the run: {copied}",
        f"or start a new run: baton run FILE --set run=NEW (with the weights of this one: add {weights})",
    ]


def _way_back(found: Sequence[Difference], *, code_is_shown: bool) -> str:
    """How to continue the run as it was."""
    if any(each.of in {CONTENTS, TRANSFORM_CONTENTS} for each in found):
        return "let the code read what it read when the run began; where a set decides an order, use sorted(...)"
    added = [each.key for each in found if each.of == _OPTIONS and each.recorded == _ABSENT]
    out = f"leave {', '.join(added)} out" if added else ""
    back = list(dict.fromkeys(filter(None, (each.override_back for each in found))))
    if back:
        lines = ", ".join(each.replace("=", ": ", 1) for each in back)
        sets = " ".join(f"--set {shlex.quote(each)}" for each in back)
        code = "the lines with -, and " if code_is_shown else ""
        before = f"{out}, and " if out else ""
        return f"{before}restore {code}{lines} in the run file, or for this command: baton run FILE {sets}"
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
