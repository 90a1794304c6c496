"""A prepared dataset: the features of its examples, its shards, and the digest that its manifest has of both."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from baton.tasks.foundation.contracts.base import Contract, DatasetPath, ShardPath, another_version
from baton.tasks.foundation.contracts.data_spec import Mixture, SetName, SetRef
from baton.tasks.foundation.errors import DamagedDataset
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.text import listed

# examples: as the source yields them; lists: some of them hold a list of arrays of one shape, which is read as several
# inputs or outputs; rows: taken from whole arrays or from batches, so they are single examples.
Reading = Literal["examples", "lists", "rows"]
# In the origin of a dataset: a JSON list of the names of its classes.
CLASSES: Final = "classes"
_NAME_CHARACTERS: Final = 60
PREPARE_AGAIN = "delete that folder and run again; Baton then prepares the dataset again from the source"


class Feature(Contract):
    """One array of an example.

    `name` is its role: `x`, `y`, `sample_weight`; `x/<key>` if the model's inputs are a dict of arrays, and `x[0]` if
    they are a list of arrays. So it is with outputs and weights.
    """

    name: str
    dtype: str = Field(description="a NumPy dtype of fixed width, such as float32, or string")
    shape: tuple[int, ...] = Field(description="shape of one example, without the batch dimension")
    # Baton's shards store every array as raw bytes under its name; external records may use other keys and encodings.
    key: str | None = Field(default=None, description="its key within a record; None: `name`")
    encoding: Literal["raw", "int64", "float", "image", "text", "array"] = Field(
        default="raw",
        description="raw: a bytes value of little-endian numbers; int64, float: a list of values; image: JPEG or PNG; "
        "text: a list of strings; array: numbers of this dtype and shape, as a reader of columns gives them",
    )
    # Of columns, as in Parquet files: what the reader makes of them.
    stacked: tuple[str, ...] = Field(default=(), description="columns that form the last dimension; (): the key alone")
    vocabulary: tuple[str, ...] = Field(default=(), description="texts whose positions are the values; (): none")
    fill: float | int | str | None = Field(default=None, description="in place of nulls; None: there are none")

    @property
    def record_key(self) -> str:
        """The key within a record."""
        return self.name if self.key is None else self.key


class RangeLayout(Contract):
    """How a range of an external file is read that is no TFRecord file. Its reader needs these bytes besides."""

    form: Literal["parquet", "arrow", "tar"]
    head_begin: int = Field(default=0, ge=0, description="offset of the footer (Parquet) or the schema (Arrow)")
    head_size: int = Field(default=0, ge=0, description="bytes; 0: none are needed")
    head_crc32c: str = Field(default="00000000", pattern=r"^[0-9a-f]{8}$")
    first_part: int = Field(default=0, ge=0, description="the first row group or record batch of the range")
    parts: int = Field(default=1, ge=1, description="how many it has")
    partition: dict[str, str] = Field(
        default_factory=dict, description="columns that the folder's name says: year=2026"
    )


class ShardRecord(Contract):
    """One TFRecord file, or a range of whole records of an external file, see `RangeLayout`.

    A range of a TFRecord file is itself a valid TFRecord file.
    """

    path: ShardPath = Field(
        description="relative to the dataset's folder; absolute path or address of an external file"
    )
    examples: int = Field(ge=1, description="examples of its part (training or validation) in it")
    size: int = Field(ge=0, description="bytes")
    crc32c: str = Field(pattern=r"^[0-9a-f]{8}$")
    begin: int = Field(default=0, ge=0, description="offset of the first byte in the file")
    first: int = Field(default=0, ge=0, description="index of the first record in the whole source")
    records: int | None = Field(default=None, ge=1, description="records of both parts in it; None: examples")
    layout: RangeLayout | None = Field(default=None, description="None: a TFRecord file, or a range of one")

    @model_validator(mode="after")
    def _whole_in_its_folder(self) -> Self:
        if self.begin and not self.is_external:
            raise ValueError(f"begin = {self.begin}, and a shard in the dataset's folder is a whole file")
        return self

    @property
    def is_external(self) -> bool:
        """Whether it is part of an existing file outside the dataset's folder."""
        return self.path.startswith("/") or "://" in self.path

    @property
    def records_held(self) -> int:
        """Number of its records, of both parts."""
        return self.examples if self.records is None else self.records

    @property
    def head(self) -> "ShardRecord | None":
        """The head that its layout names, as if it were a range itself; None if it has none."""
        layout = self.layout
        if layout is None or not layout.head_size:
            return None
        place = {"begin": layout.head_begin, "size": layout.head_size, "crc32c": layout.head_crc32c}
        return self.model_copy(update={**place, "layout": None})


class ExtremeValue(Contract):
    """One of the two smallest or the two largest values of a feature, and the first example that has it."""

    feature: str
    value: Annotated[int, Field(le=2**64 - 1)] | float  # also of uint64
    where: str = Field(description="the position of the example in its source")


class HeldOut(Contract):
    """Selects the records for validation where shards contain both parts, see `dataset.held_out`."""

    fraction: float = Field(gt=0, lt=1)
    seed: int = Field(ge=0)
    exception: int | None = Field(
        default=None, description="the one record that moves to the other part, so that neither part is empty"
    )


class OpenedFile(Contract):
    """A file that a user's function opened while the dataset was prepared, or a folder in which it found files."""

    path: str = Field(description="relative to the run file's folder if it is beside it, else absolute")
    size: int = Field(ge=0, description="bytes; of a folder: files")
    modified_ns: int = Field(default=0, description="nanoseconds since 1970; of a folder: 0")
    sha256: str = Field(description="of its bytes; of a folder: of its files' names; empty: it changed meanwhile")
    suffixes: tuple[str, ...] = Field(default=(), description="of a folder: the files that count; (): this is a file")


class DatasetManifest(Contract):
    """Written last, so its existence means that every shard is complete.

    A mixture has no shards of its own. It names datasets, whose shards have its examples.
    """

    format: Literal[1] = 1
    digest: str = Field(description="the folder's name: first 24 hex digits of a sha256 over source and settings")
    content_digest: str = Field(description="sha256 over the records of all shards, in order")
    source: Annotated[str, AfterValidator(masked)]
    origin: dict[str, str] = Field(description="origin of the examples: files and their checksums")
    features: tuple[Feature, ...]
    train: tuple[ShardRecord, ...]
    validation: tuple[ShardRecord, ...]
    reading: Reading = "examples"
    held_out: HeldOut | None = Field(
        default=None, description="set if shards contain records of both parts; None: each shard has one part"
    )
    extremes: tuple[ExtremeValue, ...] = Field(
        default=(), description="of integer features, and of labels that are one number"
    )
    mixture: Mixture | None = Field(default=None, description="the datasets that it mixes; None: it is one itself")
    warnings: tuple[str, ...] = Field(
        default=(), description="what the source does anew in each pass, and was read once: said to every new run"
    )

    prepared: str = Field(default="", description="the day, as 2026-01-31, in UTC; empty: not known")
    opened: tuple[OpenedFile, ...] | None = Field(
        default=None, description="of a user's function: what it was seen to open; None: not known"
    )

    @model_validator(mode="after")
    def _has_training_examples(self) -> Self:
        if not (self.train or self.mixture) or not self.features:
            raise ValueError("a dataset needs at least one feature and one training shard")
        if self.train and self.mixture:
            raise ValueError("a mixture has no shards of its own")
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers, as the source has them; empty if it has none."""
        return tuple(name[:_NAME_CHARACTERS] for name in _class_names(self.origin))

    @property
    def named_features(self) -> tuple[Feature, ...]:
        """The features with what the labels mean, see `with_class_names`."""
        return with_class_names(self.features, self.origin)

    @property
    def train_examples(self) -> int:
        """Number of training examples."""
        if self.mixture is not None:
            return sum(each.train_examples for each in self.mixture.sources)
        return sum(shard.examples for shard in self.train)

    @property
    def validation_examples(self) -> int:
        """Number of validation examples."""
        if self.mixture is not None:
            return sum(each.validation_examples for each in self.mixture.sources)
        return sum(shard.examples for shard in self.validation)


class DatasetRef(Contract):
    """A reference to a prepared dataset below the run's storage root."""

    format: Literal[1] = 1
    folder: DatasetPath = Field(description="datasets/<digest>, relative to the storage root")
    content_digest: str
    train_examples: int = Field(ge=1)
    validation_examples: int = Field(ge=0)
    already_prepared: bool = Field(description="true if the dataset existed already")
    validation: SetRef | None = Field(default=None, description="the own validation set; None: examples held out")
    test: SetRef | None = Field(default=None, description="the test set")

    def own_set(self, name: SetName) -> SetRef | None:
        """Return the reference to an own set, or None."""
        return self.validation if name == "validation" else self.test

    def examples_of(self, name: SetName) -> int:
        """Return the number of examples that the model is evaluated on."""
        own = self.own_set(name)
        if own is not None:
            return own.examples
        return self.validation_examples if name == "validation" else 0


def with_class_names(features: Sequence[Feature], origin: Mapping[str, str]) -> tuple[Feature, ...]:
    """Return the features, the label's with the names of the classes as its vocabulary.

    To compare two sets only: the features in a manifest have no names of classes, so no digest has them. `origin` is
    that of their source or manifest.
    """
    names = _class_names(origin)
    label = next((each for each in features if each.name.startswith("y")), None)
    if label is None or label.vocabulary or not names:
        return tuple(features)
    return tuple(each.model_copy(update={"vocabulary": names}) if each is label else each for each in features)


def classes_of(features: Sequence[Feature]) -> tuple[str, ...]:
    """Return the names of the classes that features have, see `with_class_names`; () if they have none."""
    return next((each.vocabulary for each in features if each.name.startswith("y")), ())


def _class_names(origin: Mapping[str, str]) -> tuple[str, ...]:
    try:
        names = json.loads(origin.get(CLASSES, "[]"))
    except ValueError:  # of a damaged or foreign manifest
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def content_digest(
    features: Sequence[Feature],
    train: Sequence[ShardRecord],
    validation: Sequence[ShardRecord],
    held_out: HeldOut | None = None,
    mixture: Mixture | None = None,
) -> str:
    """Return the sha256 of the features and of every shard's name, count, size and checksum, in order.

    Of a mixture: of the features and of its datasets' digests. Weights are not examples, so they do not count here.

    For a file outside the dataset's folder only its name is hashed, not its folder: a moved file is the same dataset.
    """
    digest = hashlib.sha256()
    for part in (features, train, validation):
        for record in part:
            # Defaults are left out, so that a field that is added later changes no digest.
            digest.update(_without_place(record).model_dump_json(exclude_defaults=True).encode() + b"\n")
        digest.update(b"\n")
    if held_out is not None:
        digest.update(held_out.model_dump_json().encode() + b"\n")
    for source in mixture.sources if mixture is not None else ():
        digest.update(source.content_digest.encode() + b"\n")
    return digest.hexdigest()


def checked_manifest(data: bytes, *, where: str) -> DatasetManifest:
    """Parse a manifest, and compare its digests with what it lists.

    Raises:
        DamagedDataset: it is unreadable or inconsistent; says how the dataset is prepared again.
        AnotherVersion: a newer Baton wrote it.
    """
    try:
        manifest = DatasetManifest.from_json(data, where=where, error=DamagedDataset)
    except DamagedDataset as fault:
        raise DamagedDataset(f"{fault}; {PREPARE_AGAIN}") from fault
    found = content_digest(manifest.features, manifest.train, manifest.validation, manifest.held_out, manifest.mixture)
    if found != manifest.content_digest:
        unknown = DatasetManifest.unknown_keys(data)
        if unknown:  # the digest may cover these keys
            why = f"it has unknown keys ({listed(unknown)}), and its content_digest does not match without them"
            raise another_version(where, DatasetManifest, why)
        raise DamagedDataset(f"{where}: its content_digest does not match the shards it lists; {PREPARE_AGAIN}")
    if manifest.mixture is not None and manifest.mixture.digest != manifest.digest:
        raise DamagedDataset(f"{where}: its digest does not match the weights that it lists; {PREPARE_AGAIN}")
    return manifest


def _without_place(record: Feature | ShardRecord) -> Feature | ShardRecord:
    if isinstance(record, ShardRecord) and record.is_external:
        return record.model_copy(update={"path": PurePosixPath(record.path).name})
    return record
