"""`data` in the run file: where the examples come from and how they are laid out.

`data.pad` and `data.pack` make arrays of one shape from sequences of different lengths. `data.sources` is a mixture,
which the manifest of the prepared dataset describes too. `data.validation` and `data.test` are sets of their own.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from baton.tasks.foundation.contracts.base import (
    FROM_THAT_STEP,
    OTHER_BATCHES,
    CodeReference,
    Contract,
    DatasetPath,
    check_code_reference,
    identity,
    operational,
)


class PadRule(Contract):
    """How one feature is padded along its first dimension."""

    length: int = Field(ge=1, description="its first dimension after padding")
    value: float | int | str = Field(default=0, description="fills the rest; text is filled with empty strings")
    longer: Literal["refuse", "truncate"] = Field(
        default="refuse", description="what happens to longer sequences; truncate keeps their beginning"
    )


def _from_length(value: object) -> object:
    """Return `{x: 128}` as `{x: {length: 128}}`."""
    if not isinstance(value, Mapping):
        return value
    return {name: {"length": rule} if isinstance(rule, int) else rule for name, rule in value.items()}


PadField = Annotated[Annotated[dict[str, PadRule], Field(min_length=1)] | None, BeforeValidator(_from_length)]


class PackSpec(Contract):
    """How sequences are packed: several of them in one row of a fixed length."""

    length: int = Field(ge=2, description="tokens in a row")
    longer: Literal["refuse", "split"] = Field(
        default="refuse", description="what happens to sequences longer than a row; split cuts them into several"
    )


def _pack_from_length(value: object) -> object:
    return {"length": value} if isinstance(value, int) and not isinstance(value, bool) else value


PackField = Annotated[PackSpec | None, BeforeValidator(_pack_from_length)]


SetName = Literal["validation", "test"]


def check_source(source: str) -> str:
    """Check the form of a source: a built-in one has no colon, a function is `data.py:load`.

    Raises:
        ValueError: it names no function.
    """
    return check_code_reference(source) if ":" in source else source


class SetSpec(Contract):
    """Where the examples of an own validation or test set come from. The keys are those of `data`."""

    source: Annotated[str, AfterValidator(check_source)] = Field(
        description="a built-in source or a function, as data.source"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="settings of the source, as data.options")
    version: str | int = Field(default=0, description="as data.version")
    batched: bool | None = Field(default=None, description="as data.batched")
    examples: Annotated[int, Field(ge=1)] | None = Field(default=None, description="as data.examples")


def _from_string(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


SetField = Annotated[SetSpec | None, BeforeValidator(_from_string)]


class SetRef(Contract):
    """A reference to a prepared set: a dataset of its own, of which every example is used."""

    folder: DatasetPath = Field(description="datasets/<digest>, relative to the storage root")
    content_digest: str
    examples: int = Field(ge=1)


# What happens when all examples of a source were used.
Exhausted = Literal["repeat", "drop"]

# A window of the mixed stream has at least one example of each source, so it cannot have any share.
SMALLEST_SHARE = 32_768


class SourceSpec(SetSpec):
    """One source of a mixture. Besides `weight`, the keys are those of `data`."""

    weight: float = Field(
        default=1,
        gt=0,
        allow_inf_nan=False,
        description="share of the examples, in relation to the other weights",
    )


def _from_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


SourcesField = Annotated[tuple[SourceSpec, ...], BeforeValidator(_from_list)]


def integer_weights(weights: Iterable[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportion of the weights, as they are written: 0.7 and 0.3 are 7 and 3."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    scaled = [int(each * scale) for each in exact]
    common = math.gcd(*scaled)
    return tuple(each // common for each in scaled)


def require_mixture(sources: Sequence[SourceSpec]) -> None:
    """Refuse sources that are no mixture.

    Raises:
        ValueError: there is a single source, one is named twice, or a weight is too small beside the others.
    """
    if len(sources) == 1:
        raise ValueError(f"sources has one source; write source: {sources[0].source}")
    for index, each in enumerate(sources):
        same = [other for other in sources[:index] if other.model_copy(update={"weight": each.weight}) == each]
        if same:
            raise ValueError(
                f"sources[{sources.index(same[0])}] and sources[{index}] are the same ({each.source}); "
                f"name it once, with weight: {same[0].weight + each.weight:g}"
            )
    weights = integer_weights(each.weight for each in sources)
    smallest = min(range(len(weights)), key=weights.__getitem__)
    if weights[smallest] * SMALLEST_SHARE < sum(weights):
        raise ValueError(
            f"sources[{smallest}].weight = {sources[smallest].weight:g} is less than 1/{SMALLEST_SHARE} of all "
            f"weights; give {sources[smallest].source} a larger weight, or leave it out"
        )


class MixedSource(Contract):
    """A source of a prepared mixture: a dataset of its own."""

    source: str = Field(description="as the run file names it")
    folder: DatasetPath
    content_digest: str
    weight: int = Field(ge=1, description="the weights are the smallest integers in their proportion")
    train_examples: int = Field(ge=1)
    validation_examples: int = Field(ge=0)


class Mixture(Contract):
    """The sources that a prepared dataset mixes. Their order and weights decide the order of the examples."""

    sources: tuple[MixedSource, ...] = Field(min_length=2)
    exhausted: Exhausted

    @property
    def digest(self) -> str:
        """The name of the dataset: sha256 over all that decides the examples and their order, 24 hex digits."""
        lines = [self.exhausted, *(f"{each.folder} {each.content_digest} {each.weight}" for each in self.sources)]
        return hashlib.sha256("\n".join(["mixture", *lines]).encode()).hexdigest()[:24]


_EXAMPLES = "data.content_digest"
_CHECK_ONLY = "a check of the examples; it changes none"


_IN_PLACE = ("huggingface", "table", "tar", "tfds", "tfrecord")
_ALWAYS_COPIED = (".csv", ".tsv")


def _stays_in_place(source: SetSpec) -> bool:
    """Whether Baton reads the records of a source where they are, and copies none."""
    is_copied = source.options.get("copy") is True or str(source.options.get("path")).endswith(_ALWAYS_COPIED)
    return source.source in _IN_PLACE and not is_copied


def hub_folder(name: str) -> str:
    """Return where the hub's cache has a dataset, by the environment variables of the package `huggingface_hub`."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return f"{os.environ.get('HF_HUB_CACHE') or f'{home}/hub'}/datasets--{name.replace('/', '--')}"


def _path_in_place(source: SetSpec) -> object:
    """Return `options.path`; of a dataset of the hub by its name, its folder in the hub's cache."""
    if source.source == "huggingface" and isinstance(name := source.options.get("name"), str):
        return hub_folder(name)
    return source.options.get("path")


class DataSpec(Contract):
    """Where the examples come from and how they are laid out."""

    source: Annotated[str, AfterValidator(check_source), identity("other examples", _EXAMPLES)] = Field(
        description="a built-in source (digits, huggingface, images, npz, table, tar, text, tfds, tfrecord) or a "
        "function, data.py:load, that returns arrays (x, y), a tf.data.Dataset or a PyDataset, or yields examples or "
        "batches"
    )
    sources: Annotated[SourcesField, identity("another mixture of the examples", _EXAMPLES, accepted=OTHER_BATCHES)] = (
        Field(
            default=(),
            description="a mixture, instead of data.source: a list of {source, weight, options, version, batched, "
            "examples}; in every window of about 1,000 examples each source has the share that its weight says, and "
            "the examples of a source come in the shuffled order of its own epochs; validation_fraction holds out from "
            "each",
        )
    )
    exhausted: Annotated[Exhausted, identity("another mixture of the examples", "data.sources")] = Field(
        default="repeat",
        description="what happens in a mixture when all examples of a source were used: repeat (it begins its next "
        "epoch; an epoch of the mixture has as many examples as all sources together) or drop (the others go on with "
        "their weights; an epoch of the mixture has each example once)",
    )
    options: Annotated[dict[str, Any], identity("other examples, where the option changes them", _EXAMPLES)] = Field(
        default_factory=dict, description="settings of the source, such as path; keyword arguments of data.py:load"
    )
    version: Annotated[str | int, identity("the source is read again, and may give other examples", _EXAMPLES)] = Field(
        default=0,
        description="change it when data changed that Python does not open for data.py:load, as of TensorFlow, "
        "pyarrow, networks",
    )
    validation_fraction: Annotated[float, identity("other examples are held out", _EXAMPLES)] = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share of the examples that is held out, at least 0 and below 1; with data.validation: 0",
    )
    split: Annotated[Literal["random", "last"], identity("other examples are held out", _EXAMPLES)] = Field(
        default="random",
        description="which examples validation_fraction holds out: random (by a seeded hash of their index), or last "
        "(the last ones in the order of the source, as for time series)",
    )
    split_by: Annotated[str | None, identity("other examples are held out", _EXAMPLES)] = Field(
        default=None,
        min_length=1,
        description="a feature of the examples, as user_id; equal values are held out together, by a seeded hash of "
        "the value; it stays an input, which data.transform and data.validation_transform can drop",
    )
    validation: Annotated[
        SetField,
        identity(
            "another validation set, so that early stopping, keep-best and the curves would compare two sets",
            accepted=f"{FROM_THAT_STEP}; the best checkpoint is chosen anew, on the new set",
        ),
    ] = Field(
        default=None,
        description="an own validation set instead of a fraction: a source, as data.py:load_validation, or a mapping "
        "of source, options, version and batched",
    )
    test: Annotated[SetField, operational("it is evaluated after the training, and decides nothing")] = Field(
        default=None,
        description="a test set, written like data.validation; evaluated once at the end of the run, and by "
        "`baton evaluate --on test`",
    )
    classes: Annotated[int | None, operational(_CHECK_ONLY)] = Field(
        default=None, ge=1, description="number of classes; labels y must lie in [0, classes)"
    )
    allow_nan: Annotated[bool, operational(_CHECK_ONLY)] = Field(
        default=False, description="true lets NaN and infinity into the dataset"
    )
    batched: Annotated[
        bool | None,
        identity("other examples, if batches are read as examples or the reverse", _EXAMPLES),
    ] = Field(
        default=None,
        description="true: data.py:load yields batches; false: it yields single examples; left out: told by their "
        "shapes, and refused if these are ambiguous",
    )
    examples: Annotated[int | None, identity("other examples", _EXAMPLES)] = Field(
        default=None,
        ge=1,
        description="number of examples to take from data.py:load; left out: all; an endless source needs it",
    )
    pad: Annotated[PadField, identity("other examples", _EXAMPLES)] = Field(
        default=None,
        description="pads features of data.py:load or table whose examples differ in length, by name, as {x: 128}, "
        "or {x: {length: 128, value: -1, longer: truncate}}; longer ones are refused, unless truncated",
    )
    pack: Annotated[PackField, identity("other examples", _EXAMPLES)] = Field(
        default=None,
        description="packs token sequences of data.py:load or table into rows of this many tokens, as 512, or "
        "{length: 512, longer: split}; x becomes a dict with segment_ids (from 1, 0: filling) and positions, and "
        "sample_weight is 0 for the filling, which metrics respect under weighted_metrics",
    )
    transform: Annotated[
        CodeReference | None,
        identity("another transform of the training examples", "data.contents", accepted=FROM_THAT_STEP),
    ] = Field(
        default=None,
        description="a function of TensorFlow operations, augment.py:augment, that changes each training example when "
        "it is read: augment(example, *, seed); example is x, (x, y) or (x, y, sample_weight), as data.py:load yields "
        "it, and seed int32 [2], another one in each epoch",
    )
    batch_transform: Annotated[
        CodeReference | None,
        identity("another transform of the training batches", "data.contents", accepted=FROM_THAT_STEP),
    ] = Field(
        default=None,
        description="the same for each global batch, after data.transform, as for mixup: mixup(batch, *, seed)",
    )
    validation_transform: Annotated[
        CodeReference | None,
        identity(
            "another transform of the validation examples",
            "data.contents",
            accepted="applies to evaluations from that step on",
        ),
    ] = Field(
        default=None,
        description="the same for each validation example; a seed, if it takes one, is the same in each evaluation",
    )
    cache: Annotated[Literal["disk", "memory"], operational("the batches are the same")] = Field(
        default="disk",
        description="what is kept of training data between epochs: disk (shards of a bucket, on the local disk, up to "
        "BATON_CACHE_BYTES) or memory (all training examples, decoded, before data.transform; each process reads them "
        "once when it starts; if half of the free memory is too little: disk, with a warning)",
    )
    shuffle: Annotated[
        bool,
        identity("another order of the examples", _EXAMPLES, accepted=OTHER_BATCHES, plain=True),
    ] = Field(
        default=True,
        description="false keeps the order of the source in every epoch, as fit(shuffle=False) does, and holds out its "
        "last examples (split: last); an epoch that ends within a batch goes on with the next one; each source of a "
        "mixture keeps its own order",
    )
    shard_examples: Annotated[int | None, identity("other shards, and so another order", _EXAMPLES)] = Field(
        default=None, ge=1, description="examples in a shard; left out: about 32 MiB of them"
    )
    window_shards: Annotated[int, identity("another order of the examples", accepted=OTHER_BATCHES, plain=True)] = (
        Field(default=8, ge=1, description="shards that are read and shuffled together, in memory; at least 1")
    )

    @model_validator(mode="before")
    @classmethod
    def _own_set_instead_of_fraction(cls, values: object) -> object:
        own = isinstance(values, Mapping) and values.get("validation") is not None
        if isinstance(values, Mapping) and own and "validation_fraction" not in values:
            return {**values, "validation_fraction": 0.0}
        return values

    @model_validator(mode="before")
    @classmethod
    def _last_examples_of_an_order(cls, values: object) -> object:
        """Examples that are held out at random would leave gaps in an order that is kept."""
        if not isinstance(values, Mapping) or values.get("shuffle") is not False:
            return values
        if {"split", "split_by"} & values.keys():
            return values
        fraction = values.get("validation_fraction", cls.model_fields["validation_fraction"].default)
        splits = fraction != 0 and values.get("validation") is None
        return {**values, "split": "last"} if splits else values

    @model_validator(mode="before")
    @classmethod
    def _mixture_instead_of_source(cls, values: object) -> object:
        if isinstance(values, Mapping) and values.get("sources") and "source" not in values:
            return {**values, "source": ""}
        return values

    @model_validator(mode="after")
    def _one_source_or_a_mixture(self) -> Self:
        if not self.sources:
            if not self.source:
                raise ValueError("source is empty; name a source, or several under sources")
            if self.exhausted != "repeat":
                raise ValueError(f"exhausted = {self.exhausted} is for a mixture; remove it, or name several sources")
            return self
        if self.source:
            raise ValueError(f"source = {self.source} and sources both name the examples; remove one")
        for key, value in (("options", self.options), ("version", self.version), ("examples", self.examples)):
            if value:
                raise ValueError(f"{key} = {value} is of a single source; move it into each of sources")
        if self.batched is not None:
            raise ValueError(f"batched = {self.batched} is of a single source; move it into each of sources")
        require_mixture(self.sources)
        return self

    @model_validator(mode="after")
    def _one_validation_set(self) -> Self:
        if self.validation is not None and self.validation_fraction > 0:
            raise ValueError(
                f"validation and validation_fraction = {self.validation_fraction} are two validation sets; remove one"
            )
        return self

    @model_validator(mode="after")
    def _padded_or_packed(self) -> Self:
        if self.pad is not None and self.pack is not None:
            raise ValueError("pad and pack both give sequences one length; remove one")
        return self

    @model_validator(mode="after")
    def _one_split(self) -> Self:
        given = [
            words
            for words, is_given in (
                (f"split = {self.split}{'' if self.shuffle else ' (shuffle = false)'}", self.split != "random"),
                (f"split_by = {self.split_by}", self.split_by is not None),
            )
            if is_given
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are two ways to split; remove one")
        if not self.shuffle and self.validation_fraction > 0 and self.split != "last":
            words = given[0] if given else f"split = {self.split}"
            raise ValueError(
                f"{words} takes examples out of the order that shuffle = false keeps; set split: last, or name the "
                "held-out examples under validation"
            )
        if given and self.validation_fraction == 0:
            why = "validation is a set of its own" if self.validation is not None else "validation_fraction is 0"
            raise ValueError(f"{given[0]} splits nothing, because {why}; remove it, or set validation_fraction")
        if given and self.source_in_place is not None:
            raise ValueError(
                f"{given[0]} needs records that Baton copies, but those of source {self.source_in_place} stay in their "
                "files; set options.copy to true, or put the held-out records into files of their own, named under "
                "validation"
            )
        return self

    @property
    def source_in_place(self) -> str | None:
        """The first source whose records Baton reads where they are; None if it copies all."""
        in_place = next(filter(_stays_in_place, self._named), None)
        return None if in_place is None or self.pad is not None or self.pack is not None else in_place.source

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation set: a held-out fraction, or an own set."""
        return self.validation_fraction > 0 or self.validation is not None

    @property
    def is_evaluated_on(self) -> tuple[SetName, ...]:
        """The sets that the model is evaluated on."""
        sets: tuple[tuple[SetName, bool], ...] = (("validation", self.has_validation), ("test", self.test is not None))
        return tuple(name for name, is_there in sets if is_there)

    @property
    def _named(self) -> tuple[SetSpec, ...]:
        """What the training examples are from: one source, or those of a mixture."""
        return self.sources or (SetSpec(source=self.source, options=self.options, batched=self.batched),)

    @property
    def paths_in_place(self) -> tuple[str, ...]:
        """Where the sources' records are that stay in their files: of the examples, and of the own sets."""
        sets = (*self._named, *self.own_sets.values())
        paths = (_path_in_place(each) for each in sets if _stays_in_place(each))
        return tuple(path for path in paths if isinstance(path, str))

    @property
    def source_words(self) -> str:
        """The sources of the training examples, for messages."""
        return ", ".join(each.source for each in self._named)

    @property
    def may_yield_batches(self) -> bool:
        """Whether a function yields the training examples, and the run file does not say if these are batches."""
        return any(":" in each.source and each.batched is None for each in self._named)

    @property
    def all_sources(self) -> tuple[str, ...]:
        """All sources: of the training examples, and of the own sets."""
        return (*(each.source for each in self._named), *(own.source for own in self.own_sets.values()))

    def of_source(self, index: int) -> "DataSpec":
        """Return the `data` of one source of a mixture, prepared as if it were the only one.

        Raises:
            IndexError: there is no such source.
        """
        chosen = self.sources[index]
        alone = {name: getattr(chosen, name) for name in SetSpec.model_fields}
        others = {"sources": (), "exhausted": "repeat", "validation": None, "test": None}
        return DataSpec.model_validate({name: getattr(self, name) for name in DataSpec.model_fields} | alone | others)

    @property
    def own_sets(self) -> Mapping[SetName, SetSpec]:
        """The own validation and test sets, in this order."""
        sets: tuple[tuple[SetName, SetSpec | None], ...] = (("validation", self.validation), ("test", self.test))
        return {name: given for name, given in sets if given is not None}

    def of_set(self, name: SetName) -> "DataSpec":
        """Return the `data` of an own set: its source, with the checks and shard size of this one; nothing is held out.

        Raises:
            KeyError: there is no such set.
        """
        own = self.own_sets[name]
        return DataSpec(
            source=own.source,
            options=own.options,
            version=own.version,
            batched=own.batched,
            examples=own.examples,
            validation_fraction=0.0,
            classes=self.classes,
            allow_nan=self.allow_nan,
            shuffle=self.shuffle,
            shard_examples=self.shard_examples,
            pad=self.pad,
            pack=self.pack,
        )

    @property
    def has_sequences(self) -> bool:
        """Whether the arrays of its examples may differ in length, because they are padded or packed."""
        return self.pad is not None or self.pack is not None

    @property
    def transforms(self) -> tuple[str, ...]:
        """The functions that change examples when they are read, as the run file names them."""
        return tuple(reference for reference in self.transform_of_key.values() if reference is not None)

    @property
    def transform_of_key(self) -> dict[str, str | None]:
        """Each key that names a transform, with its value."""
        return {
            "data.transform": self.transform,
            "data.batch_transform": self.batch_transform,
            "data.validation_transform": self.validation_transform,
        }
