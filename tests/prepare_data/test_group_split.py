"""Groups are held out whole, by a seeded hash of their value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.dataset.shards import encode
from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.split import split_by_group


def records_of(users: list[int]) -> list[bytes]:
    """One record for each user of the list, numbered by its y."""
    return [encode({"x/user_id": np.int64(user), "y": np.int64(number)}) for number, user in enumerate(users)]


def dealt(users: list[int], *, fraction: float, seed: int = 0) -> list[tuple[bool, bytes]]:
    return list(split_by_group(records_of(users), feature="user_id", fraction=fraction, seed=seed))


@given(
    users=st.lists(st.integers(0, 6), min_size=2, max_size=40).filter(lambda users: len(set(users)) > 1),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_each_group_is_whole_in_one_part(users: list[int], fraction: float, seed: int) -> None:
    found = dealt(users, fraction=fraction, seed=seed)
    records = records_of(users)
    assert sorted(record for _, record in found) == sorted(records)
    part_of = {record: held_out for held_out, record in found}
    parts = {user: {part_of[records[at]] for at, each in enumerate(users) if each == user} for user in set(users)}
    assert all(len(found_parts) == 1 for found_parts in parts.values())
    assert {held_out for held_out, _ in found} == {True, False}


@given(users=st.lists(st.integers(0, 6), min_size=2, max_size=30).filter(lambda users: len(set(users)) > 1))
def test_part_of_a_group_does_not_depend_on_the_order(users: list[int]) -> None:
    def held_out(order: list[int]) -> set[int]:
        records = records_of(order)
        found = {record: out for out, record in dealt(order, fraction=0.4, seed=3)}
        return {user for user, record in zip(order, records, strict=True) if found[record]}

    assert held_out(users) == held_out(users[::-1])


def test_groups_keep_their_part_when_others_are_added() -> None:
    def held_out(users: list[int]) -> set[int]:
        found = {record: out for out, record in dealt(users, fraction=0.2)}
        return {user for user, record in zip(users, records_of(users), strict=True) if found[record]}

    few, many = held_out(list(range(200))), held_out(list(range(1000)))
    assert few == {user for user in many if user < 200}
    assert len(many) == pytest.approx(200, abs=50)


def test_split_depends_on_the_seed() -> None:
    assert dealt(list(range(50)), fraction=0.3, seed=1) != dealt(list(range(50)), fraction=0.3, seed=2)


def test_single_group_is_refused() -> None:
    with pytest.raises(SourceError, match=r"split_by: user_id: all 3 examples have the same value"):
        dealt([5, 5, 5], fraction=0.5)


def test_unknown_feature_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SourceError, match=r"split_by: group: .*no such feature; they have x/user_id, y"):
        list(split_by_group(records_of([1, 2]), feature="group", fraction=0.5, seed=0))


def test_ambiguous_feature_is_refused() -> None:
    record = encode({"x/id": np.int64(1), "y/id": np.int64(2)})
    with pytest.raises(SourceError, match="x/id and y/id; write one of them in full"):
        list(split_by_group([record], feature="id", fraction=0.5, seed=0))
    assert list(split_by_group([], feature="id", fraction=0.5, seed=0)) == []
