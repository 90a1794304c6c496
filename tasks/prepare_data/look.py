"""What lies at a path: which source reads it, with which options, and what its examples are.

The names of the files say which source it is. Its own code reads them, for a few seconds: the columns with their types,
then examples with every check of a preparation. So what is found here trains, and what training would refuse is refused
here, before a run file is written.
"""

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import CLASSES, ExtremeValue, Feature
from baton.tasks.foundation.errors import InvalidInput, RunFileError, SourceError
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.foundation.text import counted, listed, message
from baton.tasks.prepare_data.example_checks import Checker
from baton.tasks.prepare_data.look_tables import FILLED_TEXT, SeenTable, look_at_tables
from baton.tasks.prepare_data.sources.hub_layouts import README, SplitFiles, find_split
from baton.tasks.prepare_data.sources.huggingface import columns_of_split
from baton.tasks.prepare_data.sources.image_folders import MOST_IMAGE_BYTES, common_size
from baton.tasks.prepare_data.sources.npz_arrays import arrays_of
from baton.tasks.prepare_data.sources.registry import open_source
from baton.tasks.prepare_data.sources.source import Source, suggestion
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files
from baton.tasks.prepare_data.sources.table_files import SUFFIXES
from baton.tasks.prepare_data.sources.tar_files import describe_tars
from baton.tasks.prepare_data.sources.tfds_folders import describe_folder
from baton.tasks.prepare_data.sources.tfrecord_files import (
    RecordMismatch,
    features_of_record,
    first_record,
    record_position,
)

X, Y = "x", "y"
# Reading ends after both.
_SECONDS, _EXAMPLES = 3.0, 1000
# What Keras calls the layers of the written model.
_LAYERS = {"batch_normalization", "concatenate", "dense", "dropout", "embedding", "flatten", "gru", "reshape", "x", "y"}
_NOT_CHOSEN = "left out: add it to x"
_UNKNOWN_SIZE = [224, 224]  # of images that differ in size, and are not looked at
_IMAGES = 32  # are decoded to choose a size
# Names that a label usually has; of `image/class/label`, the last part counts.
_LABELS = ("y", "label", "labels", "target", "targets", "class", "cls", "category", "species")
_MOST_CLASSES: Final = 100  # more integers than these, without names, are an amount


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
    """A column, an array or a feature of the files, as they have it.

    Attributes:
        name: its name.
        type: its type, as `float64`, `image`, `uint8[28, 28]`.
        use: x, y, or why it is neither.
        nulls: how many of its values are missing; None: the files do not say.
    """

    name: str
    type: str
    use: str
    nulls: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The source that reads some files, its options, and what it sees in them."""

    source: str
    options: dict[str, Any]
    columns: tuple[FoundColumn, ...] = ()
    examples: int | None = None  # as the files say; None: reading tells
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)  # validation, test -> the options of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lies at a path.

    Attributes:
        plan: how the run file names it.
        features: of an example, as the model gets them.
        examples: how many there are, or were read.
        is_whole: whether all were counted; if not, there are more.
        class_names: of the labels; empty: the source has none.
        extremes: of integers, and of labels that are one number, among the examples that were read.
        notes: which files are not read.
    """

    plan: Plan
    features: tuple[Feature, ...]
    examples: int
    is_whole: bool
    class_names: tuple[str, ...]
    extremes: tuple[ExtremeValue, ...]
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The features for x."""
        return tuple(each for each in self.features if each.name[0] == X)

    @property
    def label(self) -> Feature:
        """The feature for y."""
        return next(each for each in self.features if each.name == Y)

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The smallest and the largest label that was read; None if it is not one number."""
        values = [each.value for each in self.extremes if each.feature == Y]
        return (min(values), max(values)) if values else None

    @property
    def classes(self) -> int | None:
        """How many classes the labels have; None if they are amounts, or truth values."""
        label, span = self.label, self.label_range
        if names := self.class_names or label.vocabulary:
            return len(names)
        if not label.dtype.startswith(("int", "uint")) or span is None or span[0] < 0 or span[1] >= _MOST_CLASSES:
            return None
        return int(span[1]) + 1


def look(path: str, label: str | None = None) -> Found:
    """Find the source that reads the files at a path, choose its options, and read some of its examples.

    Args:
        path: a file, a folder, a pattern or an address, as `data.options.path`; relative to the working folder.
        label: the column for y; None: the one that is named like a label.

    Raises:
        InvalidInput: no source reads such files, there is no such column, or none that a model could learn from.
        SourceError: there are no files, or their content is refused by the source.
    """
    try:
        files = [file for file in find_files(path, Path.cwd()) if not _is_hidden(file.relative)]
    except SourceError as fault:
        raise SourceError(str(fault).replace("data.options.path", "--data")) from fault
    form = _form_of(path, files)
    if form in _WITH_SPLITS:
        plan = _FORMS[form](path, files, label)
    else:
        files = [file for file in files if _form_of_name(file.name) == form]
        plan = _with_sets(path, files, lambda at, some: _FORMS[form](at, some, label))
    data = DataSpec(source=plan.source, options=plan.options)
    return _read(plan, data)


def _is_hidden(relative: str) -> bool:
    return any(part.startswith((".", "_")) for part in relative.split("/"))


# Files that describe a dataset with splits -> its form.
_DESCRIBED = {"features.json": "tfds", "dataset_dict.json": "huggingface", "state.json": "huggingface"}
_WITH_SPLITS = frozenset(_DESCRIBED.values())
_SUFFIXES = {
    **dict.fromkeys(SUFFIXES, "table"),
    ".npz": "npz",
    ".jpg": "images",
    ".jpeg": "images",
    ".png": "images",
    ".tar": "tar",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".txt": "text",
    ".md": "text",
    ".py": "text",
}


def _form_of(path: str, files: Sequence[SourceFile]) -> str:
    """Return the form that most of the files have.

    Raises:
        InvalidInput: no source reads them.
    """
    names = {file.name for file in files}
    described = next((form for name, form in _DESCRIBED.items() if name in names), None)
    if README in names and any(name.endswith(".parquet") for name in names):  # the hub's layout
        described = "huggingface"
    if described is not None:
        return described
    forms = Counter(form for file in files if (form := _form_of_name(file.name)))
    if not forms:
        some = listed([file.name for file in files[:3]]) or "hidden files"
        raise InvalidInput(
            message(
                f"--data {path}: it has {some}, which no source reads",
                hints=[
                    f"name files, or a folder of files, that end with {', '.join(_SUFFIXES)}",
                    "or read them yourself, in data.py:load: baton init writes one to change",
                ],
            )
        )
    if len(forms) > 1:
        forms.pop("text", None)  # a README, a license
    return forms.most_common(1)[0][0]


def _form_of_name(name: str) -> str | None:
    lower = name.lower()
    found = next((form for suffix, form in _SUFFIXES.items() if lower.endswith(suffix)), None)
    return "tfrecord" if found is None and ".tfrecord" in lower else found  # mnist-train.tfrecord-00000-of-00010


_SETS = {
    "train": re.compile(r"train(ing)?(?=[-_.0-9]|$)"),
    "validation": re.compile(r"(val|valid|validation|dev)(?=[-_.0-9]|$)"),
    "test": re.compile(r"test(?=[-_.0-9]|$)"),
}
_Planned = Callable[[str, Sequence[SourceFile]], Plan]


def _with_sets(path: str, files: Sequence[SourceFile], plan: _Planned) -> Plan:
    """Plan the training files; those that are for validation and test by their names are sets of their own."""
    of_set: dict[str, list[SourceFile]] = {}
    for file in files:
        first = file.relative.split("/")[0]
        name = next((name for name, words in _SETS.items() if words.match(first.lower())), "")
        of_set.setdefault(name, []).append(file)
    if "" in of_set or "train" not in of_set or len(of_set) == 1:
        return plan(path, files)
    paths = {name: _path_of_set(path, some) for name, some in of_set.items()}
    train = plan(paths["train"], of_set["train"])
    own = {name: {**train.options, "path": at} for name, at in paths.items() if name != "train"}
    return replace(train, sets={**train.sets, **own})


def _path_of_set(path: str, files: Sequence[SourceFile]) -> str:
    """Return the path of the files: that of their folder, or a pattern."""
    folder, below, _ = files[0].relative.partition("/")
    if below:
        return f"{path.rstrip('/')}/{folder}"
    if len(files) == 1:
        return f"{path.rstrip('/')}/{files[0].name}"
    start = re.match(r"[A-Za-z]+", folder)
    return f"{path.rstrip('/')}/{start[0] if start else ''}*"


def _npz(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    arrays = arrays_of(files[0])
    # As the files of Keras have them: x_train, y_train, x_test, y_test.
    short = {name: name.removesuffix("_train") for name in arrays if not name.endswith("_test")}
    y = _label_of(list(short), label, short=short)
    x = max((name for name in short if name != y), key=lambda name: len(arrays[name][1]))  # images rather than weights
    test = {key: f"{short[name]}_test" for key, name in ((X, x), (Y, y))}
    has_test = set(test.values()) <= arrays.keys()
    uses = {x: X, y: Y, **({test[X]: "x of the test set", test[Y]: "y of the test set"} if has_test else {})}
    return Plan(
        source="npz",
        options={"path": path, X: x, Y: y},
        columns=tuple(
            FoundColumn(name=name, type=f"{dtype}{list(shape[1:])}", use=uses.get(name, "left out: x is one array"))
            for name, (dtype, shape) in arrays.items()
        ),
        sets={"test": {"path": path, **test}} if has_test else {},
    )


def _images(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    if label is not None:
        raise InvalidInput(f"--label {label}: the label of an image is its folder; remove --label")
    # Some of each class: they are sorted by it.
    some = files[:: max(1, len(files) // _IMAGES)]
    try:
        height, width, channels = common_size(file.read(MOST_IMAGE_BYTES) for file in some)
    except ValueError as fault:
        raise SourceError(f"{some[0]} {fault}; save images as JPEG or PNG") from fault
    return Plan(source="images", options={"path": path, "size": [height, width], "channels": channels})


def _text(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    if label is not None:
        raise InvalidInput(f"--label {label}: the label of text is the byte that follows; remove --label")
    suffixes = {Path(file.name).suffix.lower() for file in files}
    return Plan(
        source="text", options={"path": path, "length": 64, "suffix": suffixes.pop() if len(suffixes) == 1 else ""}
    )


def _table(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    files = [file for file in files if file.name.lower().endswith(tuple(SUFFIXES))] or files
    return _of_table("table", {"path": path}, look_at_tables(files), label)


def _of_table(source: str, options: Mapping[str, Any], seen: SeenTable, label: str | None) -> Plan:
    """Return the plan for a table: which columns are x and y, and what they need."""
    usable = {each.name: each for each in seen.columns if not each.problem}
    uses = _uses({name: each.kind for name, each in usable.items()}, label)
    used = [each for each in seen.columns if each.name in uses]
    x, y = ([each for each in used if uses[each.name] == part] for part in (X, Y))
    if y[0].nulls:
        rows = counted(y[0].nulls, "row")
        raise InvalidInput(f"--data: {y[0].name} is null in {rows}; remove them, or name another label: --label NAME")
    stacked = len(x) > 1 and all(each.is_single for each in x)
    fills = {each.name: FILLED_TEXT if each.kind in {"category", "text"} else 0 for each in x if each.nulls}
    sizes = [each.size for each in used if each.size is not None]
    more = {
        X: [each.name for each in x] if stacked else _named([each.name for each in x]),
        Y: y[0].name,
        "stack": stacked or None,
        "fill": (0 if stacked else fills) if fills else None,
        "vocabulary": {each.name: list(each.texts) for each in used if each.texts} or None,
        "shapes": {each.name: list(each.shape) for each in used if each.shape} or None,
        "size": list(sizes[0][:2]) if sizes else None,
        "channels": 1 if sizes and sizes[0][2] == 1 else None,
    }
    columns = [
        FoundColumn(
            name=each.name,
            type=each.type,
            nulls=each.nulls,
            use=f"left out: it {each.problem}" if each.problem else uses.get(each.name, _NOT_CHOSEN),
        )
        for each in seen.columns
    ]
    given = {**seen.options, **{key: value for key, value in more.items() if value is not None}}
    return Plan(source=source, options={**options, **given}, columns=tuple(columns), examples=seen.rows)


def _huggingface(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    del files  # those of a split are found by what the folder says of itself
    found: dict[str, SplitFiles] = {}
    for split in _SETS:
        with contextlib.suppress(RunFileError):
            found[split] = find_split(path, Path.cwd(), config=None, split=split)
    if not found:
        found["train"] = find_split(path, Path.cwd(), config=None, split="train")  # its error names the splits
    first = next(iter(found.values()))
    columns = columns_of_split(first)
    seen = look_at_tables(first.files, {name: each.shape for name, each in columns.items() if each.shape})
    # A structure of an image's bytes and path is the image.
    images = {f"{name}.bytes": name for name, each in columns.items() if each.kind == "Image" and each.shape == ()}
    paths = {f"{name}.path" for name in images.values()}
    renamed = [replace(each, name=images.get(each.name, each.name)) for each in seen.columns if each.name not in paths]
    plan = _of_table("huggingface", {"path": path}, replace(seen, columns=tuple(renamed)), label)
    chosen = _of_splits("huggingface", plan.options, plan.columns, list(found))
    return replace(chosen, examples=plan.examples)


def _tar(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    known, size = describe_tars(files, path=path)
    uses = _uses({key: _kind(each) for key, each in known.items() if isinstance(each, Feature)}, label)
    columns = [
        FoundColumn(
            name=key,
            type=_type(each) if isinstance(each, Feature) else "",
            use=uses.get(key, _NOT_CHOSEN) if isinstance(each, Feature) else f"left out: it {each}",
        )
        for key, each in known.items()
    ]
    options = {"path": path, **_parts(uses)}
    if any(_is_image(known[key]) for key in uses):
        options |= {"size": list(size[:2]), **({"channels": 1} if size[2] == 1 else {})}
    return Plan(source="tar", options=options, columns=tuple(columns))


def _tfds(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    known, supervised, splits = describe_folder(path, files, None)
    sized, *_ = describe_folder(path, files, _UNKNOWN_SIZE)
    features = {key: each for key, each in [*sized.items(), *known.items()] if isinstance(each, Feature)}
    options: dict[str, Any] = {"path": path}
    if label is None and len(supervised) > 1 and set(supervised) <= features.keys():
        uses = {supervised[0]: X, supervised[1]: Y}  # the source's own choice
    else:
        uses = _uses({key: _kind(each) for key, each in features.items()}, label)
        options |= _parts(uses)
    if any(isinstance(known[key], str) for key in uses):
        options["size"] = _UNKNOWN_SIZE
    columns = [
        FoundColumn(
            name=key,
            type=_type(features[key]) if key in features else "",
            use=uses.get(key, _NOT_CHOSEN) if key in features else f"left out: it {each}",
        )
        for key, each in known.items()
    ]
    return _of_splits("tfds", options, columns, splits)


def _of_splits(source: str, options: Mapping[str, Any], columns: Sequence[FoundColumn], splits: Sequence[str]) -> Plan:
    """Return a plan that trains on the split for it, and evaluates on those for validation and test."""
    named = {name: split for split in reversed(splits) for name, words in _SETS.items() if words.match(split)}
    train = named.pop("train", splits[0] if splits else "train")
    return Plan(
        source=source,
        options={**options, "split": train},
        columns=tuple(columns),
        sets={name: {**options, "split": split} for name, split in named.items() if split != train},
    )


def _tfrecord(path: str, files: Sequence[SourceFile], label: str | None) -> Plan:
    compressed = any(file.name.endswith(".gz") for file in files)
    file, record = first_record(files, path=path, compressed=compressed)
    try:
        described = features_of_record(record.data)
    except RecordMismatch as mismatch:
        raise SourceError(f"{record_position(file.uri, record)}: {mismatch.problem}") from mismatch
    specs = {name: spec for name, spec in described.items() if spec is not None}
    uses = _uses({name: "image" if spec.encoding == "image" else "number" for name, spec in specs.items()}, label)
    columns = [
        FoundColumn(
            name=name,
            type="bytes" if spec is None else f"{'image ' * (spec.encoding == 'image')}{spec.dtype}{spec.shape}",
            use="left out: neither numbers nor an image" if spec is None else uses.get(name, _NOT_CHOSEN),
        )
        for name, spec in described.items()
    ]
    options = {
        "path": path,
        "features": {name: specs[name].model_dump(exclude_defaults=True) for name in uses},
        **_parts(uses),
        **({"copy": True} if compressed else {}),
    }
    return Plan(source="tfrecord", options=options, columns=tuple(columns))


_FORMS: dict[str, Callable[[str, Sequence[SourceFile], str | None], Plan]] = {
    "images": _images,
    "npz": _npz,
    "huggingface": _huggingface,
    "tar": _tar,
    "table": _table,
    "text": _text,
    "tfds": _tfds,
    "tfrecord": _tfrecord,
}


def _label_of(names: Sequence[str], label: str | None, *, short: Mapping[str, str] | None = None) -> str:
    """Return the column for y; `short` has what to compare with names of labels.

    Raises:
        InvalidInput: there is no column of this name, no other one, or none that is named like a label.
    """
    if label is not None:
        if label not in names:
            raise InvalidInput(f"--label {label}: there is no such column; {suggestion(label, names)}")
    else:
        last = {name: (short or {}).get(name, name).rpartition("/")[2].rpartition(".")[2].lower() for name in names}
        label = next((name for word in _LABELS for name in names if last[name] == word), None)
    if label is None:
        raise InvalidInput(f"--data: no column is named like a label; say which one is y: --label {' or '.join(names)}")
    if len(names) == 1:
        raise InvalidInput(f"--data: {label} is the only column; x needs another one")
    return label


def _uses(kinds: Mapping[str, str], label: str | None) -> dict[str, str]:
    """Return what columns are for, x or y; those that are left out are missing.

    Args:
        kinds: image, number, category or text, by column. Images alone are x if there are some, else numbers and
            categories, else texts.
        label: as the user says.

    Raises:
        InvalidInput: see `_label_of`.
    """
    y = _label_of(list(kinds), label)
    others = {name: kind for name, kind in kinds.items() if name != y}
    kind = next(kind for kind in ("image", "number", "category", "text") if kind in others.values())
    chosen = {"number", "category"} if kind == "number" else {kind}
    return {name: Y if name == y else X for name in kinds if name == y or others[name] in chosen}


def _parts(uses: Mapping[str, str]) -> dict[str, Any]:
    """Return the options x and y: one column alone, or each as an input of its own name."""
    x = [name for name, use in uses.items() if use == X]
    named = _named(x)
    return {
        X: {name: name for name in named} if isinstance(named, list) else named,
        Y: next(name for name, use in uses.items() if use == Y),
    }


def _named(columns: Sequence[str]) -> str | list[str] | dict[str, str]:
    """Return x: one column alone, or each as an input of its own name; the model's layers have other names."""
    if len(columns) == 1:
        return columns[0]
    names = {re.sub(r"\W", "_", each) + "_" * (each in _LAYERS): each for each in columns}
    return list(columns) if list(names) == list(columns) else names


def _is_image(feature: Feature | str) -> bool:
    return isinstance(feature, Feature) and feature.encoding == "image"


def _kind(feature: Feature) -> str:
    return {"image": "image", "text": "text"}.get(feature.encoding, "number")


def _type(feature: Feature) -> str:
    return f"{'image ' * (feature.encoding == 'image')}{feature.dtype}{list(feature.shape)}"


def _read(plan: Plan, data: DataSpec) -> Found:
    """Read examples for a few seconds, each with the checks of a preparation."""
    notes: list[Note] = []
    source = open_source(data, Path.cwd(), note=notes.append)
    checker = Checker(data, source.vocabularies)
    began = time.monotonic()
    examples, is_whole = 0, True
    for count in _counts(source, checker):
        examples += count
        if examples >= _EXAMPLES and time.monotonic() - began > _SECONDS:
            is_whole = False
            break
    if not examples:
        raise SourceError(f"--data {plan.options['path']}: it has no examples")
    features = checker.features if source.in_place is None else source.in_place.features
    known = source.length if plan.examples is None else plan.examples
    return Found(
        plan=plan,
        features=features,
        examples=examples if known is None else known,
        is_whole=is_whole or known is not None,
        class_names=tuple(json.loads(source.origin.get(CLASSES, "[]"))),
        extremes=checker.extremes,
        notes=tuple(note.text.removeprefix("data.options.path: ") for note in notes),
    )


def _counts(source: Source, checker: Checker) -> Iterator[int]:
    """Yield how many examples were read and checked, again and again."""
    if source.in_place is not None:
        for each in source.in_place.ranges(checker, None):
            yield each.records
        return
    with source.surroundings():
        for where, example in source.read():
            checker.check(where, example)
            yield 1
