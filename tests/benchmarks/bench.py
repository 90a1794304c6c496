"""What all figures share: the settings of a measurement, the arms, and the rounds."""

import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.environments import Baton, peer_command
from tests.benchmarks.machine import busy_cores
from tests.benchmarks.process import Arm, ArmFailed, Trace, Until, until_step
from tests.benchmarks.table import Figure
from tests.benchmarks.turns import by_turns
from tests.benchmarks.workloads import Training, Workload, peer_settings, write_examples, write_run_file

_ROW_SECONDS, _TURN_SECONDS = 1.0, 2.0
MOST_LOAD = 0.3  # cores that others may use when an arm starts
LOOKS = 3  # for that, before each arm
_LOOK_SECONDS, _PAUSE_SECONDS = 1.0, 9.0
# No arm reaches it.
FAR_STEPS = 1_000_000
_PEERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "plain loop": ("plain", ()),
    "CheckpointManager": ("checkpoint_manager", ()),
    "fit + BackupAndRestore": ("fit", ()),
    "fit": ("fit", ()),
    "fit, an epoch a commit": ("fit_epochs", ()),
    "Orbit": ("orbit_controller", ()),
    "TensorFlow async": ("async_checkpoint", ()),
}
_SHOWN = 0.03  # seconds; less is not worth a word
_THREADS = "threads.txt"
_PROFILE = Path(__file__).resolve().parent / "profile_hook"


@dataclass(slots=True, kw_only=True)
class Bench:
    """One measurement.

    Attributes:
        folder: for everything that the arms write.
        batons: the checkouts that are measured; the first one is judged.
        peer_python: the interpreter of the peers.
        rounds: how often every arm runs.
        peers: whether the peers run too.
        profile: whether processor seconds are taken by thread.
        patience: how often an arm looks for a machine without other load before it starts; 0: it does not look.
        loads: other load in cores when each arm started.
        figures: what was found.
        notes: what was found besides figures.
    """

    folder: Path
    batons: Sequence[Baton]
    peer_python: str
    rounds: int
    peers: bool = True
    profile: bool = False
    patience: int = 0
    loads: list[float] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _step_seconds: dict[str, float] = field(default_factory=dict)
    _runs: int = 0

    @property
    def threads(self) -> int:
        """Threads of TensorFlow: as many as Baton takes."""
        return len(os.sched_getaffinity(0))

    def say(self, text: str) -> None:
        """A line of progress."""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        sys.stderr.flush()

    def add(self, group: str, name: str, values: Sequence[float], **more: Any) -> None:
        """Keep a figure; without values, for arms that failed, nothing."""
        if values:
            self.figures.append(Figure(group=group, name=name, values=tuple(values), **more))
            self.say("    " + "  ".join(self.figures[-1].words()))

    def wait_until_quiet(self) -> None:
        """Wait a while, if others use the machine."""
        for look in range(self.patience):
            if look:
                self.say(f"  waits: others use {self.loads.pop():.1f} cores")
                time.sleep(_PAUSE_SECONDS)
            self.loads.append(busy_cores(_LOOK_SECONDS))
            if self.loads[-1] <= MOST_LOAD:
                return

    def load_words(self) -> str:
        """The other load of all starts; empty if no arm looked for it."""
        if not self.loads:
            return ""
        above = sum(load > MOST_LOAD for load in self.loads)
        return (
            f"Other load at {len(self.loads)} starts, in cores: median {statistics.median(self.loads):.2f}, most "
            f"{max(self.loads):.2f}; above {MOST_LOAD} at {above}."
        )

    def fresh(self) -> Path:
        """A new empty folder."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs:04d}"
        folder.mkdir(parents=True)
        return folder

    def examples(self, workload: Workload) -> Path:
        """The workload's .npz file."""
        return write_examples(workload, self.folder)

    def peer(self, name: str, workload: Workload, training: Training, *words: str) -> Arm:
        """The arm of a peer."""
        script, own = _PEERS[name]
        folder = self.fresh()
        if name == "fit":
            training = Training(steps=training.steps, rows=training.rows)
        settings = peer_settings(
            workload, training, folder / "checkpoints", self.examples(workload), threads=self.threads
        )
        return Arm(name=name, command=peer_command(self.peer_python, script, settings, *own, *words), folder=folder)

    def baton(
        self, baton: Baton, workload: Workload, training: Training, *, prefect: bool, api: str = "", **keys: Any
    ) -> Arm:
        """The arm of `baton run`, or of training without Prefect, in a new home.

        Args:
            baton: the checkout.
            workload: what is trained.
            training: its length.
            prefect: whether it is `baton run`.
            api: address of a running Prefect server; "": the embedded one.
            keys: more keys of the run file.
        """
        folder = self.fresh()
        write_run_file(workload, training, folder, self.examples(workload), **keys)
        return self.baton_in(baton, folder, prefect=prefect, api=api)

    def baton_in(self, baton: Baton, folder: Path, *, prefect: bool, api: str = "") -> Arm:
        """The same in a folder that has a run file."""
        command = (baton.run if prefect else baton.without_prefect)(folder / "run.yaml")
        environment = baton.environment(api)
        if self.profile:
            environment["PYTHONPATH"] += os.pathsep + str(_PROFILE)
            environment["BENCHMARK_THREADS"] = str(folder / _THREADS)
        name = baton.name("baton run" if prefect else "Baton without Prefect")
        return Arm(name=name, command=command, folder=folder, environment=environment)

    def run(self, arm: Arm, until: Until | None = None, *, keep: bool = False) -> Trace | None:
        """Run an arm and remove its folder; an arm that fails is noted, and gives None."""
        self.wait_until_quiet()
        try:
            trace = arm.run(until, names=arm.folder / _THREADS if self.profile else None)
        except ArmFailed as fault:
            self.notes.append(f"failed: {str(fault).splitlines()[0]}")
            self.say(f"FAILED {fault}")
            return None
        finally:
            if not keep:
                shutil.rmtree(arm.folder, ignore_errors=True)
        if trace.threads and arm.environment.get("BENCHMARK_THREADS"):
            spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in trace.threads.items() if seconds >= _SHOWN)
            self.notes.append(f"{arm.name}, processor seconds from the first row on: {spent}")
            self.say(self.notes[-1])
        return trace

    def in_turn(
        self, arms: Mapping[str, Callable[[], tuple[Arm, Until | None]]], *, rounds: int | None = None
    ) -> list[dict[str, Trace]]:
        """Run every arm once a round; each round begins with another one.

        Returns:
            For each round, what each arm did, without those that failed.
        """
        found = []
        names = list(arms)
        for number in range(self.rounds if rounds is None else rounds):
            traces: dict[str, Trace] = {}
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                arm, until = arms[name]()
                trace = self.run(arm, until)
                if trace is not None:
                    traces[name] = trace
                    self.say(f"  round {number + 1}: {name}: {_words(trace)}")
            found.append(traces)
        return found

    def by_turns(
        self, arms: Mapping[str, Callable[[], Arm]], *, turns: int, rows: int = 1, rounds: int | None = None
    ) -> list[dict[str, list[float]]]:
        """Seconds of `rows` rows of each arm, which train by turns (`turns.py`); new processes each round.

        A round in which an arm fails is noted, and left out.
        """
        found = []
        for number in range(self.rounds if rounds is None else rounds):
            fresh = {name: arm() for name, arm in arms.items()}
            self.wait_until_quiet()
            try:
                found.append(by_turns(fresh, turns=turns, rows=rows))
            except ArmFailed as fault:
                self.notes.append(f"failed: {str(fault).splitlines()[0]}")
                self.say(f"FAILED {fault}")
                continue
            finally:
                for arm in fresh.values():
                    shutil.rmtree(arm.folder, ignore_errors=True)
            words = ", ".join(f"{name} {statistics.median(each):.3f} s" for name, each in found[-1].items())
            self.say(f"  round {number + 1}, {rows} rows: {words}")
        return found

    def endless(self, workload: Workload) -> Training:
        """A training without end and without commits, with a row in about two seconds."""
        rows = max(1, round(_TURN_SECONDS / self.step_seconds(workload)))
        return Training(steps=FAR_STEPS // rows * rows, rows=rows)

    def step_seconds(self, workload: Workload) -> float:
        """Seconds of a step of the plain loop, measured once."""
        if workload.name not in self._step_seconds:
            training = Training(steps=20, rows=5)
            if workload.bytes < 10_000_000:
                training = Training(steps=4000, rows=1000)
            trace = self.run(self.peer("plain loop", workload, training), until_step(training.steps))
            if trace is None:
                raise RuntimeError(f"{workload.name}: the plain loop fails; nothing can be compared with it")
            times = [trace.rows[step] for step in sorted(trace.rows)]
            gaps = [after - before for before, after in itertools.pairwise(times)]
            self._step_seconds[workload.name] = statistics.median(gaps) / training.rows
            self.say(f"{workload.name}: {1000 * self._step_seconds[workload.name]:.1f} ms a step")
        return self._step_seconds[workload.name]

    def training(self, workload: Workload, *, seconds: float, commit_seconds: float) -> Training:
        """A training that takes the plain loop about `seconds`, with a row each second.

        Args:
            workload: what is trained.
            seconds: of the plain loop; rounded to whole commit intervals.
            commit_seconds: between checkpoints.
        """
        step = self.step_seconds(workload)
        rows = max(1, round(min(_ROW_SECONDS, commit_seconds) / step))
        commit_steps = rows * max(1, round(commit_seconds / (rows * step)))
        return Training(
            steps=commit_steps * max(1, round(seconds / commit_seconds)), rows=rows, commit_steps=commit_steps
        )


def _words(trace: Trace) -> str:
    if not trace.rows:
        return ", ".join(f"{name} {values[-1]:.4g}" for name, values in trace.values.items())
    last = f"last commit {trace.to_last_commit:.2f} s, " if trace.commits else ""
    return (
        f"first row after {trace.first_row:.1f} s, last row {trace.to_last_step:.2f} s, {last}"
        f"peak {trace.peak_bytes / 1e6:.0f} MB"
    )
