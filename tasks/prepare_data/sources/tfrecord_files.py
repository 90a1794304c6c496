"""`tfrecord`: TFRecord files that exist already, read where they are, or copied."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c

from tasks.foundation.errors import SourceError
from tasks.foundation.storage.opening import open_storage
from tasks.prepare_data.sources.base import InPlace, Located, Range, Source, parse_options
from tasks.prepare_data.sources.files import find_files
from tasks.prepare_data.sources.fingerprint import (
    Fingerprint,
    confirmed,
    fingerprint,
    origin_of,
    stamps_of,
    watched,
)
from tasks.prepare_data.sources.source_file import SourceFile
from tasks.prepare_data.sources.tfrecord_framing import Framed, framed
from tasks.prepare_data.sources.tfrecord_parsing import examples_of, place
from tasks.prepare_data.sources.tfrecord_spec import TfrecordOptions, chosen_features, fitted

_RANGE_BYTES = 32 << 20
_PEEK_BYTES = 64 << 10


def tfrecord(options: Mapping[str, Any], folder: Path) -> Source:
    """x, y and sample_weight: features of `tf.train.Example`s, one array each, or a dict of them.

    Preparing reads every file through once: the framing and both checksums of each record, and each record as the
    reader will parse it, images decoded too. That costs about an epoch's reading; a bad record would otherwise come up
    in the middle of training, on the accelerator's time.

    Then nothing is copied: the dataset is ranges of these files, which must stay as they are. `copy: true` writes
    shards of Baton's own instead. It is for compressed files; for sorted ones, since records are else shuffled among a
    window of ranges only; and where evaluation is frequent, since held out examples else lie in every range.

    Raises:
        RunFileError: an option cannot be used, or the first record is not as the features say.
        InvalidInput: files lie on a store that is not known, or below folders that have no usable address.
        SourceError: there are no files, or they hold no record. While reading: a file is damaged, cut off or
            compressed, or a record is not as the features say.
    """
    chosen = parse_options(TfrecordOptions, options, source="tfrecord")
    features = chosen_features(chosen)
    files = [file for file in find_files(chosen.path, folder) if not file.name.startswith(".")]
    for address in {file.uri.rpartition("/")[0] for file in files if file.local is None}:
        # Refused here, not when training comes to read from it.
        open_storage(address, relative_to=Path("/"))
    file, record = _first_record(files, chosen)
    features = fitted(record.data, features, chosen, where=place(file.uri, record))
    examples = partial(examples_of, features=features, compressed=chosen.copy_)
    found = fingerprint(files) if chosen.copy_ else _named_by_place(files)
    return Source(
        content=found.content,
        settings=chosen.model_dump(exclude={"path"}),
        origin=found.origin,
        length=None,
        read=lambda: watched(files, found, _located(files, examples)),
        confirm=partial(confirmed, files),
        in_place=None
        if chosen.copy_
        else InPlace(
            features=features,
            ranges=lambda check, records: watched(files, found, _ranges(files, examples, check, records)),
        ),
    )


def _first_record(files: Sequence[SourceFile], options: TfrecordOptions) -> tuple[SourceFile, Framed]:
    for file in files:
        with file.open() as opened:
            blocks = iter(partial(opened.read, _PEEK_BYTES), b"")
            record = next(framed(blocks, where=file.uri, compressed=options.copy_), None)
        if record is not None:
            return file, record
    raise SourceError(f"data.options.path: {options.path!r}: no file there holds a record; name files that do")


def _named_by_place(files: Sequence[SourceFile]) -> Fingerprint:
    """Without reading what is here: the ranges' checksums, which decide the content, are found on the way anyway.

    Files elsewhere, or written since, are looked through anew; if they hold the same, it is the same dataset.
    """
    stamps = stamps_of(files)
    lines = (f"{file.uri}\0{stamp}\n" for file, stamp in zip(files, stamps, strict=True))
    content = hashlib.sha256("".join(lines).encode()).hexdigest()
    return Fingerprint(content=content, origin=origin_of(files, stamps, content), size=0, stamps=tuple(stamps))


def _located(
    files: Sequence[SourceFile], examples: Callable[[SourceFile], Iterator[tuple[Framed, str, object]]]
) -> Iterator[Located]:
    for file in files:
        yield from ((where, example) for _, where, example in examples(file))


def _ranges(
    files: Sequence[SourceFile],
    examples: Callable[[SourceFile], Iterator[tuple[Framed, str, object]]],
    check: Callable[[str, object], object],
    most_records: int | None,
) -> Iterator[Range]:
    for file in files:
        begin = size = records = crc = 0
        for record, where, example in examples(file):
            check(where, example)
            full = size + len(record.frame) > _RANGE_BYTES if most_records is None else records == most_records
            if records and full:
                yield _range(file, begin, size, records, crc)
                begin, size, records, crc = begin + size, 0, 0, 0
            size += len(record.frame)
            records += 1
            crc = google_crc32c.extend(crc, record.frame)
        if records:
            yield _range(file, begin, size, records, crc)


def _range(file: SourceFile, begin: int, size: int, records: int, crc: int) -> Range:
    return Range(path=file.uri, begin=begin, size=size, records=records, crc32c=f"{crc:08x}")
