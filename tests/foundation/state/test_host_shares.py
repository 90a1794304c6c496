"""Each host's share of a save is a pure function, and says which host is the odd one when hosts differ."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.state.host_shares import difference_message, owners_of, turns_of

SIZES = st.dictionaries(st.text(st.characters(codec="ascii"), min_size=1, max_size=6), st.integers(0, 1 << 40))


@settings(derandomize=True)
@given(sizes=SIZES, hosts=st.integers(1, 9), shuffle=st.randoms())
def test_shares_are_balanced_and_the_same_on_every_host(sizes: dict[str, int], hosts: int, shuffle: object) -> None:
    owners = owners_of(sizes, hosts=hosts, fixed={})
    assert owners.keys() == sizes.keys()
    loads = [0] * hosts
    for key, host in owners.items():
        loads[host] += sizes[key]
    assert max(loads) <= sum(loads) / hosts + max(sizes.values(), default=0)
    items = list(sizes.items())
    shuffle.shuffle(items)  # type: ignore[attr-defined]
    assert owners_of(dict(items), hosts=hosts, fixed={}) == owners


@settings(derandomize=True)
@given(sizes=SIZES, hosts=st.integers(1, 5), data=st.data())
def test_what_only_one_host_has_is_its_own(sizes: dict[str, int], hosts: int, data: st.DataObject) -> None:
    fixed = {key: host for key in sizes if (host := data.draw(st.integers(-1, hosts - 1))) >= 0}
    owners = owners_of(sizes, hosts=hosts, fixed=fixed)
    assert {key: owners[key] for key in fixed} == fixed
    # The others even out what is fixed: no host with one of them has more than its part and the largest.
    loads = [sum(sizes[key] for key in owners if owners[key] == host) for host in range(hosts)]
    free = sizes.keys() - fixed.keys()
    for host in {owners[key] for key in free}:
        assert loads[host] <= min(loads) + max(sizes[key] for key in free)


@pytest.mark.parametrize(
    ("crcs", "words"),
    [
        ([1, 2], "hosts 0 (a) and 1 (b) hold different values of model/x"),
        ([1, 1, 2], "host 2 (c) and the other 2 hosts hold different values of model/x"),
        ([2, 1, 1, 3, 1], "hosts 0 (a), 3 (d) and the other 3 hosts hold different values of model/x"),
        ([1, 2, 3], "hosts 0 (a) and 1 (b) and 2 (c) hold different values of model/x"),
        ([1, 1, 2, 2], "hosts 0 (a), 1 (b) and 2 (c), 3 (d) hold different values of model/x"),
    ],
)
def test_the_odd_host_is_named(crcs: list[int], words: str) -> None:
    text = difference_message("model/x", crcs, "abcde"[: len(crcs)], at="step 7", whole=3)
    assert text.startswith(f"step 7: {words}, which must be the same on all of them; this state is not committed")
    assert "the whole state was the same up to step 3; commits after that may be wrong too" in text


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_n_saves_compare_every_piece_with_every_host(hosts: int) -> None:
    for first in range(hosts):
        turns = [turn for number in range(hosts) for turn in turns_of(first + number, hosts)]
        assert sorted(turns) == [(shift, piece) for shift in range(1, hosts) for piece in range(hosts)]
