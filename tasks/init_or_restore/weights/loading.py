"""Loads initial weights into a new model and reports on every variable: reads and matches all, then assigns.

A source is a file, a checkpoint, or a user's function (`weights.py:load`) that returns arrays by variable path.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import keras
import numpy as np

from tasks.foundation.contracts.checkpoint import SourceReport, WeightsReport
from tasks.foundation.contracts.run_spec import InitSpec, WeightsSource
from tasks.foundation.errors import FileMissing, ModelError, StorageError, WeightsError
from tasks.foundation.messages import abridged, counted, message
from tasks.foundation.model.build import preserved_global_state
from tasks.foundation.model.variables import Leaf, named_layers, own_values
from tasks.foundation.seeding import seed_as_after_import
from tasks.foundation.state.digest import digest_of
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.storage.interface import require_inside
from tasks.foundation.storage.local_files import temporary_folder
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.user_code import load_function
from tasks.foundation.user_errors import user_error
from tasks.init_or_restore.weights.location import KIND_NAMES, WeightsLocation, locate_weights
from tasks.init_or_restore.weights.matching import (
    Array,
    Matching,
    SourceContents,
    SourceVariable,
    TargetVariable,
    as_array,
    match,
)
from tasks.init_or_restore.weights.weight_files import LoadByPosition, read_checkpoint, read_hdf5, read_run_weights

_SHOWN = 4
_MODEL = "model/"
_RAW = "variables/"
_BY_POSITION = "layers were matched by position, as model.load_weights does, because their names differ"


def call_weights_function(reference: str, code_folder: Path, *, seed: int = 0) -> SourceContents:
    """Call the user's function, without arguments.

    Args:
        reference: `weights.py:load` or `package.module:load`.
        code_folder: the run file's folder.
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
        code_folder: the run file's folder.
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
        contents = _read(location, source, folder, partial(_load_by_position, state, targets), seed)
        if not contents.variables:
            raise WeightsError(f"init.weights: {source.source}: {contents.place} holds no weights")
        matching = match(wanted, contents.variables, source)
        remarks = [f"by the last parts of their names: {', '.join(matching.by_end)}"] if matching.by_end else []
        whole = source.include == ("*",) and not source.exclude and not source.rename
        if contents.by_position is not None and whole and not (matching.complete and not matching.by_end):
            found = contents.by_position()
            if found is not None:
                matching = match(wanted, [SourceVariable((path,), value) for path, value in found.items()], source)
                remarks = [_BY_POSITION]
    report = _report(source, location, contents, matching, remarks)
    if source.strict and not matching.complete:
        raise WeightsError(describe_mismatch(report))
    return report, matching.values


def _read(
    location: WeightsLocation, source: WeightsSource, folder: Path, by_position: LoadByPosition, seed: int
) -> SourceContents:
    match location.kind:
        case "function":
            return call_weights_function(location.name, Path(location.storage.uri), seed=seed)
        case "run":
            return read_run_weights(location.storage, source.step, folder)
        case "hdf5" | "keras":
            file = _local_files(location, [location.name], folder)
            return read_hdf5(file / location.name, uri=location.uri, by_position=by_position)
        case _:
            above = location.name.rpartition("/")[0]
            files = [
                path
                for path in location.storage.files(above, deep=False)
                if path == f"{location.name}.index" or path.startswith(f"{location.name}.data-")
            ]
            return read_checkpoint(str(_local_files(location, files, folder) / location.name), uri=location.uri)


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
    state: TrainState, targets: Mapping[str, Leaf], file: Path, again: Path
) -> Mapping[str, Array] | None:
    # The whole state: Keras also loads the optimizer's variables from the file.
    before = [(part, part.numpy()) for leaf in state.leaves for part in leaf.components]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ignored entries; comparing the files finds these
            state.model.load_weights(file)
            state.model.save_weights(again)
    except ValueError:
        return None  # Keras finds that it does not fit
    else:
        return {path: np.array(leaf.components[0].numpy()) for path, leaf in targets.items()}
    finally:
        for part, value in before:
            part.assign(value)


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
