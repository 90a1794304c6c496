"""Finds the files of one split of a dataset, as the package `datasets` saves it and as the hub lays it out.

    save_to_disk   dataset_dict.json names the splits; in the folder of each, state.json lists files of Arrow, and
                   dataset_info.json has the features
    hub's layout   the names of Parquet files say of which split they are: data/train-00000-of-00002.parquet; a
                   configuration is a folder

Only names and these small files are read. A folder that lacks some of its files is refused: fewer examples would be
another dataset.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.foundation.text import listed
from baton.tasks.prepare_data.sources.source import suggestion
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files

_DICT, _STATE, _INFO, README = "dataset_dict.json", "state.json", "dataset_info.json", "README.md"
_PARQUET = ".parquet"
# data/train-00000-of-00002.parquet, or with a digest before the suffix.
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
# What names of files and folders call the usual splits.
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_WORDS = re.compile(r"[^-._ 0-9]+")


class _SplitNames(Contract, title="list of splits"):
    """dataset_dict.json."""

    splits: tuple[str, ...] = Field(min_length=1)


class _DataFile(Contract):
    filename: str = Field(min_length=1)


class _StateFile(Contract, title="state of a saved dataset"):
    """state.json."""

    data_files: tuple[_DataFile, ...] = Field(alias="_data_files", min_length=1)
    split: str | None = Field(default=None, alias="_split")
    # Of versions before 2: a selection or an order of the rows, in a file of its own.
    indices: tuple[_DataFile, ...] | None = Field(default=None, alias="_indices_data_files")
    older_indices: tuple[_DataFile, ...] | None = Field(default=None, alias="_indices_files")


class _Info(Contract, title="description of a dataset"):
    """dataset_info.json."""

    features: dict[str, Any] = Field(min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFiles:
    """The files of one split, in their order."""

    files: list[SourceFile]
    features: Mapping[str, Any] | None = None  # of the columns, as dataset_info.json has them; None: the files do


def find_split(path: str, folder: Path, *, config: str | None, split: str) -> SplitFiles:
    """Find the files of a split in a folder.

    Args:
        config: the configuration, a folder of the hub's layout; None: there is one.

    Raises:
        RunFileError: there is no such split or configuration.
        SourceError: the folder has neither form, a file is missing or cannot be read, or the dataset cannot be used.
    """
    files = {file.relative: file for file in find_files(path, folder)}
    if _DICT in files:
        splits = _SplitNames.from_json(files[_DICT].read(), where=str(files[_DICT]), error=SourceError).splits
        _require_no_config(config, str(files[_DICT]))
        if split not in splits:
            raise RunFileError(
                f"data.options.split: {split!r}: {files[_DICT]} has no such split; {suggestion(split, splits)}"
            )
        return _saved(files, f"{split}/", split=None, where=f"{path.rstrip('/')}/{split}")
    if _STATE in files:
        _require_no_config(config, str(files[_STATE]))
        return _saved(files, "", split=split, where=path)
    shown = [name for name in files if not is_hidden(name)]
    chosen = split_of_layout(shown, config=config, split=split, where=path)
    return SplitFiles(files=[files[name] for name in chosen])


def _require_no_config(config: str | None, where: str) -> None:
    if config is not None:
        raise RunFileError(
            f"data.options.config: {config!r}: {where} is of a saved dataset, which has no configurations; remove it"
        )


def _saved(files: Mapping[str, SourceFile], below: str, *, split: str | None, where: str) -> SplitFiles:
    """Return the files of a dataset that `save_to_disk` wrote; `split`: it is of a single one, and must be this."""
    state_file = files.get(below + _STATE)
    if state_file is None:
        raise SourceError(f"{where}: has no {_STATE}; copy the whole folder that save_to_disk wrote")
    state = _StateFile.from_json(state_file.read(), where=str(state_file), error=SourceError)
    if state.indices or state.older_indices:
        raise SourceError(
            f"{state_file}: the rows have an order or a selection of their own (an indices mapping); save "
            "dataset.flatten_indices() instead"
        )
    if split is not None and state.split not in {None, split}:
        raise RunFileError(f"data.options.split: {split!r}: {state_file} is of the split {state.split!r}; set that")
    names = [below + each.filename for each in state.data_files]
    for name in names:
        if name not in files:
            raise SourceError(
                f"{state_file}: lists {name.removeprefix(below)!r}, which is not in this folder; copy the whole folder "
                "that save_to_disk wrote, or save the dataset again"
            )
    info_file = files.get(below + _INFO)
    if info_file is None:
        raise SourceError(f"{where}: has no {_INFO}; copy the whole folder that save_to_disk wrote")
    info = _Info.from_json(info_file.read(), where=str(info_file), error=SourceError)
    return SplitFiles(files=[files[name] for name in names], features=info.features)


def is_hidden(name: str) -> bool:
    """Whether a file of a repository is not part of its data, by its name."""
    return any(part.startswith((".", "__")) for part in name.split("/"))


def split_of_layout(names: Sequence[str], *, config: str | None, split: str, where: str) -> list[str]:
    """Return the Parquet files of a split by the hub's names of files and folders, in order.

    Args:
        names: all files of the repository, relative to it.
        config: the configuration, which is a folder; None: there is one.
        where: the repository, for messages.

    Raises:
        RunFileError: there is no such split or configuration, or there are several.
        SourceError: it has no Parquet files, or one of them is missing.
    """
    tables = [name for name in sorted(names) if name.lower().endswith(_PARQUET)]
    below = "" if config is None else f"{config}/"
    inside = [name.removeprefix(below) for name in tables if name.startswith(below)]
    if not inside and config is not None:
        folders = sorted({name.partition("/")[0] for name in tables or names if "/" in name})
        raise RunFileError(
            f"data.options.config: {config!r}: {where} has no such folder of Parquet files; "
            f"{suggestion(config, folders)}"
        )
    if not inside:
        raise SourceError(
            f"{where}: is no saved dataset, and has no Parquet files but {listed(sorted(names)) or 'nothing'}; "
            "name the folder that save_to_disk wrote, or a folder of Parquet files"
        )
    splits = _splits_by_names(inside)
    if split not in splits:
        raise RunFileError(f"data.options.split: {split!r}: {where} has no such split; {suggestion(split, splits)}")
    words = _SPLIT_WORDS.get(split, {split})
    folders = sorted({name.partition("/")[0] for name in splits[split] if "/" in name})
    others = [folder for folder in folders if "=" not in folder and not words & set(_WORDS.findall(folder))]
    if config is None and len(others) > 1:
        raise RunFileError(
            f"data.options.config is missing: {where} has the split {split!r} in several folders; set one of "
            f"{listed(others)}, or read them all with the source table"
        )
    chosen = [below + name for name in splits[split]]
    _require_all_shards(chosen, tables, where)
    return chosen


def _require_all_shards(chosen: Sequence[str], names: Sequence[str], where: str) -> None:
    """Refuse a copy without some of the numbered files of the split."""
    shards = [found for name in names if (found := _SHARD.fullmatch(name))]
    used = {(found[1], found[3]) for found in shards if found[0] in chosen}
    for before, count in sorted(used):
        indices = {int(found[2]) for found in shards if (found[1], found[3]) == (before, count)}
        missing = next((index for index in range(int(count)) if index not in indices), None)
        if missing is not None:
            raise SourceError(
                f"{where}: {before}-{missing:05d}-of-{count} is missing: there are {len(indices)} of {int(count)} such "
                "files; copy the others too"
            )


def _splits_by_names(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split as their names say; if none does, all are of `train`."""
    splits: dict[str, list[str]] = {}
    shards = [name for name in names if name.startswith("data/") and _SHARD.fullmatch(name)]
    for name in shards:
        found = _SHARD.fullmatch(name)
        splits.setdefault(found[1].rpartition("/")[2] if found else "", []).append(name)
    if splits:
        return splits
    for by_folder in (True, False):
        for name in names:
            above, _, last = name.rpartition("/")
            words = set(_WORDS.findall(above.replace("/", " ") if by_folder else last))
            for split, known in _SPLIT_WORDS.items():
                if words & known:
                    splits.setdefault(split, []).append(name)
        if splits:
            return splits
    return {"train": list(names)} if names else {}
