"""The name of a dataset; prepares a mixture: each source is a dataset of its own, which the mixture names.

A name follows from the source and from every setting that decides the bytes of the dataset. So a source is prepared
once, whatever it is mixed with; other weights write a manifest and no example. Errors about an own set, or about one
source of a mixture, name its keys, not those of `data` itself.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from baton.tasks.foundation.contracts.data_spec import DataSpec, MixedSource, Mixture, SourceSpec, integer_weights
from baton.tasks.foundation.contracts.dataset import (
    CLASSES,
    DatasetManifest,
    DatasetRef,
    Feature,
    Reading,
    classes_of,
    content_digest,
)
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.dataset.columns import shared_features
from baton.tasks.foundation.dataset.manifest import (
    dataset_folder,
    load_manifest,
    manifest_path,
    read_manifest,
    require_same_labels,
)
from baton.tasks.foundation.errors import FileAlreadyThere, RunFileError, SourceError
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.text import message
from baton.tasks.prepare_data.example_checks import features_of_first_example, kinds_of, words_of
from baton.tasks.prepare_data.sources.returned_arrays import floatx
from baton.tasks.prepare_data.sources.source import Source
from baton.tasks.prepare_data.split import settings_of_split

# Increase this when the same source and settings are written as other bytes.
_FORMAT = 2
_KEYS = re.compile(r"\bdata\.(source|options|version|batched|examples)\b")
Prepare = Callable[[RunSpec, Place], DatasetRef]


def dataset_digest(spec: RunSpec, source: Source) -> str:
    """Return the dataset's name: sha256 over the source's content and all settings that matter, 24 hex digits.

    Args:
        source: the opened source.
    """
    decides: dict[str, Any] = {
        "format": _FORMAT,
        "source": spec.data.source,
        "content": source.content,
        "settings": dict(source.settings),
        "version": spec.data.version,
        "validation_fraction": spec.data.validation_fraction,
        # These settings change no byte, but the run's checks must have passed.
        "classes": spec.data.classes,
        "allow_nan": spec.data.allow_nan,
        "shard_examples": spec.data.shard_examples,
        "seed": spec.train.seed,
        **settings_of_split(spec.data),
    }
    if ":" in spec.data.source:
        decides["arrays"] = f"as in fit, {floatx()}"
    # Newer settings; without them, the name stays the same.
    if not spec.data.shuffle:
        decides["shuffle"] = False
    if spec.data.batched:
        decides["batched"] = True
    if spec.data.examples is not None:
        decides["examples"] = spec.data.examples
    if spec.data.pad is not None:
        decides["pad"] = {name: rule.model_dump() for name, rule in spec.data.pad.items()}
    if spec.data.pack is not None:
        decides["pack"] = spec.data.pack.model_dump()
    # YAML dates are not JSON, but their text distinguishes them.
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:24]


@contextmanager
def errors_at(prefix: str) -> Iterator[None]:
    """Use around work on the `data` of an own set or of a source: `data.options.path` in an error becomes its key.

    Args:
        prefix: the key of the run file, as `data.test` or `data.sources[0]`.

    Raises:
        SourceError: as within, with the keys of the set or source.
        RunFileError: likewise.
    """
    try:
        yield
    except (SourceError, RunFileError) as fault:
        text = _KEYS.sub(rf"{prefix}.\1", str(fault))
        if text == str(fault):
            raise
        raise type(fault)(text) from fault.__cause__


def prepare_training_data(spec: RunSpec, place: Place, prepare: Prepare) -> DatasetRef:
    """Prepare the dataset of `data.source`, or the mixture of `data.sources`.

    Before a dataset of a mixture is written, its first example is compared with the first examples of the others.

    Args:
        place: where the data is prepared; `check_features` is called once, for the first source that is written.

    Raises:
        SourceError: the sources' examples have different features.
        BatonError: a dataset cannot be prepared, see `prepare`.
    """
    if not spec.data.sources:
        return prepare(spec, place)
    known = _FirstExamples(spec, place)
    prepared: list[DatasetRef] = []
    manifests: list[DatasetManifest] = []
    for index in range(len(spec.data.sources)):
        at = dataclasses.replace(place, check_features=known.check_of(index))
        with errors_at(f"data.sources[{index}]"):
            prepared.append(prepare(spec_of_source(spec, index, all_classes(manifests)), at))
        manifests.append(load_manifest(place.root, prepared[-1]))
        known.add(index, manifests[-1].named_features)
    manifest = mixture_manifest(spec, prepared, manifests)
    folder = dataset_folder(manifest.digest)
    existed = _create(place.root, folder, manifest)
    return DatasetRef(
        folder=folder,
        content_digest=manifest.content_digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=existed and all(each.already_prepared for each in prepared),
    )


def spec_of_source(spec: RunSpec, index: int, classes: Sequence[str]) -> RunSpec:
    """Return the run file of a run on one source of a mixture alone; `classes` are those of the sources before it."""
    return spec.model_copy(update={"data": with_classes(spec.data.of_source(index), classes)})


def with_classes(data: DataSpec, classes: Sequence[str]) -> DataSpec:
    """Let a source that has names for its labels number them as other examples do; others are compared with these."""
    if data.source != "images" or not classes or "classes" in data.options:
        return data
    return data.model_copy(update={"options": {**data.options, "classes": list(classes)}})


def all_classes(manifests: Sequence[DatasetManifest]) -> tuple[str, ...]:
    """Return the classes of several sources: one may have more of them than another."""
    return max((classes_of(each.named_features) for each in manifests), key=len, default=())


def mixture_manifest(
    spec: RunSpec, prepared: Sequence[DatasetRef], manifests: Sequence[DatasetManifest]
) -> DatasetManifest:
    """Return the manifest of a mixture.

    Args:
        manifests: their manifests.

    Raises:
        SourceError: they have different features.
    """
    for index, manifest in enumerate(manifests):
        for other, before in enumerate(manifests[:index]):
            require_same_features(spec, other, before.named_features, index, manifest.named_features)
    sources = spec.data.sources
    weights = integer_weights(each.weight for each in sources)
    mixture = Mixture(
        sources=tuple(
            MixedSource(
                source=source.source,
                folder=ref.folder,
                content_digest=ref.content_digest,
                weight=weight,
                train_examples=ref.train_examples,
                validation_examples=ref.validation_examples,
            )
            for source, ref, weight in zip(sources, prepared, weights, strict=True)
        ),
        exhausted=spec.data.exhausted,
    )
    features = shared_features([manifest.features for manifest in manifests])
    classes = all_classes(manifests)
    readings = {_reading_of(source, manifest.reading) for source, manifest in zip(sources, manifests, strict=True)}
    return DatasetManifest(
        digest=mixture.digest,
        content_digest=content_digest(features, (), (), mixture=mixture),
        source=spec.data.source_words,
        origin={CLASSES: json.dumps(classes)} if classes else {},
        features=features,
        train=(),
        validation=(),
        reading=next(reading for reading in ("lists", "examples", "rows") if reading in readings),
        mixture=mixture,
    )


def require_same_features(
    spec: RunSpec, one: int, features: Sequence[Feature], other: int, others: Sequence[Feature]
) -> None:
    """Refuse two sources whose examples differ in structure, dtype or shape.

    Args:
        one: index of a source.
        other: index of another source.

    Raises:
        SourceError: the features differ.
    """
    names = {index: f"data.sources[{index}] {spec.data.sources[index].source}" for index in (one, other)}
    require_same_labels(features, others, where=names[one], elsewhere=names[other])
    found, wanted = kinds_of(features), kinds_of(others)
    if found != wanted:
        raise SourceError(
            message(
                f"data.sources: the examples of {names[one]} and {names[other]} differ",
                details=[f"{names[one]}: {words_of(found)}", f"{names[other]}: {words_of(wanted)}"],
                hints=[
                    "give all the same names, dtypes and shapes; shapes are of one example, without a batch dimension"
                ],
            )
        )


def _reading_of(source: SourceSpec, reading: Reading) -> Reading:
    """Return how a source was read; what the run file or a built-in source says to be examples is no batch."""
    known = ":" not in source.source or source.batched is not None
    return "rows" if known and reading == "examples" else reading


class _FirstExamples:
    """The features of each source, as far as they are known, for comparison before anything is written."""

    def __init__(self, spec: RunSpec, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._features: dict[int, Sequence[Feature]] = {}
        self._accepted = False

    def add(self, index: int, features: Sequence[Feature]) -> None:
        """Note the features of a prepared source."""
        self._features[index] = features

    def check_of(self, index: int) -> Callable[[tuple[Feature, ...], Reading], None]:
        """Return what is called with the features of a source's first example."""

        def check(features: tuple[Feature, ...], reading: Reading) -> None:
            most = index  # the source with the most classes
            for other in range(len(self._spec.data.sources)):
                if other != index:
                    others = tuple(self._of(other, classes_of(features)))
                    require_same_features(self._spec, most, features, other, others)
                    if len(classes_of(others)) > len(classes_of(features)):
                        most, features = other, others
            if self._place.check_features is not None and not self._accepted:
                self._place.check_features(features, _reading_of(self._spec.data.sources[index], reading))
            self._accepted = True

        return check

    def _of(self, index: int, classes: Sequence[str]) -> Sequence[Feature]:
        if index not in self._features:
            with errors_at(f"data.sources[{index}]"):
                of_source = spec_of_source(self._spec, index, classes)
                self._features[index] = features_of_first_example(of_source, self._place.code_folder)
        return self._features[index]


def _create(storage: Storage, folder: str, manifest: DatasetManifest) -> bool:
    """Write a manifest; return whether it existed already."""
    try:
        storage.create(manifest_path(folder), manifest.to_json())
    except FileAlreadyThere:
        read_manifest(storage, folder)  # its name says what is in it; refused if it is damaged
        return True
    return False
