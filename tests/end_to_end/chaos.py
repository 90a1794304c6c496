"""Chaos: hundreds of interruptions of real runs, each followed by a check of every commit.

`python -m tests.end_to_end.chaos [--seed 0] [--training 200] [--moments all] [--lanes 2] [--runs digits,text]`, or
`make chaos`.

There are two parts:

- Training processes on the shortened shipped runs are interrupted. The seed chooses the kinds of `interruptions.py`.
  Each run is then trained to its end and compared with the same run without interruptions.
- A process without TensorFlow makes real commits (`run_commits.py`). It kills itself before and after every call of the
  store and of the file system, also while it retires and deletes checkpoints.

An interruption counts only if it hit: the process was alive, and it ended as this kind of interruption ends a process.
Those that hit while a save was in flight, between its snapshot and its log entry, are counted too.
The exit code is 1 if a check failed. Nothing is timed, so other work may run at the same time.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import forked
from tests.support.chaos_tally import HomeChecker, Tally
from tests.support.checkout import CHECKOUT
from tests.support.disks import SmallDisk, can_mount, small_disk
from tests.support.homes import commits_in, entries_of, head_of, temporary_files, unexpected_folders
from tests.support.interruptions import KINDS, Scene
from tests.support.save_marks import VARIABLE, save_in_flight
from tests.support.training_child import Child

STOPPABLE = CHECKOUT / "tests" / "support" / "run_stoppable.py"
COMMITS = CHECKOUT / "tests" / "support" / "run_commits.py"
# About forty commits a run, enough for a dozen interruptions; a process trains for a few seconds.
SHAPES = {
    "digits": ["train.steps=3000", "train.segment_steps=75", "train.log_every_steps=50", "evaluate.every_steps=600"],
    "text": ["train.steps=1200", "train.segment_steps=30", "train.log_every_steps=20", "evaluate.every_steps=300"],
}
# Interruptions in a row must not count as a lack of progress.
ALWAYS = ["stop.attempts_without_progress=1000", "checkpoint.keep_last=3"]
BEFORE, KILLED, AFTER = 50, 60, 80


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a chaos run.

    Attributes:
        seed: determines all random choices.
        training: number of interruptions of training processes.
        moments: number of kills at moments of a commit without TensorFlow; None: every moment.
        lanes: number of runs at the same time.
        runs: names of the run files, used in turn.
        folder: an empty folder for the runs.
    """

    seed: int = 0
    training: int = 200
    moments: int | None = None
    lanes: int = 2
    runs: tuple[str, ...] = ("digits", "text")
    folder: Path


def chaos(plan: Plan, print_line: Callable[[str], None]) -> Tally:
    """Interrupt, check and compare runs; `print_line` receives one line for each event."""
    tally = Tally(print_line)
    with ThreadPoolExecutor(plan.lanes) as lanes:
        commits = lanes.submit(_at_moments, plan, tally)
        for run in plan.runs:
            _straight(plan, run)
        rounds = list(lanes.map(lambda lane: _lane(plan, lane, tally), range(plan.lanes)))
        commits.result()
    tally.log(f"{sum(rounds)} runs were finished and compared")
    return tally


def _straight(plan: Plan, run: str) -> Path:
    """Train the run without interruptions; returns its home."""
    storage = plan.folder / f"straight-{run}"
    child = Child(run, storage, extra=[*SHAPES[run], *ALWAYS], notes=plan.folder, driver=STOPPABLE)
    child.finish(0)
    return child.home


def _straight_home(plan: Plan, run: str) -> Path:
    return next(path.parent for path in (plan.folder / f"straight-{run}").glob("*/log"))


def _lane(plan: Plan, lane: int, tally: Tally) -> int:
    """Interrupt runs until this lane's share of the interruptions has hit; returns the number of runs."""
    share = plan.training // plan.lanes + (lane < plan.training % plan.lanes)
    chance = random.Random(f"{plan.seed}/{lane}")
    hits, number = 0, 0
    while hits < share:
        run = plan.runs[(number + lane) % len(plan.runs)]
        name = f"lane {lane} run {number} ({run})"
        hits += _round(plan, run, chance, tally, name=name, wanted=share - hits)
        number += 1
    return number


def _round(plan: Plan, run: str, chance: random.Random, tally: Tally, *, name: str, wanted: int) -> int:
    """Interrupt a run once by each kind, then finish it and compare it; returns the number of hits."""
    straight = _straight_home(plan, run)
    storage = plan.folder / name.replace(" ", "-")
    storage.mkdir()
    shutil.copytree(straight.parent / "datasets", storage / "datasets")
    with _disk(storage / straight.name, chance) as disk:
        known = {ref.step: ref.state_digest for ref in commits_in(entries_of(straight))}
        checker = HomeChecker(storage / straight.name, known, tally)

        def start(*options: str) -> Child:
            extra = [*SHAPES[run], *ALWAYS]
            return Child(run, storage, *options, extra=extra, notes=plan.folder, driver=STOPPABLE)

        scene = Scene(start, storage / straight.name, disk, chance, checker)
        hits = 0
        # A run may end before each kind had its turn; the next one begins with those that have not hit anything yet.
        for kind in sorted(chance.sample(sorted(KINDS), len(KINDS)), key=tally.has_hit):
            if hits == wanted or _is_done(scene.home, straight):
                break
            began = time.monotonic()
            scene.in_flight = False
            hit = KINDS[kind](scene)
            hits += hit
            with tally.row(kind) as row:
                row.hit += hit
                row.missed += not hit
                row.in_flight += hit and scene.in_flight
            checker.check(kind)
            head = head_of(scene.home)
            step = head.tip.step if head and head.tip else 0
            tally.log(
                f"{tally.hits:4d}  {name}  {kind:<18} {_words(hit, scene.in_flight)}  tip at step {step}, "
                f"{head.commits if head else 0} commits, {time.monotonic() - began:.0f} s"
            )
        last = start().finish()
        if last.code != 0:
            checker.fault("other", f"continuing to the end failed with {last.code}: {last.stderr[-1500:]}")
        else:
            checker.compare(straight)
    shutil.rmtree(storage, ignore_errors=True)
    return hits


def _words(hit: bool, in_flight: bool) -> str:
    return f"hit{', save in flight' if in_flight else ''}" if hit else "missed"


def _is_done(home: Path, straight: Path) -> bool:
    here, there = head_of(home), head_of(straight)
    return bool(here and there and here.tip and there.tip and here.tip.step >= there.tip.step)


@contextmanager
def _disk(home: Path, chance: random.Random) -> Iterator[SmallDisk | None]:
    """Mount a small disk for about half of the homes, where this is possible."""
    if chance.random() < 0.5 or not can_mount():
        yield None
        return
    with small_disk(home, "8m") as disk:
        yield disk


def _at_moments(plan: Plan, tally: Tally) -> None:
    """Kill a commit at each moment, always from the same start. Then continue and compare."""
    begun, straight = plan.folder / "commits-begun", plan.folder / "commits-straight"
    if _run_commits(begun, BEFORE).returncode:
        raise RuntimeError("the run cannot be started")
    # Files of a refused writer; the commit deletes them.
    garbage = begun / "checkpoints" / f"{BEFORE:08d}-{1:08d}-{'f' * 32}"
    garbage.mkdir()
    (garbage / "ckpt.data").write_bytes(b"torn")
    shutil.copytree(begun, straight)
    moments = int(_run_commits(straight, KILLED, "--count").stdout)
    if _run_commits(straight, AFTER).returncode:
        raise RuntimeError("commits fail without interruptions")
    known = {ref.step: ref.state_digest for ref in commits_in(entries_of(straight))}
    chosen: Sequence[int] = range(moments)
    if plan.moments is not None:
        chosen = sorted(random.Random(plan.seed).sample(chosen, min(plan.moments, moments)))
    tally.log(f"a commit has {moments} moments; killing at {len(chosen)} of them")
    for moment in chosen:
        home = plan.folder / f"commits-{moment}"
        shutil.copytree(begun, home)
        checker = HomeChecker(home, known, tally)
        checker.check("SIGKILL at a call")
        marks = plan.folder / f"commits-{moment}.marks"
        killed = _run_commits(home, KILLED, "--kill-at", str(moment), marks=marks)
        hit = killed.returncode == -signal.SIGKILL
        with tally.row("SIGKILL at a call") as row:
            row.hit += hit
            row.missed += not hit
            row.in_flight += hit and save_in_flight(marks)
        checker.check("SIGKILL at a call")
        continued = _run_commits(home, AFTER)
        if continued.returncode == 0:
            checker.compare(straight)
            _compare_checkpoints(home, straight, checker)
        else:
            checker.fault("other", f"continuing after moment {moment} failed: {continued.stderr[-1000:]}")
        shutil.rmtree(home)
        if moment % 20 == 0:
            tally.log(f"{tally.hits:4d}  killed at moment {moment} of {moments}, continued, compared")


def _compare_checkpoints(home: Path, straight: Path, checker: HomeChecker) -> None:
    """Compare the retained checkpoints, and check that no other files are left."""
    here, there = head_of(home), head_of(straight)
    if here is None or there is None:
        raise AssertionError("no log")
    if [ref.step for ref in here.retained] != [ref.step for ref in there.retained]:
        checker.fault("differ", f"kept {[ref.step for ref in here.retained]}")
    unexpected = unexpected_folders(home, here)
    if unexpected or temporary_files(home):
        checker.fault("other", f"left behind: {unexpected} {temporary_files(home)}")


def _run_commits(
    home: Path, until_step: int, *options: str, marks: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMMITS), str(home), "--until-step", str(until_step), *options]
    environment = os.environ if marks is None else {**os.environ, VARIABLE: str(marks)}
    return forked.run(command, capture_output=True, text=True, check=False, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", type=int, default=200, help="interruptions of training processes")
    parser.add_argument("--moments", default="all", help="kills at calls of a commit: a number, or all")
    parser.add_argument("--lanes", type=int, default=2, help="runs at the same time")
    parser.add_argument("--runs", default="digits,text", help="names of the run files, used in turn")
    options = parser.parse_args()
    return run_and_print(
        lambda folder, print_line: chaos(
            Plan(
                seed=options.seed,
                training=options.training,
                moments=None if options.moments == "all" else int(options.moments),
                lanes=options.lanes,
                runs=tuple(options.runs.split(",")),
                folder=folder,
            ),
            print_line,
        )
    )


def run_and_print(interrupt: Callable[[Path, Callable[[str], None]], Tally]) -> int:
    """Interrupt runs in an empty folder, print each event and the table, and return the exit code."""
    began = time.monotonic()
    # The processes import `tests.support`.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))

    def print_line(line: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - began:6.0f} s] {line}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        tally = interrupt(Path(folder), print_line)
    for line in tally.table():
        print_line(line)
    print_line("FAULTS found, see above" if tally.bad else "no commit was lost, and every run ended the same")
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
