"""A prepared dataset: what its examples look like and where its shards are."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.safe_names import DatasetPath, ShardPath


class Feature(Contract):
    """One array of an example.

    `name` tells its place: `x`, `y`, `sample_weight`, or `x/<key>` and `y/<key>` where the model takes or returns
    a dict of arrays.
    """

    name: str
    dtype: str = Field(description="a NumPy dtype name of fixed width, such as float32")
    shape: tuple[int, ...] = Field(description="shape of one example, without the batch dimension")
    # Baton's own shards hold every array as raw bytes under its name; records that others wrote need not.
    key: str | None = Field(default=None, description="its name within a record; None: `name`")
    encoding: Literal["raw", "int64", "float", "image"] = Field(
        default="raw",
        description="raw: a bytes value of little-endian numbers; int64, float: a list of values; image: JPEG or PNG",
    )

    @property
    def record_key(self) -> str:
        """Its name within a record."""
        return self.name if self.key is None else self.key


class ShardRecord(Contract):
    """One TFRecord file, or a range of one that Baton did not write: cut at records, it is a TFRecord file itself."""

    path: ShardPath = Field(
        description="relative to the dataset's folder; absolute path or address of a file elsewhere"
    )
    examples: int = Field(ge=1, description="examples of its part, training or validation, that it holds")
    size: int = Field(ge=0, description="bytes")
    crc32c: str = Field(pattern=r"^[0-9a-f]{8}$")
    begin: int = Field(default=0, ge=0, description="offset of its first byte in the file")
    first: int = Field(default=0, ge=0, description="index of its first record in the whole source")
    records: int | None = Field(default=None, ge=1, description="records that it holds, of both parts; None: examples")

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is part of a file that was there before, outside the dataset's folder."""
        return self.path.startswith("/") or "://" in self.path

    @property
    def records_held(self) -> int:
        """Records in it, of whichever part."""
        return self.examples if self.records is None else self.records


class HeldOut(Contract):
    """Which records are for validation, where both parts lie in the same shards: see `dataset.held_out`."""

    fraction: float = Field(gt=0, lt=1)
    seed: int = Field(ge=0)
    exception: int | None = Field(
        default=None, description="the one record that goes to the other part, so that neither is empty"
    )


class DatasetManifest(Contract):
    """Written last; its existence means that every shard is complete."""

    schema_version: Literal[1] = 1
    digest: str = Field(description="the folder's name: sha256 over source content and settings, first 24 hex digits")
    content_digest: str = Field(description="sha256 over the shards' records, in order")
    source: str
    origin: dict[str, str] = Field(description="where the examples came from: files and their checksums")
    features: tuple[Feature, ...]
    train: tuple[ShardRecord, ...]
    validation: tuple[ShardRecord, ...]
    held_out: HeldOut | None = Field(
        default=None, description="set where shards hold records of both parts; None: each shard is of one part"
    )

    @model_validator(mode="after")
    def _has_training_examples(self) -> Self:
        if not self.train or not self.features:
            raise ValueError("a dataset has at least one feature and one training shard")
        return self

    @property
    def train_examples(self) -> int:
        """Number of training examples."""
        return sum(shard.examples for shard in self.train)

    @property
    def validation_examples(self) -> int:
        """Number of validation examples."""
        return sum(shard.examples for shard in self.validation)


class DatasetRef(Contract):
    """Points at a prepared dataset below the run's storage."""

    schema_version: Literal[1] = 1
    folder: DatasetPath = Field(description="datasets/<digest>, relative to the storage root")
    content_digest: str
    train_examples: int = Field(ge=1)
    validation_examples: int = Field(ge=0)
    already_prepared: bool = Field(description="true if nothing had to be written")
