"""A prepared dataset: what its examples look like and where its shards are."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.foundation.contracts.base import Contract


class Feature(Contract):
    """One array of an example.

    `name` tells its place: `x`, `y`, `sample_weight`, or `x/<key>` and `y/<key>` where the model takes or returns
    a dict of arrays.
    """

    name: str
    dtype: str = Field(description="a NumPy dtype name of fixed width, such as float32")
    shape: tuple[int, ...] = Field(description="shape of one example, without the batch dimension")


class ShardRecord(Contract):
    """One TFRecord file."""

    path: str = Field(description="relative to the dataset's folder")
    examples: int = Field(ge=1)
    size: int = Field(ge=0, description="bytes")
    crc32c: str = Field(pattern=r"^[0-9a-f]{8}$")


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
    folder: str = Field(description="datasets/<digest>, relative to the storage root")
    content_digest: str
    train_examples: int = Field(ge=1)
    validation_examples: int = Field(ge=0)
    already_prepared: bool = Field(description="true if nothing had to be written")
