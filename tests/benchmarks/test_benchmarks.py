"""The benchmarks' own code: lines are timed, figures are judged, and every arm that needs no network runs."""

import itertools
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import __main__ as main
from tests.benchmarks import process
from tests.benchmarks.bench import Bench
from tests.benchmarks.environments import Baton
from tests.benchmarks.figures.borders import stalls_of
from tests.benchmarks.figures.wall_clock import PLAIN, wall_clock
from tests.benchmarks.machine import busy_cores, machine_words
from tests.benchmarks.plan import Plan, WallClock
from tests.benchmarks.proc_files import ThreadProfile
from tests.benchmarks.process import Arm, ArmFailed, Trace, until_step
from tests.benchmarks.table import Figure, as_markdown, with_conclusion, write_results
from tests.benchmarks.turns import by_turns, ratios
from tests.benchmarks.workloads import TINY, Training, write_run_file
from tests.support import forked
from tests.support.checkout import CHECKOUT


def arm(folder: Path, code: str) -> Arm:
    return Arm(name="arm", command=(sys.executable, "-IS", "-c", code), folder=folder)


def test_lines_of_an_arm_are_timed(tmp_path: Path) -> None:
    lines = "noise\nstep 0  committed  x\nstep 5/20  loss 1\nstep 5/20  again\nvalue a b = 2.5\nstep 5  committed  x"
    trace = arm(tmp_path, f"print({lines!r})").run()
    assert list(trace.rows) == [5]
    assert list(trace.commits) == [0, 5]
    assert trace.values == {"a b": [2.5]}
    assert 0 < trace.first_row <= trace.commits[5] <= trace.ended


def test_arm_is_killed_with_its_children_once_it_is_done(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "print('value child =', child.pid, flush=True)\n"
        "print('step 1/9', flush=True); time.sleep(600)"
    )
    trace = arm(tmp_path, code).run(until_step(1))
    assert trace.code == -signal.SIGKILL
    status = Path(f"/proc/{int(trace.value('child'))}/status")
    assert not status.exists() or "zombie" in status.read_text()  # reaped by its new parent
    assert trace.peak_bytes > 1 << 20


@pytest.mark.parametrize(
    ("code", "why"),
    [("print('no data'); raise SystemExit(3)", "ended with 3"), ("print('step 1/9')", "ended with 0")],
)
def test_arm_that_ends_early_has_failed(tmp_path: Path, code: str, why: str) -> None:
    with pytest.raises(ArmFailed, match=why):
        arm(tmp_path, code).run(until_step(9))


def test_arm_that_hangs_is_killed(tmp_path: Path) -> None:
    with pytest.raises(ArmFailed, match="out of time"):
        arm(tmp_path, "import time; time.sleep(600)").run(until_step(9), seconds=0.01)


def endless(folder: Path, name: str, *, rows: int = 1000) -> Arm:
    """An arm that prints `rows` rows of metrics, and adds its name to the file `order` at each."""
    code = (
        "import time\n"
        f"for step in range({rows}):\n"
        f"    open('order', 'a').write('{name}'); print(f'step {{step}}/{rows}', flush=True); time.sleep(0.01)"
    )
    return arm(folder, code)


def test_arms_train_by_turns(tmp_path: Path) -> None:
    found = by_turns({name: endless(tmp_path, name) for name in "abc"}, turns=6, rows=4)
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 6, "b": 6, "c": 6}
    assert min(map(min, found.values())) > 0
    order = (tmp_path / "order").read_text()
    changes = [one for one, other in itertools.pairwise(order) if one != other]
    # Three starts, 13 changes within six turns, and what is trained while all end.
    assert len(changes) <= 2 + 13 + 9 < len(order) / 3


def test_arm_that_ends_among_turns_has_failed(tmp_path: Path) -> None:
    with pytest.raises(ArmFailed, match="ended with 0"):
        by_turns({"a": endless(tmp_path, "a"), "b": endless(tmp_path, "b", rows=6)}, turns=9)


def test_ratios_are_those_of_the_same_turns() -> None:
    assert ratios([{"ours": [1.0, 2.0, 9.0], "peer": [2.0, 4.0, 9.0]}], "ours", "peer") == [0.5]


def test_last_commit_after_the_last_step_counts() -> None:
    trace = Trace(rows={5: 10.0, 20: 13.0}, commits={0: 1.0, 10: 12.0, 20: 13.5})
    assert trace.to_last_step == 3.0
    assert trace.to_last_commit == 3.5
    assert Trace(rows={5: 10.0, 20: 13.0}).to_last_commit == 3.0


def test_stalls_are_taken_over_the_quiet_steps() -> None:
    training = Training(steps=12, rows=1, commit_steps=4)
    gaps = {5: 1.4, 6: 1.1, 9: 1.2}  # after the commits of steps 4 and 8
    rows, now = {}, 0.0
    for step in range(1, 13):
        now += gaps.get(step, 1.0)
        rows[step] = now
    first, until_next = stalls_of(Trace(rows=rows), training)
    assert first == pytest.approx([0.4, 0.2])
    assert until_next == pytest.approx([0.5, 0.2])


@pytest.mark.parametrize(("at_least", "verdict"), [(False, "missed"), (True, "reached")])
def test_the_median_is_compared_with_the_goal(at_least: bool, verdict: str) -> None:
    figure = Figure(group="g", name="n", values=(0.9, 1.2, 1.3), goal=1.1, at_least=at_least)
    assert figure.verdict == verdict
    assert figure.words()[1:4] == ("0.900", "1.200", "1.300")


def test_results_have_the_table_and_the_machine(tmp_path: Path) -> None:
    figures = [Figure(group="Group", name="arm", values=(1.0,), unit="ms", goal=2.0)]
    write_results(tmp_path / "R.md", figures, machine=machine_words(), command="make bench", notes=["a note"])
    text = (tmp_path / "R.md").read_text()
    assert as_markdown(figures) in text
    assert " cores of " in text
    assert "| arm    | 1 ms | 1 ms   | 1 ms | ≤ 2 ms | reached | 1      |" in text
    assert "\n\n**1 of 1 goals are reached.**\n\n" in text
    assert os.uname().nodename not in text or os.uname().nodename == "localhost"
    assert str(CHECKOUT) not in text


def test_results_begin_with_what_their_tables_say() -> None:
    page = (CHECKOUT / "tests" / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert re.search(r"\A# .+\n\n\*\*\d+ of \d+ goals are reached; missed: .+ \(\d\)\.\*\*\n\n", page)
    assert page == with_conclusion(page), "write it: with_conclusion of table.py"


def test_profile_counts_from_where_it_begins() -> None:
    profile = ThreadProfile(os.getpid())
    profile.begin()
    sum(range(2_000_000))
    profile.sample()
    found = profile.by_name(Path("/nonexistent"))
    assert 0 <= found["main thread"] < 60


def test_a_training_holds_whole_rows_and_commits() -> None:
    assert Training(steps=20, rows=5, commit_steps=10).commits == [10, 20]
    with pytest.raises(ValueError, match="not multiples"):
        Training(steps=20, rows=6)


def test_the_run_file_commits_at_ends_of_segments(tmp_path: Path) -> None:
    from baton.tasks.foundation.contracts.run_file import load_run_file

    training = Training(steps=20, rows=5, commit_steps=10)
    file = write_run_file(TINY, training, tmp_path, tmp_path / "x.npz", data={"validation_fraction": 0.5})
    spec = load_run_file(file).spec
    assert (spec.train.steps, spec.train.segment_steps, spec.train.log_every_steps) == (20, 10, 5)
    assert (spec.data.source, spec.data.validation_fraction) == ("npz", 0.5)


@pytest.fixture
def without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms are forks of a process that has imported TensorFlow; none of them waits for Prefect, none needs Orbit."""
    monkeypatch.setattr(process, "Popen", forked.Popen)
    monkeypatch.setattr(Baton, "run", Baton.without_prefect)
    wall = sys.modules[wall_clock.__module__]
    monkeypatch.setattr(wall, "PEERS", tuple(name for name in wall.PEERS if name != "Orbit"))  # from the network


@pytest.mark.parametrize(
    ("seen", "kept"), [([0.1, 9], [0.1]), ([1, 0.2, 9], [0.2]), ([1, 2, 3, 9], [3])], ids=["quiet", "soon", "busy"]
)
def test_an_arm_waits_for_a_quiet_machine_a_while(
    seen: list[float], kept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, loads = sys.modules[Bench.__module__], iter(seen)
    monkeypatch.setattr(module, "busy_cores", lambda _seconds: next(loads))
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0)
    bench = Bench(folder=tmp_path, batons=[], peer_python=sys.executable, rounds=1, patience=3)
    bench.run(arm(bench.fresh(), "print('step 1/1')"), until_step(1))
    assert bench.loads == kept
    assert f"above 0.3 at {int(kept[0] > 0.3)}." in bench.load_words()


def test_a_busy_core_is_seen() -> None:
    until = time.monotonic() + 0.5

    def work() -> None:
        while time.monotonic() < until:
            pass

    worker = threading.Thread(target=work)
    worker.start()
    assert busy_cores(0.5) > 0.1  # others may use the cores too
    worker.join()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("without_prefect")
def test_every_arm_of_the_wall_clock_runs(tmp_path: Path) -> None:
    baton = Baton(label="", checkout=CHECKOUT, prefect_home=tmp_path / "prefect")
    bench = Bench(folder=tmp_path, batons=[baton], peer_python=sys.executable, rounds=1)
    wall_clock(bench, WallClock(workload=TINY, interval=0.1, seconds=0.2, rounds=1, peer_rounds=1, derive=(30.0,)))
    assert bench.notes == []
    named = {figure.name for figure in bench.figures}
    for name in ("baton run", "Baton without Prefect", *sys.modules[wall_clock.__module__].PEERS):
        assert f"{name}, first step → last commit" in named
    assert PLAIN not in named


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("without_prefect")
def test_every_other_figure_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of `--trial` but Prefect, starts, the wall clock (see the test above), and peers of steps a second."""
    found: dict[str, list[str]] = {}
    for letter, figure in list(main._FIGURES.items()):

        def counted(bench: Bench, plan: Plan, *, letter: str = letter, figure: Any = figure) -> None:
            before = len(bench.figures)
            figure(bench, plan)
            found[letter] = [one.name for one in bench.figures[before:]]

        monkeypatch.setitem(main._FIGURES, letter, counted)
    words = ["--trial", "--no-peers", "--only", "cefgiklmno", "--folder", str(tmp_path)]
    code = main.main([*words, "--output", str(tmp_path / "RESULTS.md")])
    assert code == 0, capfd.readouterr().err
    assert sorted(found) == list("cefgiklmno")
    assert all(found.values()), found
    assert (tmp_path / "RESULTS.md").read_text().count("\n## ") >= len(found)
