"""A relay in this process, with a store and telemetry that a test acts on while a save is in flight."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.flows.admit import Admitted
from baton.flows.opened_run import OpenedRun
from baton.flows.relay import relay
from baton.flows.result import Goal, RelayResult
from baton.flows.runner import InProcess, Runner
from baton.tasks.foundation.contracts.log_entry import Commit
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Event, Phase, Sink, Training
from tests.support.homes import damaged, entries_of, read_history
from tests.support.lab import Lab, spec_of

LONGEST_SECONDS = 120.0
SEGMENT_STEPS = 3


class InLine(InProcess):
    """Says that commits are made elsewhere, so that every save is made in line."""

    remote = frozenset({"checkpoint_to_gcs"})


class HookedStore:
    """Forwards every call to a store; `hook` gets the method's name and its first argument before each."""

    def __init__(self, store: Storage, hook: Callable[[str, object], None]) -> None:
        self._store, self._hook = store, hook

    def at(self, folder: str) -> "HookedStore":
        return HookedStore(self._store.at(folder), self._hook)

    def with_deadline(self, seconds: float) -> "HookedStore":
        return HookedStore(self._store.with_deadline(seconds), self._hook)

    def __getattr__(self, verb: str) -> Any:
        inner = getattr(self._store, verb)
        if not callable(inner):
            return inner

        def call(*arguments: Any, **options: Any) -> Any:
            self._hook(verb, arguments[0] if arguments else None)
            return inner(*arguments, **options)

        return call


class HeldSave:
    """Holds the save of one step until the training has gone on, or somebody waits for the save. Then it acts.

    Attributes:
        acted: whether the save was held, and the action was called.
        trained_to: the last step that was trained before the action.
        latest: the last step that was trained.
        others: sinks that receive every event too.
        after: sinks that receive every event after this one, and may hold the training.
    """

    def __init__(self, step: int, action: Callable[[], object] = lambda: None) -> None:
        self.acted = False
        self.trained_to = 0
        self._step, self._action = step, action
        self._go_on = threading.Event()
        self.latest = 0
        self._begun = False
        self.others: list[Sink] = []
        self.after: list[Sink] = []

    def emit(self, event: Event) -> None:
        for other in self.others:
            other.emit(event)
        match event:
            case Training(step=step):
                self.latest = step
                if step > self._step:
                    self._go_on.set()
            case Phase(cause="stage") if self.latest > self._step - SEGMENT_STEPS:
                self._begun = True
            case Phase(cause="commit") if self._begun:  # somebody waits
                self._go_on.set()
            case _:
                pass
        for sink in self.after:
            sink.emit(event)

    def hook(self, verb: str, path: object) -> None:
        if self.acted or verb != "write_buffers" or not str(path).startswith(f"checkpoints/{self._step:08d}-"):
            return
        assert self._go_on.wait(LONGEST_SECONDS), "the training did not go on"
        self.acted, self.trained_to = True, self.latest
        self._action()


def command(
    lab: Lab, spec: RunSpec, *, held: HeldSave | None = None, runner: Runner | None = None, **goal: Any
) -> RelayResult:
    """Run the relay as a command does, from the head of the log to the goal; `goal` as for `Goal.of`."""
    store: Any = lab.storage if held is None else HookedStore(lab.storage, held.hook)
    run = OpenedRun.of(spec, lab.code, root=store)
    admitted = Admitted(
        run=run, goal=Goal.of(spec, **goal), accept=(), try_again=False, take_over=False, head=run.log.head(), notes=()
    )
    return relay(admitted, runner or InProcess(), telemetry=lab.recorder if held is None else held)


def run_of(name: str, **changes: Any) -> RunSpec:
    """Four segments of three steps."""
    settings: dict[str, Any] = {
        "train__steps": 12,
        "train__segment_steps": SEGMENT_STEPS,
        "train__log_every_steps": 2,
        "checkpoint__keep_last": 2,
    }
    return spec_of("plain", run=name, **(settings | changes))


STRAIGHT = run_of("straight")  # of `compared_lab`


def compared_lab(root: Path) -> Lab:
    """A lab for many runs of other names, in which `STRAIGHT` is complete, with saves in line."""
    lab = Lab(root)
    PROCESS_STATE.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.flows.relay.leaves_time", lambda _: False)  # no report
        command(lab, STRAIGHT, runner=InLine())
    return lab


def home_of(lab: Lab, spec: RunSpec) -> Path:
    return lab.root / "storage" / spec.run


def committed(lab: Lab, spec: RunSpec) -> list[int]:
    bodies = [entry.body for entry in entries_of(home_of(lab, spec))]
    return [body.checkpoint.step for body in bodies if isinstance(body, Commit)]


def assert_same_run(lab: Lab, spec: RunSpec, straight: RunSpec) -> None:
    """The run has the state and the history of the straight one, and no damage or foreign reference in its log."""
    here, there = home_of(lab, spec), home_of(lab, straight)
    bodies = [[entry.body for entry in entries_of(home)] for home in (here, there)]
    ends = [[body for body in of_home if isinstance(body, Commit)][-1].checkpoint for of_home in bodies]
    assert (ends[0].step, ends[0].state_digest) == (ends[1].step, ends[1].state_digest)
    assert read_history(here) == read_history(there)
    assert damaged(here) == set()
    for entry in entries_of(here):
        assert '"manifest_digest":""' not in entry.to_json().decode().replace(" ", "")
