"""Finds the files of one split of a dataset, as the package `datasets` saves it and as the hub lays it out.

    save_to_disk   dataset_dict.json names the splits; in the folder of each, state.json lists files of Arrow, and
                   dataset_info.json has the features
    hub's layout   README.md says in its YAML which Parquet files form which split of which configuration; without
                   that, their names do: data/train-00000-of-00002.parquet

Only names and these small files are read. A folder that lacks some of its files is refused: fewer examples would be
another dataset.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.errors import RunFileError, SourceError
from tasks.foundation.messages import listed
from tasks.prepare_data.sources.source import suggestion
from tasks.prepare_data.sources.source_files import SourceFile, find_files, matches

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
_NO_CONFIG = "default"


class _SplitNames(Contract, title="list of splits"):
    """dataset_dict.json."""

    splits: tuple[str, ...] = Field(min_length=1)


class _DataFile(Contract):
    filename: str = Field(min_length=1)


class _State(Contract, title="state of a saved dataset"):
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
        path: the folder, as in the run file.
        folder: the run file's folder.
        config: the configuration, of the hub's layout; None: the one there is, or the default.
        split: its name.

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
    readme = front_matter(files[README].read(), str(files[README])) if README in files else {}
    chosen = split_of_layout(shown, readme, config=config, split=split, where=path)
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
    state = _State.from_json(state_file.read(), where=str(state_file), error=SourceError)
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


def front_matter(data: bytes, where: str) -> dict[str, Any]:
    """Return the YAML between the lines `---` at the beginning of a README.md.

    Raises:
        SourceError: it cannot be read.
    """
    try:
        lines = data.decode("utf-8-sig").splitlines()
        if not lines or lines[0].rstrip() != "---":
            return {}
        end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
        found = yaml.safe_load("\n".join(lines[1:end])) or {}
    except (yaml.YAMLError, RecursionError, ValueError) as fault:
        raise SourceError(f"{where}: the YAML at its beginning cannot be read: {fault}; correct it") from fault
    if not isinstance(found, dict):
        raise SourceError(f"{where}: the YAML at its beginning is not a mapping; correct it")
    return found


def split_of_layout(
    names: Sequence[str], readme: Mapping[str, Any], *, config: str | None, split: str, where: str
) -> list[str]:
    """Return the Parquet files of a split by the hub's conventions, in order.

    Args:
        names: all files of the repository, relative to it.
        readme: the YAML of its README.md.
        config: the configuration; None: the one there is, or the default.
        split: its name.
        where: the repository, for messages.

    Raises:
        RunFileError: there is no such split or configuration.
        SourceError: its files are no Parquet files, or one of them is missing.
    """
    names = sorted(names)
    configs = _configs(readme, where)
    if configs:
        splits = _splits_of_config(_chosen_config(configs, config, where), names, where)
    else:  # as in the branch refs/convert/parquet, a configuration is a folder
        splits = _splits_of_config({"data_dir": config}, names, where)
        if config is not None and not splits:
            folders = sorted({name.partition("/")[0] for name in names if "/" in name and name.endswith(_PARQUET)})
            raise RunFileError(
                f"data.options.config: {config!r}: {where} has no such folder, and no README.md that describes "
                f"configurations; {suggestion(config, folders)}"
            )
    if not splits:
        raise SourceError(
            f"{where}: is no saved dataset, and has no Parquet files but {listed(names) or 'nothing'}; "
            "name the folder that save_to_disk wrote, or a folder of Parquet files"
        )
    if split not in splits:
        raise RunFileError(f"data.options.split: {split!r}: {where} has no such split; {suggestion(split, splits)}")
    chosen = splits[split]
    others = [name for name in chosen if not name.endswith(_PARQUET)]
    if others or not chosen:
        what = f"has {listed(others)}" if others else "has no files"
        raise SourceError(
            f"{where}: the split {split!r} {what}, and this source reads Parquet files; convert it with "
            "dataset.to_parquet, or read it with another source"
        )
    _require_all_shards(chosen, names, where)
    return chosen


def _require_all_shards(chosen: Sequence[str], names: Sequence[str], where: str) -> None:
    """Refuse a copy without some of the numbered files of the split; README.md may leave some out."""
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


def _configs(readme: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    configs = readme.get("configs") or []
    if not isinstance(configs, list) or not all(
        isinstance(each, dict) and isinstance(each.get("config_name", _NO_CONFIG), str) for each in configs
    ):
        raise SourceError(f"{where}/{README}: configs is not a list of mappings with a config_name; correct it")
    return [each for each in configs if "data_files" in each or "data_dir" in each]


def _chosen_config(configs: Sequence[dict[str, Any]], config: str | None, where: str) -> dict[str, Any]:
    by_name = {each.get("config_name", _NO_CONFIG): each for each in configs}
    if config is not None:
        if config not in by_name:
            raise RunFileError(
                f"data.options.config: {config!r}: {where} has no such configuration; {suggestion(config, by_name)}"
            )
        return by_name[config]
    default = [each for each in configs if each.get("default") is True]
    if len(configs) == 1 or default:
        return (default or configs)[0]
    if _NO_CONFIG in by_name:
        return by_name[_NO_CONFIG]
    raise RunFileError(
        f"data.options.config is missing: {where} has several configurations; set one of {listed(sorted(by_name))}"
    )


def _splits_of_config(config: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, list[str]]:
    """Return the files of each split of a configuration of README.md."""
    folder = str(config.get("data_dir") or "").strip("/")
    below = f"{folder}/" if folder and folder != "." else ""
    listing = config.get("data_files")
    if listing is None:
        inside = [name for name in names if name.startswith(below) and name.endswith(_PARQUET)]
        return {
            split: [below + name for name in found]
            for split, found in _splits_by_names([name.removeprefix(below) for name in inside]).items()
        }
    splits: dict[str, list[str]] = {}
    for split, pattern in _patterns(listing, where):
        parts = (below + pattern.removeprefix("./")).split("/")
        found = [name for name in names if matches(name.split("/"), parts) or name.startswith("/".join(parts) + "/")]
        if not found:
            raise SourceError(
                f"{where}/{README}: the split {split!r} consists of {pattern!r}, and no file has such a name; copy "
                "the whole repository, or correct it"
            )
        splits[split] = list(dict.fromkeys([*splits.get(split, []), *found]))
    return splits


def _patterns(listing: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield (split, pattern) of `data_files`: a pattern, or a list of them, or of those of each split."""
    each: Any
    for each in listing if isinstance(listing, list) else [listing]:
        one: dict[str, Any] = each if isinstance(each, dict) else {"split": "train", "path": each}
        split, path = one.get("split"), one.get("path")
        paths: list[Any] = path if isinstance(path, list) else [path]
        if not isinstance(split, str) or not paths or not all(isinstance(part, str) and part for part in paths):
            raise SourceError(f"{where}/{README}: data_files has {each!r}; write a split and a path")
        if any("://" in part for part in paths):
            raise SourceError(
                f"{where}/{README}: data_files has {each!r}, which is not in this repository; download these files, "
                "and read them with the source table"
            )
        yield from ((split, part) for part in paths)


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
