"""Initial weights into a model that was just built: all sources are read and related first, then all is assigned."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import keras
import numpy as np

from tasks.foundation.contracts.run_spec import InitSpec, WeightsSource
from tasks.foundation.contracts.weights_report import SourceReport, WeightsReport
from tasks.foundation.errors import FileMissing, StorageError, WeightsError
from tasks.foundation.model.layers import named_layers, own_variables
from tasks.foundation.model.variables import Leaf
from tasks.foundation.state.digest import digest_of
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.storage.path_guard import require_inside
from tasks.foundation.storage.temporary_files import temporary_folder
from tasks.foundation.telemetry.events import Note, Sink
from tasks.init_or_restore.weights.checkpoints import read_checkpoint
from tasks.init_or_restore.weights.function import call_function
from tasks.init_or_restore.weights.hdf5 import ByPlace, read_hdf5
from tasks.init_or_restore.weights.location import IN_WORDS, Place, locate
from tasks.init_or_restore.weights.matching import Matching, Wanted, match
from tasks.init_or_restore.weights.run_checkpoint import read_run
from tasks.init_or_restore.weights.source_variables import Array, Contents, Held
from tasks.init_or_restore.weights.summary import misfit_words, notes_of

_MODEL = "model/"
_RAW = "variables/"
_BY_PLACE = "layers were related by their places, as model.load_weights does, since their names differ"


def load_weights(
    state: TrainState, init: InitSpec, *, code_folder: Path, telemetry: Sink, seed: int = 0
) -> WeightsReport | None:
    """Load what `init.weights` names into a state at its initial values; where several have a variable, the last holds.

    Args:
        state: built, at step 0.
        init: of the run file.
        code_folder: the run file's folder.
        telemetry: receives notes of what was loaded, and what was not.
        seed: `train.seed`, for a function of the user's own.

    Returns:
        What became of each variable; None if there are no sources.

    Raises:
        WeightsError: a source is not there, cannot be read, or does not fit. Nothing has been assigned then.
        DamagedCheckpoint: the checkpoint of another run is.
    """
    if not init.weights:
        return None
    targets = {_name(leaf): leaf for leaf in state.leaves if _is_weight(leaf)}
    wanted = _wanted(state.model, targets)
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
    result = WeightsReport(
        sources=tuple(reports),
        left=tuple(path for path in targets if path not in values),
        overlaid=tuple(dict.fromkeys(overlaid)),
        digest=digest_of(values, lambda path: values[path]),
    )
    for text, warning in notes_of(result):
        telemetry.emit(Note(text=text, warning=warning))
    return result


def _of_source(
    source: WeightsSource,
    state: TrainState,
    targets: Mapping[str, Leaf],
    wanted: Sequence[Wanted],
    code_folder: Path,
    *,
    seed: int,
) -> tuple[SourceReport, Mapping[str, Array]]:
    place = locate(source, code_folder)
    with temporary_folder("baton-weights-") as folder, state.accelerator.strategy.scope():
        contents = _read(place, source, folder, partial(_by_place, state, targets), seed)
        if not contents.variables:
            raise WeightsError(f"init.weights: {source.source}: {contents.place} holds no weights")
        matching = match(wanted, contents.variables, source)
        remarks = [f"by the ends of their names: {', '.join(matching.by_end)}"] if matching.by_end else []
        whole = source.include == ("*",) and not source.exclude and not source.rename
        if contents.by_place is not None and whole and not (matching.complete and not matching.by_end):
            found = contents.by_place()
            if found is not None:
                matching = match(wanted, [Held((path,), value) for path, value in found.items()], source)
                remarks = [_BY_PLACE]
    report = _report(source, place, contents, matching, remarks)
    if source.strict and not matching.complete:
        raise WeightsError(misfit_words(report))
    return report, matching.values


def _read(place: Place, source: WeightsSource, folder: Path, by_place: ByPlace, seed: int) -> Contents:
    match place.kind:
        case "function":
            return call_function(place.name, Path(place.storage.uri), seed=seed)
        case "run":
            return read_run(place.storage, source.step, folder)
        case "hdf5" | "keras":
            file = _here(place, [place.name], folder)
            return read_hdf5(file / place.name, uri=place.uri, by_place=by_place)
        case _:
            above = place.name.rpartition("/")[0]
            files = [
                path
                for path in place.storage.files(above)
                if path == f"{place.name}.index" or path.startswith(f"{place.name}.data-")
            ]
            return read_checkpoint(str(_here(place, files, folder) / place.name), uri=place.uri)


def _here(place: Place, names: Iterable[str], folder: Path) -> Path:
    """A folder of this machine with these files."""
    for name in names:
        require_inside(name, root=place.uri)  # on Cloud Storage any text is a name, ../.. among them
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            local = place.storage.local_path(name)
            if local is None:
                if place.storage.download(name, target) != place.storage.stat(name):
                    raise StorageError(f"init.weights: {place.uri}: {name} did not arrive as it is there; run again")
            else:
                target.symlink_to(local)
        except FileMissing as fault:
            raise WeightsError(f"init.weights: {place.uri} is not there any more; put it back") from fault
    return folder


def _is_weight(leaf: Leaf) -> bool:
    """Random states are the seed's business, and what optimizers and metrics hold is no weight."""
    return leaf.path.startswith((_MODEL, _RAW)) and not leaf.seed


def _name(leaf: Leaf) -> str:
    return leaf.path.removeprefix(_MODEL)


def _wanted(model: keras.Model, targets: Mapping[str, Leaf]) -> tuple[Wanted, ...]:
    """The model's variables, with the names of the layers that lead to them, as files of Keras have them.

    A variable's path has these names too, but not those of models around a layer that was built before they were.
    """
    by_variable: dict[int, tuple[str, ...]] = {}
    for name, layer in named_layers(model):
        for key, variable in own_variables(layer).items():
            own = (variable.path.rpartition("/")[2], key)
            by_variable.setdefault(id(variable.value), tuple(f"{name}/{each}" if name else each for each in own))
    return tuple(
        Wanted(
            path=path,
            names=tuple(name for name in by_variable.get(id(leaf.variable), ()) if name != path),
            shape=tuple(leaf.components[0].shape),
            dtype=leaf.components[0].dtype.name,
        )
        for path, leaf in targets.items()
    )


def _by_place(state: TrainState, targets: Mapping[str, Leaf], file: Path, again: Path) -> Mapping[str, Array] | None:
    # All of the state: Keras takes the optimizer's from the file too.
    before = [(part, part.numpy()) for leaf in state.leaves for part in leaf.components]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what it passes over; that is found out by comparing the files
            state.model.load_weights(file)
            state.model.save_weights(again)
    except ValueError:
        return None  # it does not fit, as Keras sees it
    else:
        return {path: np.array(leaf.components[0].numpy()) for path, leaf in targets.items()}
    finally:
        for part, value in before:
            part.assign(value)


def _assign(leaf: Leaf, value: Array) -> None:
    """On every replica."""
    if not leaf.per_replica:
        leaf.variable.assign(value)
        return
    for part in leaf.components:
        part.assign(value)


def _report(
    source: WeightsSource, place: Place, contents: Contents, matching: Matching, remarks: Sequence[str]
) -> SourceReport:
    return SourceReport(
        source=source.source,
        kind=IN_WORDS[place.kind],
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
