"""Loads initial weights into a new model and reports on every variable: reads and matches all, then assigns.

A source is a file, a checkpoint, the folder of a preset, or a user's function (`weights.py:load`) that returns arrays
by variable path.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import keras

from baton.tasks.foundation.contracts.checkpoint import SourceReport, WeightsReport
from baton.tasks.foundation.contracts.run_spec import InitSpec, WeightsSource
from baton.tasks.foundation.errors import FileMissing, ModelError, StorageError, WeightsError
from baton.tasks.foundation.model.build import preserved_global_state
from baton.tasks.foundation.model.variables import Leaf, named_layers, own_values, values_in_file
from baton.tasks.foundation.seeding import seed_as_after_import
from baton.tasks.foundation.state.digest import digest_of
from baton.tasks.foundation.state.train_state import TrainState
from baton.tasks.foundation.storage.interface import require_inside
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.telemetry.events import Note, Sink
from baton.tasks.foundation.text import abridged, counted, message
from baton.tasks.foundation.user_functions import load_function
from baton.tasks.foundation.user_traceback import user_error
from baton.tasks.init_or_restore.weights.location import (
    KIND_NAMES,
    PRESET_CONFIG,
    PRESET_WEIGHTS,
    WeightsLocation,
    locate_weights,
)
from baton.tasks.init_or_restore.weights.matching import (
    Array,
    Matching,
    SourceContents,
    SourceVariable,
    TargetVariable,
    as_array,
    match,
    with_unique_names,
)
from baton.tasks.init_or_restore.weights.weight_files import read_checkpoint, read_hdf5, read_run_weights

_SHOWN = 4
_MODEL = "model/"
_RAW = "variables/"
# With LoRA a layer saves the sum of this variable and the adapters in the variable's place.
_ADAPTED = frozenset({"kernel", "embeddings"})
_TASK_WEIGHTS = "task.weights.h5"
_BY_POSITION = "layers were matched by position, as model.load_weights does, because their names differ"


def call_weights_function(reference: str, code_folder: Path, *, seed: int = 0) -> SourceContents:
    """Call the user's function, without arguments.

    Args:
        reference: `weights.py:load` or `package.module:load`.
        seed: `train.seed`; random numbers that module and function draw derive from it.

    Raises:
        WeightsError: there is no such function, it raises, or does not return a mapping from names to arrays.
    """
    where = f"init.weights: {reference}"
    remedy = "return a dict of arrays by variable path, such as {'dense/kernel': …}"
    try:
        function = load_function(reference, code_folder, seed=seed, key="init.weights")
    except ModelError as fault:
        raise WeightsError(str(fault)) from fault
    try:
        with preserved_global_state():
            seed_as_after_import(reference.partition(":")[0], code_folder, seed)
            values = function()
    except (Exception, SystemExit) as fault:
        raise WeightsError(user_error(f"{where} raised", fault)) from fault
    if not isinstance(values, Mapping):
        raise WeightsError(f"{where} returned {type(values).__name__}; {remedy}")
    found = []
    for name, value in values.items():
        array = as_array(value)
        if not isinstance(name, str) or array.dtype.kind in "OSU":
            raise WeightsError(f"{where} returned {name!r}: {type(value).__name__}; {remedy}")
        found.append(SourceVariable((name,), array))
    return SourceContents(variables=tuple(found), ignored=0, place=reference)


def report_notes(report: WeightsReport) -> Iterator[tuple[str, bool]]:
    """Yield notes, each with whether it is a warning."""
    for source in report.sources:
        words = f"loaded {counted(len(source.loaded), 'variable')} from {source.place} ({source.kind})"
        if source.ignored:
            words += (
                f"; ignored {counted(source.ignored, 'entry', 'entries')} not of weights (optimizer, counters, metrics)"
            )
        if source.not_asked:
            words += f"; {counted(source.not_asked, 'variable')} of it were not selected"
        yield words, False
        for remark in source.remarks:
            yield f"{source.source}: {abridged(remark)}", True
        if source.cast:
            yield f"{source.source}: converted {_first_names(source.cast)}", False
        for label, names in _gaps(source):
            yield f"{source.source}: {label}: {_first_names(names)}", True
    if report.overlaid:
        yield f"in several sources, the last one is used: {_first_names(report.overlaid)}", False
    if report.left:
        yield f"not loaded, keep their initial values: {_first_names(report.left)}", True


def describe_mismatch(source: SourceReport) -> str:
    """Describe why a source is refused, with hints."""
    return message(
        f"init.weights: {source.source} ({source.kind}) does not fit the model",
        details=[f"{label}: {_first_names(names)}" for label, names in _gaps(source)],
        hints=[
            "match names with rename: {name in the model: name in the source}, or select with include: and exclude:",
            "or load only what fits, with strict: false",
        ],
    )


def _gaps(source: SourceReport) -> list[tuple[str, Sequence[str]]]:
    gaps = [
        ("missing in the source", source.missing),
        ("missing in the model", source.unused),
        ("with another shape or dtype", source.misfits),
    ]
    return [(label, names) for label, names in gaps if names]


def _first_names(names: Sequence[str]) -> str:
    """Return the number of names, and the first few."""
    shown = ", ".join(names[:_SHOWN])
    return f"{counted(len(names), 'variable')}: {shown}{', …' if len(names) > _SHOWN else ''}"


def load_weights(
    state: TrainState, init: InitSpec, *, code_folder: Path, telemetry: Sink, seed: int = 0
) -> WeightsReport | None:
    """Load the weights of `init.weights` into a new state; if several sources have a variable, the last one wins.

    Args:
        state: built, at step 0.
        init: the run file's `init`.
        telemetry: receives notes about what was loaded and what was not.
        seed: `train.seed`, for a user's function.

    Returns:
        What happened to each variable; None if there are no sources.

    Raises:
        WeightsError: a source is missing, unreadable or does not fit. Then nothing is assigned.
        DamagedCheckpoint: the checkpoint of another run is damaged.
    """
    if not init.weights:
        return None
    targets = {_name(leaf): leaf for leaf in state.leaves if _is_weight(leaf)}
    wanted = _target_variables(state.model, targets)
    reports: list[SourceReport] = []
    values: dict[str, Array] = {}
    overlaid: list[str] = []
    for source in init.weights:
        report, loaded = _of_source(source, state, targets, wanted, code_folder, seed=seed)
        overlaid += [path for path in loaded if path in values]
        values |= loaded
        reports.append(report)
    for path, value in values.items():
        _assign(targets[path], value)
    state.finalize()
    result = WeightsReport(
        sources=tuple(reports),
        left=tuple(path for path in targets if path not in values),
        overlaid=tuple(dict.fromkeys(overlaid)),
        digest=digest_of(values, values.__getitem__).root,
    )
    for text, warning in report_notes(result):
        telemetry.emit(Note(text=text, warning=warning))
    return result


def _of_source(
    source: WeightsSource,
    state: TrainState,
    targets: Mapping[str, Leaf],
    wanted: Sequence[TargetVariable],
    code_folder: Path,
    *,
    seed: int,
) -> tuple[SourceReport, Mapping[str, Array]]:
    location = locate_weights(source, code_folder)
    with temporary_folder("baton-weights-") as folder, state.accelerator.strategy.scope():
        contents = _read(location, source, folder, state, targets, seed=seed)
        if not contents.variables:
            raise WeightsError(f"init.weights: {source.source}: {contents.place} holds no weights")
        matching = match(wanted, contents.variables, source)
        remarks = [f"by the last parts of their names: {', '.join(matching.by_end)}"] if matching.by_end else []
        whole = source.include == ("*",) and not source.exclude and not source.rename
        if contents.by_position is not None and whole and not (matching.complete and not matching.by_end):
            found = contents.by_position() or {}
            if len(found) > len(matching.values) or (matching.by_end and len(found) == len(matching.values)):
                matching = match(wanted, [SourceVariable((path,), value) for path, value in found.items()], source)
                remarks = [_BY_POSITION]
    report = _report(source, location, contents, matching, remarks)
    if source.strict and not matching.complete:
        raise WeightsError(describe_mismatch(report))
    return report, matching.values


def _read(
    location: WeightsLocation,
    source: WeightsSource,
    folder: Path,
    state: TrainState,
    targets: Mapping[str, Leaf],
    *,
    seed: int,
) -> SourceContents:
    match location.kind:
        case "function":
            return call_weights_function(location.name, Path(location.storage.uri), seed=seed)
        case "preset":
            return _read_preset(location, state, targets, folder)
        case "run":
            return read_run_weights(location.storage, source.step, folder)
        case "hdf5" | "keras":
            file = _local_files(location, [location.name], folder)
            by_position = partial(_load_by_position, state, targets, state.model)
            return read_hdf5(file / location.name, uri=location.uri, by_position=by_position)
        case _:
            above = location.name.rpartition("/")[0]
            files = [
                path
                for path in location.storage.files(above, deep=False)
                if path == f"{location.name}.index" or path.startswith(f"{location.name}.data-")
            ]
            return read_checkpoint(str(_local_files(location, files, folder) / location.name), uri=location.uri)


def _read_preset(
    location: WeightsLocation, state: TrainState, targets: Mapping[str, Leaf], folder: Path
) -> SourceContents:
    """Read the weights of the backbone, and those of the task's own layers if the preset has them.

    The backbone's file names layers from the backbone down. So their names get the path of the part of the model that
    is of the preset's class; a model that is made of the backbone's layers has them as they are.
    """
    names = [name for name in (PRESET_CONFIG, PRESET_WEIGHTS, _TASK_WEIGHTS) if location.storage.exists(name)]
    place = _local_files(location, names, folder)
    try:
        kind = json.loads((place / PRESET_CONFIG).read_bytes())["registered_name"]
    except (ValueError, KeyError, TypeError) as fault:
        raise WeightsError(
            f"init.weights: {location.uri}: {PRESET_CONFIG} is not that of a preset ({type(fault).__name__}: {fault}); "
            "save it again with save_to_preset"
        ) from fault
    found = [each for each in named_layers(state.model) if keras.saving.get_registered_name(type(each[1])) == kind]
    above, backbone = found[0] if len(found) == 1 else ("", state.model)
    by_position = partial(_load_by_position, state, targets, backbone)
    body = read_hdf5(place / PRESET_WEIGHTS, uri=location.uri, by_position=by_position)
    if above:
        below = [SourceVariable(tuple(f"{above}/{name}" for name in v.names), v.value) for v in body.variables]
        body = replace(body, variables=tuple(below))
    if _TASK_WEIGHTS not in names:
        return body
    head = read_hdf5(place / _TASK_WEIGHTS, uri=location.uri, by_position=by_position)
    variables = with_unique_names([*body.variables, *head.variables])
    return replace(body, variables=variables, ignored=body.ignored + head.ignored, by_position=None)


def _local_files(location: WeightsLocation, names: Iterable[str], folder: Path) -> Path:
    """Make these files available in a local folder."""
    for name in names:
        require_inside(name, root=location.uri)  # on Cloud Storage any text is a name, even ../..
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            local = location.storage.local_path(name)
            if local is None:
                if location.storage.download(name, target) != location.storage.stat(name):
                    raise StorageError(f"init.weights: {location.uri}: {name} changed during the download; run again")
            else:
                target.symlink_to(local)
        except FileMissing as fault:
            raise WeightsError(f"init.weights: {location.uri} was deleted meanwhile; restore it") from fault
    return folder


def _is_weight(leaf: Leaf) -> bool:
    """Whether a leaf is a weight; random states follow the seed, and optimizers and metrics hold no weights."""
    return leaf.path.startswith((_MODEL, _RAW)) and not leaf.seed


def _name(leaf: Leaf) -> str:
    return leaf.path.removeprefix(_MODEL)


def _target_variables(model: keras.Model, targets: Mapping[str, Leaf]) -> tuple[TargetVariable, ...]:
    """Return the model's variables with the names that Keras's files use.

    A variable's path has these names too, but misses enclosing models if its layer was built before them.
    """
    by_variable: dict[int, tuple[str, ...]] = {}
    for name, layer in named_layers(model):
        for key, variable in own_values(layer).items():
            if not isinstance(variable, keras.Variable):
                adapted = getattr(layer, "lora_enabled", False) and key == "0"
                variable = next((v for v in layer.variables if adapted and v.name in _ADAPTED), None)  # noqa: PLW2901
            if variable is None:
                continue  # another value that a custom layer saves
            own = (variable.path.rpartition("/")[2], key)
            by_variable.setdefault(id(variable.value), tuple(f"{name}/{each}" if name else each for each in own))
    return tuple(
        TargetVariable(
            path=path,
            names=tuple(name for name in by_variable.get(id(leaf.variable), ()) if name != path),
            shape=tuple(leaf.components[0].shape),
            dtype=leaf.components[0].dtype.name,
        )
        for path, leaf in targets.items()
    )


def _load_by_position(
    state: TrainState, targets: Mapping[str, Leaf], model: keras.Model, file: Path, again: Path
) -> Mapping[str, Array] | None:
    """Load a file into the model, or a part of it, and return what it has for that part; None if it does not fit."""
    below = {id(variable.value) for variable in model.variables}
    parts = {path: leaf for path, leaf in targets.items() if model is state.model or id(leaf.variable) in below}

    def load() -> None:
        model.load_weights(file)
        model.save_weights(again)

    try:
        return values_in_file(parts, state.leaves, load)
    except ValueError:
        return None  # Keras finds that it does not fit


def _assign(leaf: Leaf, value: Array) -> None:
    """Assign a value on every replica."""
    if not leaf.per_replica:
        leaf.variable.assign(value)
        return
    for part in leaf.components:
        part.assign(value)


def _report(
    source: WeightsSource,
    location: WeightsLocation,
    contents: SourceContents,
    matching: Matching,
    remarks: Sequence[str],
) -> SourceReport:
    return SourceReport(
        source=source.source,
        kind=KIND_NAMES[location.kind],
        place=contents.place,
        step=contents.step,
        loaded=dict(matching.sources),
        missing=matching.missing,
        unused=matching.unused,
        misfits=matching.misfits,
        cast=matching.cast,
        remarks=tuple(remarks),
        not_asked=matching.not_asked,
        ignored=contents.ignored,
    )
