"""Chaos: hundreds of interruptions of real runs, and after each a look whether all that was committed is there.

`python -m tests.end_to_end.chaos [--seed 0] [--training 200] [--moments all] [--lanes 2] [--runs digits,text]`, or
`make chaos`.

Two parts. Training processes on the shipped runs, shortened, are interrupted in the ways of `interruptions.py`, drawn
from the seed; every run so treated is taken to its end in the end, and compared with the same run left alone. And a
process without TensorFlow that goes the same way to a commit (`run_commits.py`) kills itself before and after every
single call of the store and of the file system, retiring and sweeping included.

Only what really hit counts: the kernel said that the process was alive, and it ended as that interruption ends one.
Exits 1 if anything was off. No number of it is a time, so it may be run beside other work.
"""

import argparse
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
from tests.support.chaos_tally import Tally, Witness
from tests.support.checkout import CHECKOUT
from tests.support.disks import SmallDisk, may_mount, small_disk
from tests.support.homes import commits_in, entries_of, folders_of, head_of, temporary_files
from tests.support.interruptions import KINDS, Scene
from tests.support.training_child import Child

STOPPABLE = CHECKOUT / "tests" / "support" / "run_stoppable.py"
COMMITS = CHECKOUT / "tests" / "support" / "run_commits.py"
# Some forty commits a run, so that a dozen interruptions fall into it; a process lives a few seconds beyond its start.
SHAPES = {
    "digits": ["train.steps=3000", "train.segment_steps=75", "train.log_every_steps=50", "evaluate.every_steps=600"],
    "text": ["train.steps=1200", "train.segment_steps=30", "train.log_every_steps=20", "evaluate.every_steps=300"],
}
# Interruptions are no lack of progress here, however many come in a row.
ALWAYS = ["stop.attempts_without_progress=1000", "checkpoint.keep_last=3"]
BEFORE, KILLED, AFTER = 50, 60, 80


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done.

    Attributes:
        seed: of everything that is drawn.
        training: interruptions of training processes that are to hit.
        moments: kills at moments of a commit without TensorFlow; None: at every one.
        lanes: processes side by side.
        runs: run files that take turns.
        folder: an empty folder for the runs.
    """

    seed: int = 0
    training: int = 200
    moments: int | None = None
    lanes: int = 2
    runs: tuple[str, ...] = ("digits", "text")
    folder: Path


def chaos(plan: Plan, say: Callable[[str], None]) -> Tally:
    """Do it; `say` is given one line at a time."""
    tally = Tally(say)
    with ThreadPoolExecutor(plan.lanes) as lanes:
        commits = lanes.submit(_at_moments, plan, tally)
        for run in plan.runs:
            _straight(plan, run)
        rounds = list(lanes.map(lambda lane: _lane(plan, lane, tally), range(plan.lanes)))
        commits.result()
    tally.tell(f"{sum(rounds)} runs were taken to their end and compared")
    return tally


def _straight(plan: Plan, run: str) -> Path:
    """The same run file, left alone; returns its home."""
    storage = plan.folder / f"straight-{run}"
    child = Child(run, storage, extra=[*SHAPES[run], *ALWAYS], notes=plan.folder, driver=STOPPABLE)
    child.finish(0)
    return child.home


def _home_of_straight(plan: Plan, run: str) -> Path:
    return next(path.parent for path in (plan.folder / f"straight-{run}").glob("*/log"))


def _lane(plan: Plan, lane: int, tally: Tally) -> int:
    """Rounds until this lane's share of the interruptions has hit; returns how many runs that took."""
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
    """One run, interrupted until all kinds had their turn or it is done, then taken to its end and compared."""
    straight = _home_of_straight(plan, run)
    storage = plan.folder / name.replace(" ", "-")
    storage.mkdir()
    shutil.copytree(straight.parent / "datasets", storage / "datasets")
    with _disk(storage / straight.name, chance) as disk:
        known = {ref.step: ref.state_digest for ref in commits_in(entries_of(straight))}
        witness = Witness(storage / straight.name, known, tally)

        def start(*options: str) -> Child:
            extra = [*SHAPES[run], *ALWAYS]
            return Child(run, storage, *options, extra=extra, notes=plan.folder, driver=STOPPABLE)

        scene = Scene(start, storage / straight.name, disk, chance, witness)
        hits = 0
        for kind in chance.sample(sorted(KINDS), len(KINDS)):
            if hits == wanted or _is_done(scene.home, straight):
                break
            began = time.monotonic()
            hit = KINDS[kind](scene)
            hits += hit
            with tally.row(kind) as row:
                row.hit += hit
                row.missed += not hit
            witness.look(kind)
            head = head_of(scene.home)
            step = head.tip.step if head and head.tip else 0
            tally.tell(
                f"{tally.hits:4d}  {name}  {kind:<18} {'hit' if hit else 'missed'}  tip at step {step}, "
                f"{head.commits if head else 0} commits, {time.monotonic() - began:.0f} s"
            )
        last = start().finish()
        if last.code != 0:
            witness.fault("other", f"going on to the end failed with {last.code}: {last.stderr[-1500:]}")
        else:
            witness.end(straight)
    shutil.rmtree(storage, ignore_errors=True)
    return hits


def _is_done(home: Path, straight: Path) -> bool:
    here, there = head_of(home), head_of(straight)
    return bool(here and there and here.tip and there.tip and here.tip.step >= there.tip.step)


@contextmanager
def _disk(home: Path, chance: random.Random) -> Iterator[SmallDisk | None]:
    """Every other home is a small disk of its own, where one can be mounted."""
    if chance.random() < 0.5 or not may_mount():
        yield None
        return
    with small_disk(home, "8m") as disk:
        yield disk


def _at_moments(plan: Plan, tally: Tally) -> None:
    """Kill a commit at its moments, each time from the same beginning; then go on, and compare."""
    begun, straight = plan.folder / "commits-begun", plan.folder / "commits-straight"
    if _commits(begun, BEFORE).returncode:
        raise RuntimeError("no run can be begun")
    # What another process left behind when it lost; the commit will sweep it.
    garbage = begun / "checkpoints" / f"{BEFORE:08d}-{1:08d}-{'f' * 32}"
    garbage.mkdir()
    (garbage / "ckpt.data").write_bytes(b"torn")
    shutil.copytree(begun, straight)
    moments = int(_commits(straight, KILLED, "--count").stdout)
    if _commits(straight, AFTER).returncode:
        raise RuntimeError("commits fail even where nothing happens to them")
    known = {ref.step: ref.state_digest for ref in commits_in(entries_of(straight))}
    chosen: Sequence[int] = range(moments)
    if plan.moments is not None:
        chosen = sorted(random.Random(plan.seed).sample(chosen, min(plan.moments, moments)))
    tally.tell(f"a commit has {moments} moments; killing at {len(chosen)} of them")
    for moment in chosen:
        home = plan.folder / f"commits-{moment}"
        shutil.copytree(begun, home)
        witness = Witness(home, known, tally)
        witness.look("SIGKILL at a call")
        hit = _commits(home, KILLED, "--kill-at", str(moment)).returncode == -signal.SIGKILL
        with tally.row("SIGKILL at a call") as row:
            row.hit += hit
            row.missed += not hit
        witness.look("SIGKILL at a call")
        gone_on = _commits(home, AFTER)
        if gone_on.returncode == 0:
            witness.end(straight)
            _same_house(home, straight, witness)
        else:
            witness.fault("other", f"going on after moment {moment} failed: {gone_on.stderr[-1000:]}")
        shutil.rmtree(home)
        if moment % 20 == 0:
            tally.tell(f"{tally.hits:4d}  killed at moment {moment} of {moments}, gone on, compared")


def _same_house(home: Path, straight: Path, witness: Witness) -> None:
    """What is kept, and what lies about, is what it would have been."""
    here, there = head_of(home), head_of(straight)
    if here is None or there is None:
        raise AssertionError("no log")
    if [ref.step for ref in here.retained] != [ref.step for ref in there.retained]:
        witness.fault("differ", f"kept {[ref.step for ref in here.retained]}")
    named = {ref.path for ref in here.retained} | {old.path for old in here.retired}
    if folders_of(home) != named or temporary_files(home):
        witness.fault("other", f"left behind: {folders_of(home) ^ named} {temporary_files(home)}")


def _commits(home: Path, until_step: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMMITS), str(home), "--until-step", str(until_step), *options]
    return forked.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", type=int, default=200, help="interruptions of training processes")
    parser.add_argument("--moments", default="all", help="kills at calls of a commit: a number, or all")
    parser.add_argument("--lanes", type=int, default=2, help="runs side by side")
    parser.add_argument("--runs", default="digits,text", help="run files that take turns")
    options = parser.parse_args()
    began = time.monotonic()

    def say(line: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - began:6.0f} s] {line}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        tally = chaos(
            Plan(
                seed=options.seed,
                training=options.training,
                moments=None if options.moments == "all" else int(options.moments),
                lanes=options.lanes,
                runs=tuple(options.runs.split(",")),
                folder=Path(folder),
            ),
            say,
        )
    for line in tally.table():
        say(line)
    say("something is OFF, see above" if tally.bad else "all that was committed stayed, and every end is the same")
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
