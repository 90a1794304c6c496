"""The opened run: its settings, its storage and its log; the goal of a command; and what the command reached.

A command or a flow opens a run once. Everything that it calls takes the opened run, never an address or a file. A
command aims at an absolute step, so that repeating it is harmless. What it reached is read from the log when it ends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks.foundation.contracts.log_entry import Entry, Head
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.contracts.run_spec import RunSpec, needs_examples, with_recorded_examples
from tasks.foundation.errors import (
    AnotherVersion,
    InvalidInput,
    NoSuchRun,
    PathRefused,
    RunFileError,
    RunLogError,
)
from tasks.foundation.runlog.attempts import AttemptReader
from tasks.foundation.runlog.commits import evaluation_due, is_test_due
from tasks.foundation.runlog.entry_paths import FIRST_ENTRY, entry_number
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_home, open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHome:
    """The home of a run, with its log. It needs no run file, so status, log and verify work without one.

    Attributes:
        root: the storage that holds the run and its dataset.
        home: the run's folder in it.
        log: the run's commit log.
        attempts: the records of the attempts at it.
    """

    root: Storage
    home: Storage
    log: RunLog
    attempts: AttemptReader = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attempts", AttemptReader(self.home))

    @classmethod
    def at(cls, root: Storage, name: str) -> "RunHome":
        """Return the home of the run `name`; with an empty name, the root itself is the home."""
        home = root.at(name) if name else root
        return cls(root=root, home=home, log=RunLog(home))

    @property
    def name(self) -> str:
        """The run's name, which is the last part of its home's address."""
        return self.home.uri.rsplit("/", 1)[-1]

    def require_newest(self) -> Entry:
        """Return the newest entry.

        Raises:
            RunLogError: the newest entry, or the first one, cannot be read.
        """
        newest = self.log.newest()
        if newest is None:
            raise RunLogError(f"{self.home.uri}/{FIRST_ENTRY} is missing, but later entries exist; restore it")
        return newest

    def require_head(self) -> Head:
        """Return the folded state of the newest entry; see `require_newest`."""
        return self.require_newest().head


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHome):
    """A run with its settings.

    Attributes:
        spec: the run file's content.
        folder: the folder that paths of user code and data, and a relative storage address, start from.
        file: the run file; None in a stage that received the settings in its call.
    """

    spec: RunSpec
    folder: Path
    file: Path | None

    @classmethod
    def open(cls, run_file: RunFile) -> "Run":
        """Open the run that a run file describes. Reads and writes nothing.

        Raises:
            InvalidInput: the storage address cannot be used.
        """
        return cls.of(run_file.spec, run_file.folder, root=storage_of(run_file), file=run_file.path)

    @classmethod
    def of(cls, spec: RunSpec, folder: Path, *, root: Storage | None = None, file: Path | None = None) -> "Run":
        """Open the run with these settings. Reads and writes nothing.

        Args:
            spec: the settings.
            folder: the folder that relative paths start from.
            root: the storage, if it is open already.
            file: the run file, if there is one.

        Raises:
            InvalidInput: the storage address cannot be used.
        """
        root = open_storage(spec.storage, relative_to=folder) if root is None else root
        home = root.at(spec.run)
        return cls(spec=spec, folder=folder, file=file, root=root, home=home, log=RunLog(home))

    def with_recorded_examples(self, head: Head | None) -> "Run":
        """The run with the number of training examples that its log has, if its settings count in epochs.

        It stays as it is if the run has not begun, or an earlier version began it: then the prepared dataset tells.
        """
        if head is None or not needs_examples(self.spec):
            return self
        return replace(self, spec=with_recorded_examples(self.spec, head.identity))


def storage_of(run_file: RunFile) -> Storage:
    """Open the storage root that a run file names.

    Raises:
        InvalidInput: the storage address cannot be used.
    """
    return open_storage(run_file.spec.storage, relative_to=run_file.folder)


def names_run_file(address: str) -> bool:
    """Return whether an address names a run file: it ends in .yaml or .yml, or it is a file."""
    return "://" not in address and (address.endswith((".yaml", ".yml")) or Path(address).is_file())


def open_run(address: str, overrides: Sequence[str] | None = None) -> Run | RunHome:
    """Open an existing run.

    Args:
        address: a run file, or the folder or URI of a run's home.
        overrides: `key=value` each, such as train.steps=100; only for a run file.

    Returns:
        A `Run` for a run file, a `RunHome` for a home.

    Raises:
        RunFileError: the run file cannot be used.
        InvalidInput: the storage address cannot be used, or there are overrides but no run file.
        NoSuchRun: the address holds no log.
    """
    opened: Run | RunHome
    if names_run_file(address):
        opened = Run.open(load_run_file(Path(address), overrides or ()))
        remedy = f"the run file {address} has not been run yet; start it with: baton run {address}"
    else:
        refuse_overrides(address, overrides)
        root, home = open_home(address, relative_to=Path.cwd())
        opened = RunHome(root=root, home=home, log=RunLog(home))
        remedy = "name a run file, or a run's home, <storage>/<run>; `baton list` shows the runs of a storage folder"
    if not _has_begun(opened):
        raise NoSuchRun(f"no run is at {opened.home.uri} (it holds no {FIRST_ENTRY}): {remedy}")
    return opened


def refuse_overrides(address: str, overrides: Sequence[str] | None) -> None:
    """Refuse `--set` for an address that is not a run file.

    Raises:
        InvalidInput: there are overrides.
    """
    if overrides:
        raise InvalidInput(
            f"--set {overrides[0]} changes a key of a run file, but {address} is not one; leave --set out, or name the "
            "run file (it ends in .yaml)"
        )


def _has_begun(opened: RunHome) -> bool:
    """Whether there is a log. Its newest entry is read and remembered, because most commands need nothing else."""
    try:
        if opened.log.newest() is not None:
            return True
    except (RunLogError, AnotherVersion, PathRefused):
        return True  # the command meets the same error
    return holds_a_log(opened.home)


def holds_a_log(home: Storage) -> bool:
    """Return whether a folder is a run's home."""
    # A run that lost its first entry is damaged, but it is still a run.
    return home.exists(FIRST_ENTRY) or any(entry_number(path) is not None for path in home.files("log"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of a command: how far it trains, and when it stops earlier.

    Attributes:
        until_step: the absolute step to train to; None: the run file's target.
        max_segments: stop after this many segments; None: no limit.
        max_seconds: stop after this many seconds; None: no limit.
        cuts: steps where a segment ends in addition to the run file's, so that they are committed.
    """

    until_step: int | None
    max_segments: int | None
    max_seconds: float | None
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        *,
        until_step: int | None = None,
        max_segments: int | None = None,
        max_seconds: float | None = None,
        cuts: Sequence[int] = (),
    ) -> "Goal":
        """Make the goal of a command from its run file and its options.

        Args:
            spec: the run file's content.
            until_step: the absolute step to train to; None: train.steps, or the end of train.epochs.
            max_segments: stop after this many segments; None: no limit.
            max_seconds: stop after this many seconds; None: train.stop_after_seconds.
            cuts: steps to commit in addition.

        Raises:
            RunFileError: a limit is below 1, `max_seconds` is not positive and finite, or the step is beyond
                the target.
        """
        for name, value in (("--until-step", until_step), ("--max-segments", max_segments)):
            if value is not None and value < 1:
                raise RunFileError(f"{name} = {value} must be at least 1")
        if max_seconds is not None and not (max_seconds > 0 and math.isfinite(max_seconds)):
            raise RunFileError(f"--max-seconds = {max_seconds} must be more than 0, and finite")
        goal = cls(
            until_step=until_step,
            max_segments=max_segments,
            max_seconds=spec.train.stop_after_seconds if max_seconds is None else max_seconds,
            cuts=tuple(cuts),
        )
        goal.require_within(spec)
        return goal

    def require_within(self, spec: RunSpec) -> None:
        """Check that the goal is not beyond the run file's target, if that is known.

        Raises:
            RunFileError: it is.
        """
        target, train = spec.train.known_target, spec.train
        if self.until_step is None or target is None or self.until_step <= target:
            return
        if train.epochs is None:
            raise RunFileError(
                f"--until-step = {self.until_step} lies beyond train.steps = {target}; raise train.steps, "
                f"as with --set train.steps={self.until_step}"
            )
        enough = train.epoch.period().ended_by(self.until_step - 1) + 1
        raise RunFileError(
            f"--until-step = {self.until_step} lies beyond step {target}, the end of train.epochs = {train.epochs}; "
            f"raise train.epochs, as with --set train.epochs={enough}"
        )

    def step(self, spec: RunSpec) -> int:
        """Return the absolute step to train to."""
        return self.until_step or spec.train.target

    def next_cut(self, spec: RunSpec, step: int) -> int:
        """Return the step where the segment that starts at `step` has to end, at the latest."""
        return min((cut for cut in self.cuts if cut > step), default=self.step(spec))

    def reason(self, head: Head, spec: RunSpec) -> str:
        """Return the exit reason of a command that reached the goal."""
        if head.finished is not None and (head.tip is None or head.tip.step < self.step(spec)):
            return "finished_early"
        return "complete" if self.step(spec) == spec.train.target else "until_step"

    def reached(self, head: Head | None, spec: RunSpec) -> bool:
        """Return whether no work is left: the run is at the goal's step, or callbacks ended it earlier.

        A run without a checkpoint, or with an evaluation or a test that is still due, has not reached its goal. The end
        of an epoch is not known before the number of training examples is.
        """
        if needs_examples(spec):
            return False
        if head is None or head.tip is None or evaluation_due(head, spec) or is_test_due(head, spec):
            return False
        return self.is_trained(head, spec)

    def is_trained(self, head: Head, spec: RunSpec) -> bool:
        """Return whether no step is left to train; evaluations may be. It must be known where epochs end."""
        return head.finished is not None or (head.tip is not None and head.tip.step >= self.step(spec))


def override_to_continue(spec: RunSpec, step: int, target: int | None) -> str | None:
    """Return the `key=value` with which a run at `step` has steps left to train; None if its run file says enough.

    Args:
        spec: the run file's content.
        step: of the tip.
        target: the step to train to; if it is not ahead, the run gets twice as long.
    """
    train, own = spec.train, spec.train.known_target
    if own is None or own > step:
        return None
    ahead = target if target is not None and target > step else None
    if train.epochs is None:
        return f"train.steps={ahead or 2 * step}"
    return f"train.epochs={2 * train.epochs if ahead is None else train.epoch.period().ended_by(ahead - 1) + 1}"
