"""The source `tfrecord`: existing TFRecord files, read in place or copied."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c

from tasks.foundation.errors import SourceError
from tasks.foundation.storage.opening import open_storage
from tasks.prepare_data.sources.base import InPlace, LocatedExample, Range, Source, parse_options
from tasks.prepare_data.sources.files import find_files
from tasks.prepare_data.sources.fingerprint import (
    Fingerprint,
    confirm_all,
    describe_origin,
    file_stamps,
    fingerprint,
    require_unchanged,
)
from tasks.prepare_data.sources.source_file import SourceFile
from tasks.prepare_data.sources.tfrecord_framing import Record, read_records
from tasks.prepare_data.sources.tfrecord_parsing import parsed_examples, record_position
from tasks.prepare_data.sources.tfrecord_spec import TfrecordOptions, chosen_features, fit_to_record

_RANGE_BYTES = 32 << 20
_PEEK_BYTES = 64 << 10


def tfrecord(options: Mapping[str, Any], folder: Path) -> Source:
    """Open a source of features of `tf.train.Example`s for x, y and sample_weight: one array each, or a dict of arrays.

    Preparing reads every file once. It checks the framing and both checksums of each record, and parses each record as
    training will, images included. That takes about as long as reading an epoch; otherwise training would find an
    invalid record later, while an accelerator is rented.

    By default nothing is copied: the dataset consists of ranges of these files, which must not change. `copy: true`
    writes shards instead. Use it for compressed files; for sorted files, because records in place are only shuffled
    within a window of ranges; and for frequent evaluation, because held-out examples in place lie in every range.

    Raises:
        RunFileError: an option cannot be used, or the first record does not match the features.
        InvalidInput: the files are in an unknown store, or in folders without a usable address.
        SourceError: there are no files, or no records. While reading: a file is damaged, truncated or compressed, or a
            record does not match the features.
    """
    chosen = parse_options(TfrecordOptions, options, source="tfrecord")
    features = chosen_features(chosen)
    files = [file for file in find_files(chosen.path, folder) if not file.name.startswith(".")]
    for address in {file.uri.rpartition("/")[0] for file in files if file.local is None}:
        # Refuse the address now, not when training reads from it.
        open_storage(address, relative_to=Path("/"))
    file, record = _first_record(files, chosen)
    features = fit_to_record(record.data, features, chosen, where=record_position(file.uri, record))
    examples = partial(parsed_examples, features=features, compressed=chosen.copy_)
    found = fingerprint(files) if chosen.copy_ else _fingerprint_by_stamps(files)
    return Source(
        content=found.content,
        settings=chosen.model_dump(exclude={"path"}),
        origin=found.origin,
        length=None,
        read=lambda: require_unchanged(files, found, _read(files, examples)),
        confirm=partial(confirm_all, files),
        in_place=None
        if chosen.copy_
        else InPlace(
            features=features,
            ranges=lambda check, records: require_unchanged(files, found, _ranges(files, examples, check, records)),
        ),
    )


def _first_record(files: Sequence[SourceFile], options: TfrecordOptions) -> tuple[SourceFile, Record]:
    for file in files:
        with file.open() as opened:
            blocks = iter(partial(opened.read, _PEEK_BYTES), b"")
            record = next(read_records(blocks, where=file.uri, compressed=options.copy_), None)
        if record is not None:
            return file, record
    raise SourceError(f"data.options.path: {options.path!r}: none of these files has a record; name files with records")


def _fingerprint_by_stamps(files: Sequence[SourceFile]) -> Fingerprint:
    """Identify files by path and stamp, without reading them: indexing computes the ranges' checksums anyway.

    Files that were moved or rewritten are indexed again; if their content is the same, it is the same dataset.
    """
    stamps = file_stamps(files)
    lines = (f"{file.uri}\0{stamp}\n" for file, stamp in zip(files, stamps, strict=True))
    content = hashlib.sha256("".join(lines).encode()).hexdigest()
    return Fingerprint(content=content, origin=describe_origin(files, stamps, content), size=0, stamps=tuple(stamps))


def _read(
    files: Sequence[SourceFile], examples: Callable[[SourceFile], Iterator[tuple[Record, str, object]]]
) -> Iterator[LocatedExample]:
    for file in files:
        yield from ((where, example) for _, where, example in examples(file))


def _ranges(
    files: Sequence[SourceFile],
    examples: Callable[[SourceFile], Iterator[tuple[Record, str, object]]],
    check: Callable[[str, object], object],
    records_per_range: int | None,
) -> Iterator[Range]:
    for file in files:
        begin = size = records = crc = 0
        for record, where, example in examples(file):
            check(where, example)
            full = (
                size + len(record.frame) > _RANGE_BYTES if records_per_range is None else records == records_per_range
            )
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
