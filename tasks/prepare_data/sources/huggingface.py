"""The source `huggingface`: a dataset that the package `datasets` saved, or a repository of the hub.

Nothing of that package is needed: a dataset is tables of Arrow or Parquet, and a few files that say which of them form
a split (`hub_layouts.py`). `table` reads them, in place. The features of the dataset say what a column is besides its
Arrow type: an image, a number with the name of a class, lists of one shape.

A dataset of the hub is given by its name and a commit. Its files of the split are downloaded once, into the hub's local
cache, compared with the sha256 that the hub has, and read from there; later commands ask nothing of the hub.
A branch or a tag moves, so a name needs the commit: only that says which examples there are.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from baton.tasks.foundation.contracts.data_spec import hub_folder
from baton.tasks.foundation.contracts.dataset import CLASSES
from baton.tasks.foundation.errors import DamagedInTransit, RunFileError, SourceError
from baton.tasks.foundation.text import abridged
from baton.tasks.prepare_data.sources.column_types import KnownColumn
from baton.tasks.prepare_data.sources.hub_layouts import (
    README,
    SplitFiles,
    find_split,
    is_hidden,
    split_of_layout,
)
from baton.tasks.prepare_data.sources.source import Source, parse_options
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files, local_path
from baton.tasks.prepare_data.sources.table import TableOptions, all_columns, table_source
from baton.tasks.prepare_data.sources.table_files import CsvForm, form_of, schema_of

# Features that are read; others, such as Audio and Video, are files that Baton does not decode.
_READ = re.compile("Value|ClassLabel|Image|Array[2-5]D")
_SHOWN_DIGITS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HuggingfaceOptions(TableOptions):
    """`data.options` of `huggingface`: those of `table`, and which dataset it is."""

    path: str = Field(
        default="",
        description="the folder that save_to_disk wrote, or a folder of Parquet files in the hub's layout, also on "
        "gs://; or give name and revision",
    )
    name: str | None = Field(
        default=None, pattern=r"^[\w.-]+(/[\w.-]+)?$", description="a dataset of the hub, such as owner/dataset"
    )
    revision: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{40}$",
        description="its commit, 40 hex digits, as the hub's page Files and versions shows; a branch or a tag moves",
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        description="a configuration, which is a folder of Parquet files; needed if there are several",
    )
    split: str = Field(default="train", min_length=1, description="the name of a split, such as train")

    @model_validator(mode="after")
    def _names_content(self) -> Self:
        needs = "the source huggingface needs a path, or the name of a dataset of the hub and its revision"
        if self.name is None and self.revision is not None:
            raise ValueError(f"name is missing: {needs}")
        if self.name is None and not self.path:
            raise ValueError(f"path is missing: {needs}")
        if self.name is not None and self.path:
            raise ValueError(f"name: {self.name!r}: data.options.path is set too; remove one of them")
        if self.name is not None and self.revision is None:
            raise ValueError(
                f"revision is missing: {self.name} names other examples whenever somebody changes it; set its commit, "
                "40 hex digits, as the hub's page Files and versions shows"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class HubColumn:
    """What the features of a dataset say of a column besides its Arrow type."""

    kind: str  # Value, ClassLabel, Image, …
    shape: tuple[int, ...] | None = ()  # None: examples differ
    classes: tuple[str, ...] = ()


def huggingface(options: Mapping[str, Any], folder: Path, *, sequences: bool) -> Source:
    """Open a source of the rows of a split, see `table_source`. The names of classes go into the manifest.

    Args:
        options: `data.options`, see `HuggingfaceOptions`.
        sequences: lists of any length are allowed; `data.pad` or `data.pack` is set.

    Raises:
        RunFileError: an option cannot be used, or names a missing split or column.
        SourceError: the dataset is missing or damaged, or a column has a type that no array can be made of.
    """
    chosen = parse_options(HuggingfaceOptions, options, source="huggingface")
    origin: dict[str, str] = {}
    if chosen.name is None or chosen.revision is None:
        found = find_split(chosen.path, folder, config=chosen.config, split=chosen.split)
    else:
        found = download_split(chosen.name, chosen.revision, folder, config=chosen.config, split=chosen.split)
        origin[f"{chosen.name}/{chosen.split}"] = f"commit {chosen.revision}"
    first = found.files[0]
    columns = columns_of_split(found)
    if chosen.x is None and columns:
        others = [name for name in columns if name not in (*all_columns(chosen.y), chosen.weight)]
        chosen = chosen.model_copy(update={"x": others})
    _require_readable(chosen, columns, first)
    label = columns.get(chosen.y) if isinstance(chosen.y, str) else None
    if label is not None and label.classes and label.shape == ():
        origin[CLASSES] = json.dumps(label.classes)
    stored = {name: f"{name}.bytes" for name, each in columns.items() if each.kind == "Image" and each.shape == ()}
    return table_source(
        found.files,
        _table_options(chosen, stored),
        known={
            stored.get(name, name): KnownColumn(image=name in stored, shape=each.shape or None)
            for name, each in columns.items()
        },
        origin=origin,
        sequences=sequences,
    )


def columns_of_split(found: SplitFiles) -> dict[str, HubColumn]:
    """Return what the features of a dataset say of its columns; {} if nothing says them.

    Raises:
        SourceError: they cannot be read.
    """
    first, features = found.files[0], found.features
    if features is None:
        features = features_of_schema(schema_of(first, form_of(first), CsvForm()).metadata, where=str(first))
    return hub_columns(features or {}, where=str(first))


def _require_readable(chosen: HuggingfaceOptions, columns: Mapping[str, HubColumn], file: SourceFile) -> None:
    for column in (*all_columns(chosen.x), *all_columns(chosen.y), *all_columns(chosen.weight)):
        if column in columns and not _READ.fullmatch(columns[column].kind):
            raise SourceError(
                f"{file}: the column {column!r} is {columns[column].kind}, and this source reads numbers, text and "
                "images; decode it in your own data.py:load, or leave it out"
            )


def _table_options(chosen: HuggingfaceOptions, stored: Mapping[str, str]) -> TableOptions:
    """Return the options of `table`, which names the bytes of an image column instead of its structure."""
    given = {name: getattr(chosen, name) for name in TableOptions.model_fields if name != "path"}
    for part in ("x", "y"):
        value = given[part]
        if isinstance(value, list) and not chosen.stack:
            value = {name: name for name in value}
        if isinstance(value, dict):
            given[part] = {
                key: stored.get(name, name) if isinstance(name, str) else name for key, name in value.items()
            }
        elif isinstance(value, str):
            given[part] = stored.get(value, value)
    return TableOptions.model_construct(path="", **given)


def download_split(name: str, revision: str, folder: Path, *, config: str | None, split: str) -> SplitFiles:
    """Download the files of a split into the hub's cache, or find them there; then nothing is asked of the hub.

    Args:
        name: of the repository, such as `stanfordnlp/imdb`.
        revision: the commit.
        config: see `find_split`.

    Raises:
        RunFileError: the hub has no such repository or commit, or that has no such split or configuration.
        SourceError: the package is missing, the hub does not respond, or files do not arrive whole.
    """
    where = f"{name}@{revision[:_SHOWN_DIGITS]}"
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as fault:
        raise SourceError(
            "data.options.name: the package huggingface_hub is missing; install it with pip install "
            "'baton-relay[huggingface]', or let data.options.path name a folder with a copy of the repository"
        ) from fault

    repository = local_path(hub_folder(name), folder)
    cache = repository.parent
    snapshot = repository / "snapshots" / revision

    def fetch(*names: str) -> None:
        if not sys.stderr.isatty():  # its bars would fill a log
            disable_progress_bars()
        with _hub_errors(where):
            # Brackets would be patterns.
            patterns = [re.sub(r"([*?[])", r"[\1]", each) for each in names]
            hub.snapshot_download(
                name, repo_type="dataset", revision=revision, cache_dir=cache, allow_patterns=patterns
            )

    known = partial(hub.get_cached_repo_tree, name, repo_type="dataset", revision=revision, cache_dir=cache)
    try:
        tree = known()
    except CachedRepoTreeNotFoundError:
        fetch(README)  # the list of all files comes with it
        with _hub_errors(where):
            tree = known()
    names = [each.path for each in tree if not is_hidden(each.path)]
    chosen = split_of_layout(names, config=config, split=split, where=where)
    missing = [each for each in chosen if not (snapshot / each).exists()]
    if missing:
        fetch(*chosen)
    for each in missing:
        _require_digest(snapshot / each, where=f"{where}: {each}")
    return SplitFiles(files=[file for each in chosen for file in find_files(str(snapshot / each), folder)])


@contextmanager
def _hub_errors(where: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except (errors.RepositoryNotFoundError, errors.HFValidationError, errors.RevisionNotFoundError) as fault:
        raise RunFileError(
            f"data.options.name: {where}: the hub has no such dataset or no such commit of it, or asks you to log in; "
            "correct name and revision, or accept its terms on the hub and run hf auth login"
        ) from fault
    except (errors.EntryNotFoundError, OSError) as fault:
        said = abridged(str(fault).splitlines()[0])
        raise SourceError(
            f"data.options.name: {where}: cannot be downloaded ({said}); check the connection and HF_ENDPOINT, or let "
            "data.options.path name a folder with a copy of the repository"
        ) from fault


def _require_digest(file: Path, *, where: str) -> None:
    """Compare a file that was just downloaded with its name in the cache, its sha256; delete it if it differs."""
    blob = file.resolve()
    if not _SHA256.fullmatch(blob.name):  # a small file that Git holds itself
        return
    with blob.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != blob.name:
        blob.unlink()
        raise DamagedInTransit(f"{where}: has sha256 {blob.name} on the hub, and {found} arrived; run again")


def features_of_schema(metadata: Mapping[bytes, bytes] | None, *, where: str) -> Mapping[str, Any] | None:
    """Return the features that the schema of a table has; None if the package `datasets` did not write it.

    Raises:
        SourceError: they cannot be read.
    """
    text = (metadata or {}).get(b"huggingface")
    if text is None:
        return None
    try:
        found = json.loads(text)["info"]["features"]
    except (KeyError, RecursionError, TypeError, ValueError) as fault:
        raise SourceError(f"{where}: the metadata 'huggingface' of its schema cannot be read ({fault!r})") from fault
    return found if isinstance(found, dict) else None


def hub_columns(features: Mapping[str, Any], *, where: str) -> dict[str, HubColumn]:
    """Return what the features say of each column; parts of a structure are columns with names such as `box.width`.

    Raises:
        SourceError: they cannot be read.
    """
    try:
        return {column: found for name, each in features.items() for column, found in _columns_of(name, each, ())}
    except (AttributeError, KeyError, IndexError, RecursionError, TypeError, ValueError) as fault:
        raise SourceError(f"{where}: the features of this dataset cannot be read ({fault!r}); save it again") from fault


def _columns_of(name: str, feature: Any, lists: tuple[int | None, ...]) -> Iterator[tuple[str, HubColumn]]:
    """Yield (name, column) of a feature; `lists` are the lengths of the lists around it, None if they differ."""
    if isinstance(feature, list):  # the older form of a list
        feature = {"_type": "List", "feature": feature[0]}
    kind = feature.get("_type")
    if not isinstance(kind, str):  # a structure
        for key, part in feature.items():
            yield from _columns_of(f"{name}.{key}", part, lists)
        return
    if kind in {"List", "LargeList", "Sequence"}:
        length = int(feature.get("length", -1))
        yield from _columns_of(name, feature["feature"], (*lists, length if length >= 0 else None))
        return
    own = tuple(feature["shape"]) if kind.startswith("Array") else ()
    lengths = (*lists, *own)
    shape = None if None in lengths else tuple(int(length) for length in lengths if length is not None)
    # A number of classes alone names none.
    classes = tuple(map(str, feature.get("names") or ())) if kind == "ClassLabel" else ()
    yield name, HubColumn(kind=kind, shape=shape, classes=classes)
