"""Matching the variables of a model and a source by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.run_spec import WeightsSource
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.foundation.model.variables import matches_path
from baton.tasks.init_or_restore.weights.matching import (
    Matching,
    SourceVariable,
    TargetVariable,
    match,
    renamed,
    with_unique_names,
)

NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
SHAPES = st.sampled_from([(2,), (3,)])


def wanted(**shapes: tuple[int, ...]) -> list[TargetVariable]:
    return [
        TargetVariable(path=path.replace("__", "/"), shape=shape, dtype="float32") for path, shape in shapes.items()
    ]


def held(**shapes: tuple[int, ...]) -> list[SourceVariable]:
    return [
        SourceVariable((name.replace("__", "/"),), np.full(shape, number, np.float32))
        for number, (name, shape) in enumerate(shapes.items())
    ]


def source(**values: object) -> WeightsSource:
    return WeightsSource.model_validate({"source": "x", **values})


@given(mine=st.dictionaries(NAMES, SHAPES, min_size=1), theirs=st.dictionaries(NAMES, SHAPES), data=st.data())
def test_every_variable_is_accounted_for(
    mine: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]], data: st.DataObject
) -> None:
    include = data.draw(st.sampled_from(["*", *mine]))
    found = match(
        [TargetVariable(path=path, shape=shape, dtype="float32") for path, shape in mine.items()],
        [SourceVariable((name,), np.zeros(shape, np.float32)) for name, shape in theirs.items()],
        source(include=[include]),
    )
    selected = {path for path in mine if matches_path((include,), path)}
    misfits = {text.split(" is ")[0] for text in found.misfits}
    assert set(found.values) | set(found.missing) | misfits == selected
    assert len(found.values) + len(found.missing) + len(misfits) == len(selected)
    for path in selected & theirs.keys():
        # An equal name always wins over a similar one.
        assert (path in found.values) == (mine[path] == theirs[path])
        assert found.sources.get(path, path) == path
    for path, value in found.values.items():
        assert value.shape == mine[path] == theirs[found.sources[path]]
        assert len(found.by_end) == sum(there != here for here, there in found.sources.items())
    used = set(found.sources.values()) | (misfits & theirs.keys())
    assert used.isdisjoint(found.unused)
    assert len(theirs) == len(used) + len(found.unused) + found.not_asked
    assert found.complete == (not found.missing and not found.unused and not found.misfits)


@given(paths=st.sets(NAMES, min_size=1), prefix=NAMES)
def test_rename_applies_to_everything_below(paths: set[str], prefix: str) -> None:
    mine = [TargetVariable(path=path, shape=(2,), dtype="float32") for path in paths]
    theirs = [SourceVariable((f"{prefix}/{path}",), np.zeros(2, np.float32)) for path in paths]
    found = match(mine, theirs, source(rename={"": prefix}))
    assert found.complete
    assert found.by_end == ()
    assert {path: f"{prefix}/{path}" for path in paths} == dict(found.sources)


@pytest.mark.parametrize(
    ("name", "rename", "there"),
    [
        ("encoder/dense/kernel", {"encoder": "bert"}, "bert/dense/kernel"),
        ("encoder/dense/kernel", {"encoder": "bert", "encoder/dense": "first"}, "first/kernel"),
        ("encoder/dense/kernel", {"encoder": ""}, "dense/kernel"),
        ("encoder/dense/kernel", {"encod": "bert"}, "encoder/dense/kernel"),
        ("encoder/dense/kernel", {"encoder/dense/kernel": "w"}, "w"),
        ("kernel", {"": "model"}, "model/kernel"),
    ],
)
def test_longest_rename_entry_wins(name: str, rename: dict[str, str], there: str) -> None:
    assert renamed(name, rename) == there


def found_by_ends(mine: list[TargetVariable], theirs: list[SourceVariable]) -> Matching:
    return match(mine, theirs, source(strict=False))


def test_last_parts_match_only_if_unambiguous() -> None:
    alone = found_by_ends(wanted(enc__d__k=(2,)), held(d__k=(2,)))
    assert dict(alone.sources) == {"enc/d/k": "d/k"}
    assert alone.by_end == ("enc/d/k from d/k",)
    for mine, theirs in (
        (wanted(enc__d__k=(2,), dec__d__k=(2,)), held(d__k=(2,))),  # two targets
        (wanted(d__k=(2,)), held(enc__d__k=(2,), dec__d__k=(2,))),  # two sources
        (wanted(enc__d__k=(2,)), held(k=(2,))),  # a single part is not enough
        (wanted(enc__d__k=(2,)), held(d__k=(3,))),  # another shape
        (wanted(enc__d__k=(2,), d__k=(2,)), held(d__k=(2,))),  # an equal name takes it
    ):
        found = found_by_ends(mine, theirs)
        assert found.by_end == ()
        assert "enc/d/k" not in found.values


def test_one_source_variable_may_match_two() -> None:
    found = match(
        wanted(left__k=(2,), right__k=(2,)), held(one__k=(2,)), source(rename={"left": "one", "right": "one"})
    )
    assert found.complete
    assert set(found.sources.values()) == {"one/k"}


def test_variables_left_out_by_patterns_are_not_unused() -> None:
    mine, theirs = wanted(enc__k=(2,), head__k=(4,)), held(enc__k=(2,), head__k=(3,), top__k=(3,))
    for values in ({"include": ["enc"]}, {"exclude": ["head", "top"]}):
        found = match(mine, theirs, source(**values))
        assert found.complete
        assert found.not_asked == 2
    assert match(mine, theirs, source(exclude="head/*")).unused == ("top/k",)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"include": ["encc/*"]}, "include: encc/* matches no variable; similar names: enc"),
        ({"exclude": ["hd"]}, "exclude: hd matches no variable"),
        ({"rename": {"hd": "x"}}, "rename: hd: x: the model has no variable hd and none below it"),
        ({"rename": {"top": "head"}}, "write rename: {name in the model: name in the source}"),
    ],
)
def test_patterns_and_renames_without_match_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(WeightsError) as refused:
        match(wanted(enc__k=(2,), head__k=(4,)), held(enc__k=(2,)), source(**values))
    assert words in str(refused.value)


def test_names_shared_by_variables_are_dropped() -> None:
    one, two = np.zeros(2), np.ones(2)
    assert with_unique_names([SourceVariable(("a", "k1"), one), SourceVariable(("a", "k2"), one)]) == (
        SourceVariable(("a", "k1"), one),
    )
    apart = with_unique_names(
        [SourceVariable(("a", "k1"), one), SourceVariable(("a", "k2"), two), SourceVariable(("b",), two)]
    )
    assert [each.names for each in apart] == [("k1",), ("k2",), ("b",)]
    nan = np.array([np.nan])
    assert len(with_unique_names([SourceVariable(("a", "k1"), nan), SourceVariable(("a", "k2"), nan.copy())])) == 1
