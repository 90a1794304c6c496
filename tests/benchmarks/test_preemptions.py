"""The replay of losses: its sums, its order, and its schedules."""

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.benchmarks.preemptions.measure import BATON, Measured, row_and_commit, with_whole_commits
from tests.benchmarks.preemptions.page import ORACLE, Scenario, bound_words, conclusion, left_words, picture
from tests.benchmarks.preemptions.schedules import Schedule, exponential, from_file, scaled, weibull
from tests.benchmarks.preemptions.simulation import Costs, Seconds, fastest_costs, goodput, oracle, replay

SECONDS = st.floats(0, 500)
UP_TIMES = st.lists(st.floats(0.1, 5000), min_size=1, max_size=8)
INTERVALS = st.floats(1, 2000)
MEASURED = Measured(
    costs=Costs(start=1, commit=1, durable=1), step_seconds=1.0, starts=(1.0,), commits=(1.0,), speeds=(1.0,)
)


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    commit, later = draw(st.floats(0, 60)), draw(st.floats(0, 60))
    return Costs(start=draw(SECONDS), commit=commit, durable=commit + later, saves_on_notice=draw(st.booleans()))


@given(up_times=UP_TIMES, of=costs(), interval=INTERVALS, notice=st.sampled_from([0.0, 30.0, 400.0]))
@example(up_times=[3.0], of=Costs(start=0, commit=0, durable=3), interval=1.0, notice=0.0)  # lost before it is durable
def test_causes_add_up_and_nobody_beats_the_oracle(
    up_times: list[float], of: Costs, interval: float, notice: float
) -> None:
    found, best = replay(up_times, of, lambda *_: interval, notice=notice), oracle(up_times, of)
    assert found.total + found.left == pytest.approx(sum(up_times))
    assert best.total == pytest.approx(sum(up_times))
    assert min(found.kept, found.lost, found.start, found.commit, found.left) >= 0
    assert found.kept <= best.kept + 1e-6
    assert found.kept / sum(up_times) <= goodput(best, of) + 1e-9


@given(up_times=UP_TIMES, of=costs(), other=costs(), interval=INTERVALS)
def test_oracle_has_the_lowest_costs(up_times: list[float], of: Costs, other: Costs, interval: float) -> None:
    best = oracle(up_times, fastest_costs([of, other]))
    for arm in (of, other):
        assert goodput(replay(up_times, arm, lambda *_: interval), arm) <= best.kept / best.total + 1e-9


@given(up_time=st.floats(600, 5000), of=costs(), interval=INTERVALS)
def test_training_is_kept_up_to_the_last_commit(up_time: float, of: Costs, interval: float) -> None:
    """Without in-flight commits the goodput is arithmetic: whole intervals, each with its commit."""
    plain = Costs(start=of.start, commit=of.commit, durable=of.commit)
    found = replay([up_time], plain, lambda *_: interval)
    whole = (up_time - of.start) // (interval + of.commit)
    assert found.kept == pytest.approx(whole * interval, rel=1e-6, abs=interval * 1.001)


@given(up_times=UP_TIMES, of=costs(), interval=INTERVALS)
def test_longer_starts_keep_less(up_times: list[float], of: Costs, interval: float) -> None:
    later = Costs(start=of.start + 50, commit=of.commit, durable=of.durable)
    assert replay(up_times, later, lambda *_: interval).kept <= replay(up_times, of, lambda *_: interval).kept + 1e-6


def test_one_life_by_hand() -> None:
    """Start 10; train 10..40, commit until 42, durable at 45; train 42..72, commit 72..74, durable at 77 > 75."""
    of = Costs(start=10, commit=2, durable=5)
    found = replay([75], of, lambda *_: 30)
    assert (found.start, found.kept, found.commit, found.lost) == (10, 30, 4, 31)
    noticed = replay([75], Costs(start=10, commit=2, durable=5, saves_on_notice=True), lambda *_: 30, notice=15)
    assert (noticed.kept, noticed.lost, noticed.commit, noticed.left) == (48, 0, 7, 10)
    late = replay([75], Costs(start=10, commit=2, durable=5, saves_on_notice=True), lambda *_: 30, notice=4)
    assert (late.kept, late.lost) == (30, 29)


def test_interval_follows_what_came_before() -> None:
    asked: list[tuple[int, float]] = []

    def interval(losses: int, seconds: float) -> float:
        asked.append((losses, seconds))
        return math.inf

    assert replay([5, 7, 9], Costs(start=0, commit=0, durable=0), interval).lost == 21
    assert asked == [(0, 0), (1, 5), (2, 12)]


def test_picture_has_bars_as_long_as_the_times() -> None:
    seconds = {ORACLE: Seconds(kept=60), BATON: Seconds(kept=30, lost=20, start=10)}
    schedule = Schedule(name="<weekly>", up_times=(60.0,))
    scenario = Scenario(schedule=schedule, notice=0.0, seconds=seconds, measured={BATON: MEASURED})
    drawn = ET.fromstring(picture([scenario]))  # noqa: S314 - the test made it
    widths = [float(each.get("width", 0)) for each in drawn.iter() if each.get("height") == "16"]
    assert widths == [320, 0, 0, 0, 160, 0, 53.3, 106.7]
    assert {"<weekly>, no notice", "100%", "50%", ORACLE, BATON} <= set(drawn.itertext())


def test_page_begins_with_what_its_table_says() -> None:
    kept = {ORACLE: 90, BATON: 81, "Orbit, best interval": 80, "Orbit, each half hour": 20}
    seconds = {name: Seconds(kept=each, lost=100 - each) for name, each in kept.items()}
    scenarios = [
        Scenario(
            schedule=exponential(mean, 400),
            notice=notice,
            seconds=seconds,
            measured=dict.fromkeys((BATON, "Orbit"), MEASURED),
        )
        for mean, notice in ((1200, 0.0), (3000, 30.0))
    ]
    found = conclusion(scenarios)
    assert "1.012 to 1.012" in found
    assert "1.012 or more with notice" in found
    assert "90.0% or more of the oracle's" in found
    assert "all the 1.00 s until it is durable, Baton would keep 1.012 to 1.012 of" in bound_words(scenarios)


def test_bound_charges_baton_until_a_commit_is_durable() -> None:
    costs = Costs(start=1, commit=1, durable=3, saves_on_notice=True)
    measured = dict.fromkeys((BATON, "Orbit"), replace(MEASURED, costs=costs))
    assert with_whole_commits(measured) == {
        BATON: replace(MEASURED, costs=replace(costs, commit=3)),
        "Orbit": measured["Orbit"],
    }


def test_page_says_what_a_notice_is_worth_if_its_rest_is_lost() -> None:
    seconds = {ORACLE: Seconds(kept=100), BATON: Seconds(kept=90, left=20), "Orbit": Seconds(kept=75, lost=25)}
    each = Scenario(
        schedule=Schedule(name="x", up_times=(100.0,)),
        notice=30.0,
        seconds=seconds,
        measured=dict.fromkeys((BATON, "Orbit"), MEASURED),
    )
    assert each.goodput(BATON) == 1
    assert each.over_peer_if_left_is_lost == pytest.approx(90 / 110 / 0.75)
    assert "1.091 to 1.091" in left_words([each])


def test_a_commit_costs_what_its_rows_take_longer() -> None:
    """Rows take 5 s; commits cost 2 s, 3 s in two rows, and a halt of the machine, as does the first row."""
    gaps = {10: 9.0, 20: 5.0, 30: 7.0, 40: 5.0, 50: 5.0, 60: 7.0, 70: 6.0, 80: 5.0, 90: 95.0}
    rows = {10: 100.0}
    for step, gap in gaps.items():
        rows[step + 10] = rows[step] + gap
    assert row_and_commit(rows, 30) == (5.0, 3.0)


def test_schedules_are_drawn_from_their_seed() -> None:
    for draw in (exponential, weibull):
        one = draw(600, 4000)
        assert one == draw(600, 4000) != draw(600, 4000, seed=1)
        assert one.mean == pytest.approx(600, rel=0.1)
        assert min(one.up_times) > 0
    assert scaled(exponential(600, 50), mean=20, least=10, most=30) == scaled(
        exponential(600, 50), mean=20, least=10, most=30
    )


def test_schedule_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "week.txt"
    file.write_text("# spot machines\n60.5\n\n10 # early\n")
    assert from_file(file).up_times == (60.5, 10.0)


@pytest.mark.parametrize("text", ["", "# nothing", "12\nsoon", "-3", "nan", "inf", "0"])
def test_bad_schedule_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "week.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"week\.txt"):
        from_file(file)


def test_bad_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="durable is at least commit"):
        Costs(start=1, commit=2, durable=1)
