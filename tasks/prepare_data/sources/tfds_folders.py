"""The source `tfds`: a folder that TensorFlow Datasets prepared, read without the package `tensorflow-datasets`.

Such a folder describes itself: `features.json` has the features of an example, `dataset_info.json` the splits with the
number of records in each file. The files of TFRecord have one `tf.train.Example` a record, in which a feature within
another has a key such as `objects/label`. So the records are read where they are, as those of the source `tfrecord`,
with features known beforehand. What TFDS would decode by code of its own (sequences of open length, compressed tensors,
video) is refused by name before a record is read.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from baton.tasks.foundation.contracts.dataset import CLASSES, Feature
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.foundation.text import shown
from baton.tasks.prepare_data.sources.image_folders import ImageSize
from baton.tasks.prepare_data.sources.source import Options, Source, parse_options, suggestion
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files
from baton.tasks.prepare_data.sources.tfrecord_files import (
    Record,
    named_features,
    parsed_examples,
    records_source,
    require_readable_folders,
    value_encoding,
)

_FEATURES, _INFO = "features.json", "dataset_info.json"
_TEMPLATE: Final = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_FORMAT = "tfrecord"
# What the files of a folder may say.
_MOST_FEATURES, _MOST_DIMENSIONS, _MOST_SIDE, _MOST_NAMES_BYTES = 10_000, 32, 2**14, 2**22
_OWN_CODE = "read it in your own data.py:load, for example with tfds.load"


# Kinds of features with one form: dtype, shape, encoding.
_FIXED: Final[dict[str, tuple[str, tuple[int, ...], Literal["text", "int64", "float"]]]] = {
    "Text": ("string", (), "text"),
    "ClassLabel": ("int64", (), "int64"),
    "BBoxFeature": ("float32", (4,), "float"),
}


class TfdsOptions(Options):
    """`data.options` of `tfds`."""

    path: str = Field(
        min_length=1,
        description="a prepared folder such as ~/tensorflow_datasets/mnist/3.0.1, also gs://; tfds build mnist, or "
        "tfds.load in Python, prepares it",
    )
    split: str = Field(default="train", min_length=1, description="the name of a split, such as train or test")
    x: str | dict[str, str] | None = Field(
        default=None, description="the name of the feature for x, or {input: name}; by default, the dataset's own input"
    )
    y: str | dict[str, str] | None = Field(
        default=None,
        description="the name of the feature for y, or {output: name}; by default, the dataset's own label",
    )
    sample_weight: str | None = Field(default=None, description="the name of the feature with the weights")
    size: ImageSize | None = Field(
        default=None, description="[height, width] of images, or one integer for both; needed if they differ in size"
    )
    copy_: bool = Field(
        default=False, alias="copy", description="true copies the examples into shards, in shuffled order"
    )


def tfds(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of features of a prepared dataset for x, y and sample_weight: one array each, or a dict of arrays.

    Raises:
        RunFileError: an option cannot be used, or names a feature or a split that the dataset does not have or that
            cannot be read in place.
        SourceError: the folder is not a prepared dataset, or a file of it is missing. While reading: a file is damaged
            or has another number of records than the dataset says.
    """
    chosen = parse_options(TfdsOptions, options, source="tfds")
    path = chosen.path.rstrip("/")
    found = {file.relative: file for file in find_files(path, folder)}
    info = _document(path, found, _INFO)
    known = _features_of(path, found, chosen.size)
    _require_tfrecord(found[_INFO], info)
    shards = _shards_of(path, found, info, chosen.split)
    files = [file for file, _ in shards]
    require_readable_folders(files)
    parts = _parts(chosen, info, known)
    features = named_features(parts, known, among=f"{path}/{_FEATURES}")
    settings = {"features": [feature.model_dump(exclude_defaults=True) for feature in features]}
    origin = _class_names(found, parts["y"])
    counts = {file.uri: count for file, count in shards}
    examples = partial(_counted, partial(parsed_examples, features=features, compressed=False), counts)
    return records_source(files, features, examples, copy=chosen.copy_, settings=settings, origin=origin)


def describe_folder(
    path: str, files: Sequence[SourceFile], size: Sequence[int] | None
) -> tuple[dict[str, Feature | str], list[str], list[str]]:
    """Return what a prepared folder says of itself: features by key, the supervised keys, and its splits.

    A feature that cannot be read is the reason, with the remedy.

    Args:
        path: the folder, for messages.
        size: (height, width) of its images; None: they have one.

    Raises:
        SourceError: TensorFlow Datasets did not prepare it, or it is damaged.
    """
    found = {file.relative: file for file in files}
    info = _document(path, found, _INFO)
    splits = [str(_at(each, "name")) for each in _list(info.get("splits"))]
    return _features_of(path, found, size), _supervised_keys(info), splits


def _document(path: str, found: Mapping[str, SourceFile], name: str) -> dict[str, Any]:
    """Return a JSON file of the folder."""
    file = found.get(name)
    if file is None:
        inner = sorted(each.rpartition("/")[0] for each in found if each.endswith(f"/{name}"))
        remedy = f"name the folder {path}/{inner[-1]}" if inner else "name the folder of a version, such as mnist/3.0.1"
        raise SourceError(
            f"data.options.path: {path!r}: has no {name}, so TensorFlow Datasets did not prepare it; {remedy}"
        )
    try:
        document = json.loads(file.read())
    except (ValueError, RecursionError) as fault:
        raise SourceError(f"{file}: is not JSON: {fault}; prepare the dataset again") from fault
    if not isinstance(document, dict):
        raise _unexpected(file, "it is not an object")
    return document


def _unexpected(file: SourceFile, problem: str) -> SourceError:
    return SourceError(f"{file}: {problem}, as TensorFlow Datasets 4 writes it; prepare the dataset again")


def _parts(
    options: TfdsOptions, info: Mapping[str, Any], known: Mapping[str, Feature | str]
) -> dict[str, str | dict[str, str] | None]:
    """Return what x, y and sample_weight are: as the run file says, or else the dataset's supervised keys."""
    if options.x is not None:
        return {"x": options.x, "y": options.y, "sample_weight": options.sample_weight}
    keys = _supervised_keys(info)
    if len(keys) not in (2, 3):
        raise RunFileError(
            "data.options.x is missing, and the dataset does not say what its input is; available: "
            f"{', '.join(sorted(known))}"
        )
    weight = keys[2] if len(keys) == 3 else None  # noqa: PLR2004 - x, y, sample_weight
    return {"x": keys[0], "y": options.y or keys[1], "sample_weight": options.sample_weight or weight}


def _supervised_keys(info: Mapping[str, Any]) -> list[str]:
    """Return the keys of input, label and, if there are three, weight; [] if the dataset does not say them."""
    items = _at(info, "supervisedKeys", "tuple", "items")
    found = [_at(item, "featureKey") for item in items] if isinstance(items, list) else []
    keys = [key for key in found if isinstance(key, str)]
    return keys if len(keys) == len(found) else []


def _at(value: object, *keys: str) -> object:
    """Return what is below keys of nested objects; None if it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _require_tfrecord(file: SourceFile, info: Mapping[str, Any]) -> None:
    kind = str(info.get("fileFormat", _FORMAT))
    if kind != _FORMAT:
        raise SourceError(
            f"{file}: its fileFormat is {shown(repr(kind))}, not {_FORMAT}; prepare the dataset with "
            f"file_format={_FORMAT}"
        )


def _shards_of(
    path: str, found: Mapping[str, SourceFile], info: Mapping[str, Any], split: str
) -> list[tuple[SourceFile, int]]:
    """Return the files of a split that have records, in order, with their numbers of records."""
    splits = {str(_at(each, "name")): each for each in _list(info.get("splits"))}
    if split not in splits:
        part = re.match(r"([\w-]+)[\[+]", split)
        remedy = suggestion(split, splits)
        if part is not None and part[1] in splits:
            remedy = f"name a whole split; data.validation_fraction and data.validation divide examples; {remedy}"
        raise RunFileError(f"data.options.split: {split!r}: {path} has no such split; {remedy}")
    try:
        lengths = [int(str(length)) for length in _list(_at(splits[split], "shardLengths"))]
    except ValueError as fault:
        raise _unexpected(found[_INFO], f"shardLengths of the split {split!r} are not numbers") from fault
    if not any(lengths) or min(lengths) < 0:
        raise SourceError(f"{found[_INFO]}: the split {split!r} has no examples; prepare the dataset again")
    template = str(_at(splits[split], "filepathTemplate") or _TEMPLATE)
    values = {"DATASET": str(info.get("name")), "SPLIT": split, "FILEFORMAT": _FORMAT}
    shards: list[tuple[SourceFile, int]] = []
    for index, length in enumerate(lengths):
        if not length:
            continue
        name = _file_name(template, values, index, len(lengths))
        if name not in found:
            raise SourceError(
                f"{path}/{shown(name)} is missing, and {_INFO} says that it has {length} examples of the split "
                f"{split!r}; restore it, or prepare the dataset again"
            )
        shards.append((found[name], length))
    return shards


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _file_name(template: str, values: Mapping[str, str], index: int, count: int) -> str:
    numbers = {"SHARD_INDEX": f"{index:05d}", "NUM_SHARDS": f"{count:05d}"}
    every = {**values, **numbers, "SHARD_X_OF_Y": f"{index:05d}-of-{count:05d}"}
    return re.sub(r"\{(\w+)\}", lambda found: every.get(found[1], found[0]), template)


def _counted(
    examples: Callable[[SourceFile], Iterator[tuple[Record, str, object]]], counts: Mapping[str, int], file: SourceFile
) -> Iterator[tuple[Record, str, object]]:
    """Yield the examples of a file; then compare their number with the dataset's."""
    number = 0
    for number, found in enumerate(examples(file), start=1):  # noqa: B007 - the last one is used below
        yield found
    if number != counts[file.uri]:
        raise SourceError(
            f"{file}: has {number} records, but {_INFO} says {counts[file.uri]}; restore the file, or prepare the "
            "dataset again"
        )


def _class_names(found: Mapping[str, SourceFile], key: object) -> dict[str, str]:
    """Return the names of the classes for the manifest, if y is one label with names."""
    file = found.get(f"{key.replace('/', '-')}.labels.txt") if isinstance(key, str) else None
    if file is None:
        return {}
    names = [
        name.strip() for name in file.read(_MOST_NAMES_BYTES).decode("utf-8", "replace").splitlines() if name.strip()
    ]
    return {CLASSES: json.dumps(names)}


def _features_of(path: str, found: Mapping[str, SourceFile], size: Sequence[int] | None) -> dict[str, Feature | str]:
    """Return the features of a record by key; or why one cannot be read, with the remedy."""
    document = _document(path, found, _FEATURES)
    known: dict[str, Feature | str] = {}
    try:
        _add(known, "", document, (), size)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as fault:
        raise _unexpected(found[_FEATURES], f"a feature is not described ({type(fault).__name__}: {fault})") from fault
    if not 0 < len(known) <= _MOST_FEATURES:
        raise _unexpected(found[_FEATURES], f"it describes {len(known)} features, not 1 to {_MOST_FEATURES}")
    return known


def _add(
    known: dict[str, Feature | str],
    key: str,
    value: Mapping[str, Any],
    before: tuple[int, ...],
    size: Sequence[int] | None,
) -> None:
    """Add a feature, and those below it; `before` are the dimensions of the sequences that it is in."""
    kind, content = _described(value)
    if kind in ("FeaturesDict", "Translation"):
        inner = (
            {language: {"type": "Text", "content": {}} for language in content["languages"]}
            if kind == "Translation"
            else content.get("features", content)
        )
        for name in sorted(inner):
            _add(known, f"{key}/{name}" if key else name, inner[name], before, size)
    elif kind == "Sequence" and not before and _length(content) is not None:
        _add(known, key, content["feature"], (int(content["length"]),), size)
    else:
        known[key] = _leaf(key, kind, content, before, size)


def _described(value: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the class of a feature and what describes it; older files have them in `type` and `content`."""
    if "type" in value:
        content = value.get("content") or {}
        content = json.loads(content) if isinstance(content, str) else content
        return str(value["type"]).rpartition(".")[2], content
    name = str(value["pythonClassName"])
    content = next((part for key, part in value.items() if isinstance(part, dict)), {})
    # Another class than TFDS's own may store something else under the same description.
    return name.rpartition(".")[2] if name.startswith("tensorflow_datasets.core.") else name, content


def _length(content: Mapping[str, Any]) -> int | None:
    length = content.get("length")
    return None if length is None or int(length) < 0 else int(length)


def _leaf(
    key: str, kind: str, content: Mapping[str, Any], before: tuple[int, ...], size: Sequence[int] | None
) -> Feature | str:
    if content.get("optional"):
        return f"is optional, so that records may lack it; {_OWN_CODE}"
    if kind in ("Image", "LabeledImage") and not before:
        return _image(key, kind, content, size)
    if kind in _FIXED:
        dtype, shape, encoding = _FIXED[kind]
        return Feature(name=key, key=key, dtype=dtype, shape=(*before, *shape), encoding=encoding)
    if kind in ("Tensor", "Scalar", "Audio"):
        return _tensor(key, content, before)
    if kind == "Sequence":
        return f"is a sequence of open length, or of sequences; {_OWN_CODE}, and pad it with data.pad"
    return f"is of the kind {kind}, which is not read in place; {_OWN_CODE}"


def _shape(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a shape; -1 stands for open dimensions."""
    shape = content.get("shape") or ()
    dimensions = shape.get("dimensions", ()) if isinstance(shape, Mapping) else shape
    if len(dimensions) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape of {len(dimensions)} dimensions")
    return tuple(-1 if each is None else int(each) for each in dimensions)


def _image(key: str, kind: str, content: Mapping[str, Any], size: Sequence[int] | None) -> Feature | str:
    height, width, channels = _shape(content) or (-1, -1, 3)
    if content.get("dtype", "uint8") != "uint8" or channels not in (1, 3):
        return f"is an image of {content.get('dtype')} with {channels} channels, not uint8 with 1 or 3; {_OWN_CODE}"
    if kind == "LabeledImage" and size is not None and (height, width) != tuple(size):
        return f"is an image of labels, which cannot be resized; remove data.options.size, or {_OWN_CODE}"
    if size is None and (min(height, width) < 1 or max(height, width) > _MOST_SIDE):
        sizes = "different sizes" if min(height, width) < 1 else f"{height} x {width} pixels"
        return f"has images of {sizes}; set data.options.size: [height, width]"
    if size is not None:
        height, width = size
    return Feature(name=key, key=key, dtype="uint8", shape=(height, width, channels), encoding="image")


def _tensor(key: str, content: Mapping[str, Any], before: tuple[int, ...]) -> Feature | str:
    shape, dtype = (*before, *_shape(content)), str(content["dtype"])
    stored = str(content.get("encoding") or "none").lower()
    if math.prod(shape) < 1 or min(shape, default=1) < 0:
        return f"has the open shape {list(shape)}, so that examples differ; {_OWN_CODE}, and pad it with data.pad"
    if stored not in ("none", "bytes") or (stored == "bytes" and before):
        return f"is stored as {stored}, which is not read in place; {_OWN_CODE}"
    if dtype == "string":
        return Feature(name=key, key=key, dtype=dtype, shape=shape, encoding="text")
    encoding = value_encoding(dtype)
    if encoding is None:
        return f"is of the dtype {dtype}, which is not read in place; {_OWN_CODE}"
    return Feature(name=key, key=key, dtype=dtype, shape=shape, encoding="raw" if stored == "bytes" else encoding)
