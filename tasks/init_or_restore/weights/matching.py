"""Matches the variables of a source with those of the model, by name. Nothing is guessed or silently skipped.

Pure functions of names, shapes and dtypes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.tasks.foundation.contracts.run_spec import WeightsSource
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.foundation.model.variables import matches_path

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SourceVariable:
    """One variable of a source.

    Attributes:
        names: names that match it; the first one is used in messages.
        value: its value.
    """

    names: tuple[str, ...]
    value: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContents:
    """What was read from one source.

    Attributes:
        variables: its weights; each name belongs to one variable.
        ignored: number of other entries: of optimizers, metrics, counters, random states.
        place: where it was read from.
        step: the step of a Baton run's checkpoint.
        by_position: for Keras's own files: loads the whole file into the model by the positions of layers, as
            `model.load_weights` does, and returns {path: value}, or None if Keras finds that it does not fit. It leaves
            the model unchanged.
    """

    variables: tuple[SourceVariable, ...]
    ignored: int
    place: str
    step: int | None = None
    by_position: Callable[[], Mapping[str, Array] | None] | None = field(default=None, compare=False)


def with_unique_names(found: Sequence[SourceVariable]) -> tuple[SourceVariable, ...]:
    """Remove names that several variables share, and merge copies of one variable.

    A SavedModel stores its variables under two keys, and variables that a user names may share a name.
    """
    of_name: dict[str, list[int]] = {}
    for index, held in enumerate(found):
        for name in dict.fromkeys(held.names):
            of_name.setdefault(name, []).append(index)
    dropped: set[int] = set()
    taken: dict[int, list[str]] = {index: list(held.names) for index, held in enumerate(found)}
    for name, (first, *others) in of_name.items():
        others = [index for index in others if index not in dropped]  # noqa: PLW2901 - without merged ones
        if not others or first in dropped:
            continue
        if all(_equal(found[first].value, found[index].value) for index in others):
            dropped.update(others)
            continue
        for index in (first, *others):
            taken[index].remove(name)
    return tuple(
        SourceVariable(tuple(taken[index]), held.value)
        for index, held in enumerate(found)
        if index not in dropped and taken[index]
    )


def _equal(one: Array, other: Array) -> bool:
    # Compares bytes, because NaN is not equal to itself.
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


def as_array(value: Any) -> Array:
    """Return a value as a NumPy array that is a copy."""
    return np.array(value)


# The last parts of two names must agree in at least this many parts, such as layer/kernel; kernel is in almost every
# name.
_LEAST_COMMON_PARTS = 2
_OTHER_FLOATS = frozenset({"float16", "bfloat16", "float64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetVariable:
    """A variable of the model.

    Attributes:
        path: its path.
        names: other names that a source may use for it.
        shape: its shape.
        dtype: its dtype's name.
    """

    path: str
    names: tuple[str, ...] = ()
    shape: tuple[int, ...]
    dtype: str

    @property
    def all_names(self) -> tuple[str, ...]:
        """The path, then the other names."""
        return (self.path, *self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The result of matching.

    Each selected variable of the model is loaded, missing or a misfit; each variable of the source is used, unused, or
    not selected.

    Attributes:
        values: path -> value, in the dtype of the model's variable.
        sources: path -> name in the source.
        missing: selected paths that the source lacks.
        unused: names in the source that the model lacks.
        misfits: descriptions of pairs with another shape or dtype.
        cast: descriptions of pairs with another floating dtype.
        by_end: descriptions of pairs that were matched by the last parts of their names.
        not_asked: number of variables of the source that the patterns leave out.
    """

    values: Mapping[str, Array]
    sources: Mapping[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    misfits: tuple[str, ...]
    cast: tuple[str, ...]
    by_end: tuple[str, ...]
    not_asked: int

    @property
    def complete(self) -> bool:
        """Whether nothing is missing, unused or a misfit."""
        return not (self.missing or self.unused or self.misfits)


def match(wanted: Sequence[TargetVariable], held: Sequence[SourceVariable], spec: WeightsSource) -> Matching:
    """Match the variables of a model and of a source.

    Equal names, after renaming, match first. Of the rest, two variables of one shape match if one name is the end of
    the other, with at least two parts (encoder/dense/kernel and dense/kernel), and no other variable of the model or of
    the source has that end.

    Args:
        wanted: the model's variables.
        held: the source's variables; each name belongs to one variable.
        spec: patterns and renamings.

    Raises:
        WeightsError: a pattern or a renaming matches no variable.
    """
    by_name = {name: index for index, each in enumerate(held) for name in each.names}
    _require_patterns(wanted, held, spec)
    chosen = [each for each in wanted if _is_selected(each.all_names, spec)]
    found: dict[str, tuple[int, str]] = {}
    used: set[int] = set()
    for each in wanted:
        names = (renamed(name, spec.rename) for name in each.all_names)
        name = next((name for name in names if name in by_name), None)
        if name is not None:
            found[each.path] = (by_name[name], name)
            used.add(by_name[name])
    ends = _match_by_ends(wanted, held, found, used, spec.rename)
    by_end = []
    for each in chosen:
        if each.path in ends:
            index = ends[each.path]
            found[each.path] = (index, held[index].names[0])
            used.add(index)
            by_end.append(f"{each.path} from {held[index].names[0]}")
    return _result(chosen, held, found, spec, by_end=tuple(by_end), used=used)


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Rename a name of the model to the source's: the longest entry of `rename` that is the name, or a parent of it."""
    return _renamed(name, rename.items())


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    fitting = [(old, new) for old, new in pairs if not old or name == old or name.startswith(f"{old}/")]
    if not fitting:
        return name
    old, new = max(fitting, key=lambda pair: len(pair[0]))
    rest = name[len(old) :].removeprefix("/")
    return "/".join(part for part in (new, rest) if part)


def _names_for_model(held: SourceVariable, rename: Mapping[str, str]) -> tuple[str, ...]:
    """Return the source's names in the model's terms, and as they are: patterns may use either."""
    pairs = [(new, old) for old, new in rename.items()]
    return tuple(dict.fromkeys(name for each in held.names for name in (_renamed(each, pairs), each)))


def _is_selected(names: Sequence[str], spec: WeightsSource) -> bool:
    return any(matches_path(spec.include, name) for name in names) and not any(
        matches_path(spec.exclude, name) for name in names
    )


def _result(
    chosen: Sequence[TargetVariable],
    held: Sequence[SourceVariable],
    found: Mapping[str, tuple[int, str]],
    spec: WeightsSource,
    *,
    by_end: tuple[str, ...],
    used: set[int],
) -> Matching:
    values, sources, missing, misfits, cast = {}, {}, [], [], []
    for each in chosen:
        if each.path not in found:
            missing.append(each.path)
            continue
        index, name = found[each.path]
        value = held[index].value
        if value.shape != each.shape or not _dtype_fits(value.dtype, each.dtype):
            misfits.append(
                f"{each.path} is {each.dtype}{list(each.shape)}, {name} is {value.dtype.name}{list(value.shape)}"
            )
            continue
        if value.dtype.name != each.dtype:
            cast.append(f"{each.path}: {value.dtype.name} -> {each.dtype}")
        values[each.path] = value if value.dtype.name == each.dtype else value.astype(each.dtype)
        sources[each.path] = name
    unused, not_asked = [], 0
    for index, variable in enumerate(held):
        if index in used:
            continue
        if _is_selected(_names_for_model(variable, spec.rename), spec):
            unused.append(variable.names[0])
        else:
            not_asked += 1
    used_by_selected = {found[each.path][0] for each in chosen if each.path in found}
    return Matching(
        values=values,
        sources=sources,
        missing=tuple(missing),
        unused=tuple(unused),
        misfits=tuple(misfits),
        cast=tuple(cast),
        by_end=by_end,
        not_asked=not_asked + len(used - used_by_selected),
    )


def _dtype_fits(there: np.dtype[np.generic], here: str) -> bool:
    """Whether the dtypes are equal, or a float32 variable takes the other floating dtype."""
    return there.name == here or (here == "float32" and there.name in _OTHER_FLOATS)


def _match_by_ends(
    wanted: Sequence[TargetVariable],
    held: Sequence[SourceVariable],
    found: Mapping[str, tuple[int, str]],
    used: set[int],
    rename: Mapping[str, str],
) -> dict[str, int]:
    """Return path -> index in the source, for pairs that have no other candidate."""
    candidates: dict[str, set[int]] = {}
    partners: dict[int, set[str]] = {}
    of_end: dict[str, list[int]] = {}
    for index, variable in enumerate(held):
        for end in dict.fromkeys(map(_last_parts, variable.names)):
            of_end.setdefault(end, []).append(index)
    for each in wanted:
        name = renamed(each.path, rename)
        for index in of_end.get(_last_parts(name), ()):
            if any(_is_end(name, other) for other in held[index].names):
                candidates.setdefault(each.path, set()).add(index)
                partners.setdefault(index, set()).add(each.path)
    shapes = {each.path: each.shape for each in wanted}
    # A candidate that matched by its full name counts too: then the end is ambiguous.
    return {
        path: index
        for path, indices in candidates.items()
        if path not in found
        for index in indices
        if len(indices) == 1
        and index not in used
        and partners[index] == {path}
        and held[index].value.shape == shapes[path]
    }


def _last_parts(name: str) -> str:
    return "/".join(name.split("/")[-_LEAST_COMMON_PARTS:])


def _is_end(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    return shorter.count("/") + 1 >= _LEAST_COMMON_PARTS and longer.endswith(f"/{shorter}")


def _require_patterns(wanted: Sequence[TargetVariable], held: Sequence[SourceVariable], spec: WeightsSource) -> None:
    paths = [each.path for each in wanted]
    in_model = [name for each in wanted for name in each.all_names]
    in_source = [name for each in held for name in _names_for_model(each, spec.rename)]
    for key, patterns, names in (
        ("include", spec.include, in_model),
        ("exclude", spec.exclude, [*in_model, *in_source]),
    ):
        for pattern in patterns:
            if not any(matches_path((pattern,), name) for name in names):
                raise WeightsError(
                    f"init.weights: {spec.source}: {key}: {pattern} matches no variable{_near(pattern, paths)}"
                )
    for old, new in spec.rename.items():
        if not any(_renamed(name, [(old, "\0")]) != name for name in in_model):
            raise WeightsError(
                f"init.weights: {spec.source}: rename: {old}: {new}: the model has no variable {old} and none below "
                f"it{_near(old, paths)}; write rename: {{name in the model: name in the source}}"
            )


def _near(name: str, paths: Sequence[str]) -> str:
    known = dict.fromkeys([*paths, *(path.rpartition("/")[0] for path in paths)])
    near = get_close_matches(name, [path for path in known if path], n=3, cutoff=0.4)
    return f"; similar names: {', '.join(near)}" if near else f"; the model has {', '.join(paths[:3])}, …"
