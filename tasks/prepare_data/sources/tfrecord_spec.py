"""The features of `tf.train.Example` records, as the run file describes them; compares them with records."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.errors import RunFileError
from tasks.prepare_data.sources.base import Options, suggestion

_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_DTYPES = {
    "values": (*_INTEGERS, *_FLOATS),
    "raw": (*_INTEGERS, *_FLOATS, "complex64", "complex128"),
    "image": ("uint8", "float32"),
}
_IMAGE_RANK, _IMAGE_CHANNELS = 3, (1, 3)
_KIND = {"raw": "bytes_list", "image": "bytes_list", "int64": "int64_list", "float": "float_list"}


class FeatureSpec(Contract):
    """The description of one feature in the run file."""

    dtype: str
    shape: list[int] = Field(default_factory=list)
    encoding: Literal["values", "raw", "image"] = "values"


class TfrecordOptions(Options):
    """`data.options` of `tfrecord`."""

    path: str = Field(min_length=1, description="a file, a folder or a pattern such as train-*.tfrecord, also on gs://")
    features: dict[str, FeatureSpec] = Field(
        min_length=1,
        description="the features of the records: {name: {dtype: int64, shape: [], encoding: values}}; the encoding is "
        "values (a list of numbers), raw (bytes of little-endian numbers) or image (a JPEG or PNG file)",
    )
    x: str | dict[str, str] = Field(description="the name of the feature for x, or {input: name}")
    y: str | dict[str, str] | None = Field(default=None, description="the name of the feature for y, or {output: name}")
    sample_weight: str | None = Field(default=None, description="the name of the feature with the weights")
    copy_: bool = Field(
        default=False, alias="copy", description="true copies the examples into shards, in shuffled order"
    )


class RecordMismatch(Exception):
    """A record does not match the description in the run file.

    Attributes:
        key: the feature; None for the record as a whole.
        problem: what is wrong, and the remedy.
    """

    def __init__(self, key: str | None, problem: str) -> None:
        super().__init__(problem)
        self.key = key
        self.problem = problem


def chosen_features(options: TfrecordOptions) -> tuple[Feature, ...]:
    """Return the features that form an example, in the order of the flattened example.

    Raises:
        RunFileError: x, y or sample_weight names a missing feature, or a feature's description is invalid.
    """
    for name, spec in options.features.items():
        _check(name, spec)
    if options.sample_weight is not None and options.y is None:
        raise RunFileError(
            f"data.options.sample_weight: {options.sample_weight!r}: weights need labels; set data.options.y too"
        )
    selected = {"x": options.x, "y": options.y, "sample_weight": options.sample_weight}
    names: dict[str, str] = {}
    for part, value in selected.items():
        for feature_name, key in [(part, value)] if isinstance(value, str) else _named(part, value):
            if key not in options.features:
                option = feature_name.replace("/", ".")
                raise RunFileError(
                    f"data.options.{option}: {key!r}: data.options.features has no such feature; "
                    f"{suggestion(key, options.features)}"
                )
            names[feature_name] = key
    return tuple(_feature(feature_name, key, options.features[key]) for feature_name, key in names.items())


def _named(part: str, value: Mapping[str, str] | None) -> list[tuple[str, str]]:
    if value is None:
        return []
    if not value or "" in value:
        raise RunFileError(f"data.options.{part}: {dict(value)!r}: each array needs a name; write {{name: feature}}")
    return [(f"{part}/{key}", value[key]) for key in sorted(value)]


def _feature(feature_name: str, key: str, spec: FeatureSpec) -> Feature:
    encoding: Any = spec.encoding
    if encoding == "values":
        encoding = "float" if spec.dtype in _FLOATS else "int64"
    return Feature(name=feature_name, dtype=spec.dtype, shape=tuple(spec.shape), key=key, encoding=encoding)


def _check(name: str, spec: FeatureSpec) -> None:
    at = f"data.options.features.{name}"
    known = _DTYPES[spec.encoding]
    if spec.dtype not in known:
        raise RunFileError(
            f"{at}.dtype: {spec.dtype!r}: the encoding {spec.encoding} does not support this dtype; "
            f"{suggestion(spec.dtype, known)}"
        )
    if min(spec.shape, default=1) < 1:
        raise RunFileError(f"{at}.shape: {spec.shape}: each dimension must be at least 1; give the shape of an example")
    if spec.encoding == "image" and (len(spec.shape) != _IMAGE_RANK or spec.shape[2] not in _IMAGE_CHANNELS):
        raise RunFileError(
            f"{at}.shape: {spec.shape}: an image has the shape [height, width, channels], with 1 or 3 channels; images "
            "of another size are resized"
        )


def fit_to_record(
    data: bytes, features: Sequence[Feature], options: TfrecordOptions, *, where: str
) -> tuple[Feature, ...]:
    """Return the features as the first record stores them: floats may be stored as a list of integers.

    Args:
        data: the first record.
        features: as `chosen_features` returns them.
        options: as in the run file.
        where: the record, for messages.

    Raises:
        RunFileError: the record lacks a feature, or has values of another type or number.
    """
    try:
        parsed = _parsed(data)
    except RecordMismatch as mismatch:
        raise RunFileError(f"data.options.path: {options.path!r}: {where}: {mismatch.problem}") from mismatch
    integers = {name for name, feature in parsed.items() if feature.WhichOneof("kind") == "int64_list"}
    fitting = tuple(
        feature.model_copy(update={"encoding": "int64"})
        if feature.encoding == "float" and feature.record_key in integers
        else feature
        for feature in features
    )
    for feature in fitting:
        try:
            _compare(parsed, feature)
        except RecordMismatch as mismatch:
            spec = options.features[feature.record_key].model_dump()
            raise RunFileError(
                f"data.options.features.{mismatch.key}: {spec}: {where}: {mismatch.problem}"
            ) from mismatch
    return fitting


def require_fit(data: bytes, features: Sequence[Feature]) -> None:
    """Check a record against the features, as far as possible without decoding it.

    Raises:
        RecordMismatch: it does not match; describes what it has.
    """
    parsed = _parsed(data)
    for feature in features:
        _compare(parsed, feature)


def _compare(parsed: Mapping[str, Any], feature: Feature) -> None:
    key, expected, shape = feature.record_key, _KIND[feature.encoding], list(feature.shape)
    if key not in parsed:
        raise RecordMismatch(key, f"it has no feature {key!r}; it has {_shown(parsed)}")
    kind, values = _content(parsed[key])
    if kind != expected:
        raise RecordMismatch(key, f"{key!r} is {kind}, not {expected}; set another dtype or encoding")
    needed = 1 if expected == "bytes_list" else math.prod(shape)
    if len(values) != needed:
        raise RecordMismatch(
            key, f"{key!r} has {len(values)} values, but the shape {shape} needs {needed}; correct the shape"
        )
    if feature.encoding == "raw":
        bytes_needed = np.dtype(feature.dtype).itemsize * math.prod(shape)
        if len(values[0]) != bytes_needed:
            raise RecordMismatch(
                key,
                f"{key!r} has {len(values[0])} bytes, but {feature.dtype} {shape} needs {bytes_needed}; correct dtype "
                "or shape",
            )


def _shown(parsed: Mapping[str, Any]) -> str:
    contents = {name: _content(feature) for name, feature in sorted(parsed.items())}
    return ", ".join(f"{name} ({kind} of {len(values)})" for name, (kind, values) in contents.items()) or "none"


def _content(feature: Any) -> tuple[str, Sequence[Any]]:
    kind = feature.WhichOneof("kind")
    return ("empty", ()) if kind is None else (kind, getattr(feature, kind).value)


def _parsed(data: bytes) -> Mapping[str, Any]:
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        features: Mapping[str, Any] = tf.train.Example.FromString(data).features.feature
    except DecodeError as fault:
        raise RecordMismatch(None, "it is not a tf.train.Example; write the records as tf.train.Examples") from fault
    return features
