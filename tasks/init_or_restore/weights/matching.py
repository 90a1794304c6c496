"""Which variable of a source goes into which variable of the model. By names; nothing is guessed, nothing passed over.

Pure functions of names, shapes and types.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from tasks.foundation.contracts.run_spec import WeightsSource
from tasks.foundation.errors import WeightsError
from tasks.foundation.model.patterns import selects
from tasks.init_or_restore.weights.source_variables import Array, Held

# Ends of names must agree in so many parts, as layer/kernel; one part, kernel, says nothing.
_LEAST_COMMON_PARTS = 2
_NARROWER = frozenset({"float16", "bfloat16", "float64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A variable of the model.

    Attributes:
        path: its path.
        names: other names that a source may know it by.
        shape: of its value.
        dtype: the name of its type.
    """

    path: str
    names: tuple[str, ...] = ()
    shape: tuple[int, ...]
    dtype: str

    @property
    def all_names(self) -> tuple[str, ...]:
        """The path first."""
        return (self.path, *self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """What goes where.

    Each variable that was asked for is loaded, missing or a misfit; each of the source's is used, unused, or not asked
    for.

    Attributes:
        values: path -> value, of the type of the model's variable.
        sources: path -> name in the source.
        missing: paths that were asked for.
        unused: names in the source.
        misfits: in words, those of another shape or type.
        cast: in words, those of another floating type.
        by_end: in words, those that were related by the ends of their names.
        not_asked: variables of the source that the patterns leave out.
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


def match(wanted: Sequence[Wanted], held: Sequence[Held], spec: WeightsSource) -> Matching:
    """Relate the variables of a model and of a source.

    Renamed names that are equal come first. Of what is left, two variables of one shape belong together if the name of
    one is the end of the other's, by two parts at least (encoder/dense/kernel and dense/kernel), and no other
    variable of the model or of the source has such an end.

    Args:
        wanted: the model's.
        held: the source's; a name is of one variable only.
        spec: patterns and renamings.

    Raises:
        WeightsError: a pattern or a renaming is for no variable.
    """
    by_name = {name: index for index, each in enumerate(held) for name in each.names}
    _require_patterns(wanted, held, spec)
    chosen = [each for each in wanted if _is_asked(each.all_names, spec)]
    found: dict[str, tuple[int, str]] = {}
    used: set[int] = set()
    for each in wanted:
        names = (renamed(name, spec.rename) for name in each.all_names)
        name = next((name for name in names if name in by_name), None)
        if name is not None:
            found[each.path] = (by_name[name], name)
            used.add(by_name[name])
    ends = _by_ends(wanted, held, found, used, spec.rename)
    by_end = []
    for each in chosen:
        if each.path in ends:
            index = ends[each.path]
            found[each.path] = (index, held[index].names[0])
            used.add(index)
            by_end.append(f"{each.path} from {held[index].names[0]}")
    return _sorted_out(chosen, held, found, spec, by_end=tuple(by_end), used=used)


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """A name of the model as the source has it: by the longest entry that is the name, or the beginning of it."""
    return _moved(name, rename.items())


def _moved(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    fitting = [(old, new) for old, new in pairs if not old or name == old or name.startswith(f"{old}/")]
    if not fitting:
        return name
    old, new = max(fitting, key=lambda pair: len(pair[0]))
    rest = name[len(old) :].removeprefix("/")
    return "/".join(part for part in (new, rest) if part)


def _as_the_model_says(held: Held, rename: Mapping[str, str]) -> tuple[str, ...]:
    """The source's names as the model would have them, and as they are: patterns may mean either."""
    pairs = [(new, old) for old, new in rename.items()]
    return tuple(dict.fromkeys(name for each in held.names for name in (_moved(each, pairs), each)))


def _is_asked(names: Sequence[str], spec: WeightsSource) -> bool:
    return any(selects(spec.include, name) for name in names) and not any(selects(spec.exclude, name) for name in names)


def _sorted_out(
    chosen: Sequence[Wanted],
    held: Sequence[Held],
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
        if value.shape != each.shape or not _fits(value.dtype, each.dtype):
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
        if _is_asked(_as_the_model_says(variable, spec.rename), spec):
            unused.append(variable.names[0])
        else:
            not_asked += 1
    asked = {found[each.path][0] for each in chosen if each.path in found}
    return Matching(
        values=values,
        sources=sources,
        missing=tuple(missing),
        unused=tuple(unused),
        misfits=tuple(misfits),
        cast=tuple(cast),
        by_end=by_end,
        not_asked=not_asked + len(used - asked),
    )


def _fits(there: np.dtype[np.generic], here: str) -> bool:
    """The same type, or a floating one that a float32 variable takes."""
    return there.name == here or (here == "float32" and there.name in _NARROWER)


def _by_ends(
    wanted: Sequence[Wanted],
    held: Sequence[Held],
    found: Mapping[str, tuple[int, str]],
    used: set[int],
    rename: Mapping[str, str],
) -> dict[str, int]:
    """Path -> index in the source, for pairs in which each has no other partner."""
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
    # A partner that has found its own place counts all the same: then the end was not telling.
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


def _require_patterns(wanted: Sequence[Wanted], held: Sequence[Held], spec: WeightsSource) -> None:
    paths = [each.path for each in wanted]
    mine = [name for each in wanted for name in each.all_names]
    theirs = [name for each in held for name in _as_the_model_says(each, spec.rename)]
    for key, patterns, names in (("include", spec.include, mine), ("exclude", spec.exclude, [*mine, *theirs])):
        for pattern in patterns:
            if not any(selects((pattern,), name) for name in names):
                raise WeightsError(
                    f"init.weights: {spec.source}: {key}: {pattern} matches no variable{_near(pattern, paths)}"
                )
    for old, new in spec.rename.items():
        if not any(_moved(name, [(old, "\0")]) != name for name in mine):
            raise WeightsError(
                f"init.weights: {spec.source}: rename: {old}: {new}: the model has no variable {old} and none below "
                f"it{_near(old, paths)}; the model's name stands before the colon, the source's behind it"
            )


def _near(name: str, paths: Sequence[str]) -> str:
    known = dict.fromkeys([*paths, *(path.rpartition("/")[0] for path in paths)])
    near = get_close_matches(name, [path for path in known if path], n=3, cutoff=0.4)
    return f"; near it: {', '.join(near)}" if near else f"; the model has {', '.join(paths[:3])}, …"
