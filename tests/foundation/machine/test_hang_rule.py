"""What counts as hung, by an injected clock; nothing that goes on does."""

import re
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.machine.hang import Hang, HangRule
from baton.tasks.foundation.telemetry.events import Committed, Event, Note, Phase, Training, Waiting

COMMITTED = Committed(step=1, path="p", size=1, metrics={})


def trained(step: int = 1) -> Training:
    return Training(step=step, target=9, examples_per_second=1.0)


class Machine:
    """A process whose watch thread checks as it should; the clocks are the test's."""

    def __init__(self, hang_seconds: Literal["auto"] | float | None = 100.0) -> None:
        self.now = self.used = 0.0
        self.downloaded, self.stopping = 0, False
        self.rule = HangRule(
            hang_seconds,
            clock=lambda: self.now,
            processor_seconds=lambda: self.used,
            downloaded_bytes=lambda: self.downloaded,
            stopping=lambda: self.stopping,
            grace_seconds=25.0,
        )

    def emit(self, *events: Event) -> None:
        for event in events:
            self.rule.emit(event)

    def passes(self, seconds: float, *, load: float = 0.01) -> Hang | None:
        """Let time pass, with so much of a processor used; returns the first hang that a check finds."""
        until = self.now + seconds
        while self.now < until:
            step = min(self.rule.check_seconds, until - self.now)
            self.now, self.used = self.now + step, self.used + load * step
            if found := self.rule.check():
                return found
        return None

    def trains(self, *seconds: float) -> None:
        """Train inner loops of these lengths, the first after compilation."""
        self.emit(Phase(cause="compile"), Phase(cause="train"))
        for step, length in enumerate(seconds, 1):
            assert self.passes(length) is None
            self.emit(trained(step))


def test_inner_loop_has_the_grace_period_after_a_stop() -> None:
    quick, slow = Machine(), Machine()
    quick.trains(1, 1)
    slow.trains(1, 20)
    quick.stopping = slow.stopping = True
    found = quick.passes(31)
    assert found is not None
    assert found.limit == 25
    assert slow.passes(59) is None, "three times its longest one"
    assert slow.passes(10) is not None


def test_inner_loop_that_does_not_end_is_a_hang() -> None:
    machine = Machine()
    machine.trains(1, 1)
    assert machine.passes(100) is None
    found = machine.passes(6, load=1.0)  # it may well compute: a collective that polls does
    assert found is not None
    assert (found.what, found.step, found.limit) == ("an inner loop", 2, 100.0)
    assert re.match(r"no inner loop has ended for 10\d s after step 2 \(limit 100 s", found.message)


@pytest.mark.parametrize(
    ("loops", "limit"),
    [((1, 1), 600), ((1, 29, 5), 600), ((1, 40, 5), 800), ((50, 1), 600), ((500,), 1500), ((500, 1), 600)],
)
def test_auto_limit_follows_the_longest_inner_loop(loops: tuple[float, ...], limit: float) -> None:
    machine = Machine("auto")
    machine.trains(*loops)
    assert machine.rule.limit == limit
    assert machine.passes(limit) is None
    assert machine.passes(10) is not None


def test_steps_longer_than_the_limit_are_no_hang() -> None:
    """A step of 700 s on a processor, with a row logged and callbacks called after each."""
    machine = Machine("auto")
    machine.emit(Phase(cause="compile"), Phase(cause="train"))
    for step, limit in ((1, 2100), (2, 14_000), (3, 14_000)):
        assert machine.passes(700, load=1.0) is None
        machine.emit(Waiting(on="callbacks"))
        assert machine.passes(1) is None
        machine.emit(trained(step))
        assert machine.rule.limit == limit


def test_limit_is_never_shorter_than_three_inner_loops() -> None:
    machine = Machine(10.0)
    machine.trains(50)
    assert machine.passes(149) is None
    machine.emit(trained())
    machine.emit(trained())
    assert machine.rule.limit == 3 * 149


@pytest.mark.parametrize("cause", ["build", "restore", "compile", "stage", "commit", "evaluate"])
def test_other_phases_have_six_times_the_limit(cause: str) -> None:
    machine = Machine()
    machine.trains(1, 1)
    machine.emit(Phase(cause=cause))
    assert machine.passes(590) is None
    found = machine.passes(20)
    assert found is not None
    assert found.what == cause
    assert found.limit == 600


@pytest.mark.parametrize("begins", [Phase(cause="evaluate"), Phase(cause="compile"), Waiting(on="callbacks")])
def test_what_computes_outside_of_inner_loops_is_alive(begins: Event) -> None:
    machine = Machine()
    machine.trains(1, 1)
    machine.emit(begins)
    assert machine.passes(100_000, load=0.2) is None
    assert machine.passes(700) is not None


def test_first_inner_loop_after_compilation_may_take_longer() -> None:
    machine = Machine()
    machine.trains(1, 1)
    machine.emit(Phase(cause="compile"), Phase(cause="train"))
    assert machine.passes(590) is None
    machine.emit(trained(3))
    assert machine.passes(290) is None  # three times as long, until another one has ended
    machine.emit(trained(4))
    machine.emit(Phase(cause="commit"), Phase(cause="train"))  # within a segment, nothing is compiled
    found = machine.passes(900)
    assert found is not None
    assert found.what == "an inner loop"


@pytest.mark.parametrize(
    "begins",
    [Phase(cause="start-up"), Phase(cause="prepare-data"), Phase(cause="launch"), Phase(cause="report"),
     Waiting(on="a remote stage")],
)  # fmt: skip
def test_what_has_other_limits_is_not_watched(begins: Event) -> None:
    machine = Machine()
    machine.trains(1, 1)
    machine.emit(begins)
    assert machine.passes(100_000) is None


def test_null_means_never() -> None:
    machine = Machine(None)
    machine.trains(1, 1)
    assert machine.passes(100_000) is None


def test_commit_beside_the_training_is_no_sign_of_life() -> None:
    machine = Machine()
    machine.trains(1, 1)
    assert machine.passes(90) is None
    machine.emit(COMMITTED, Note(text="retrying", warning=True))
    assert machine.passes(20) is not None
    machine.emit(Phase(cause="commit"))
    assert machine.passes(590) is None
    machine.emit(COMMITTED)  # here, training waits for it
    assert machine.passes(590) is None


@given(
    stopped=st.floats(60, 1e6), before=st.floats(0, 90), after=st.floats(0, 90),
    begins=st.sampled_from([None, Phase(cause="restore"), Waiting(on="callbacks")]),
)  # fmt: skip
def test_stopped_process_gets_another_full_period(
    stopped: float, before: float, after: float, begins: Event | None
) -> None:
    """SIGSTOP and SIGCONT, or a machine that is suspended under a clock that counts it."""
    machine = Machine()
    machine.trains(1, 1)
    if begins is not None:
        machine.emit(begins)
    assert machine.passes(before) is None
    machine.now += stopped
    assert machine.passes(after) is None
    limit = machine.rule.limit
    assert limit is not None
    assert machine.passes(limit + 20) is not None


def test_input_that_still_arrives_is_no_hang() -> None:
    """A window of shards comes over a slow link, a block a minute."""
    machine = Machine()
    machine.trains(1, 1)
    for _ in range(20):
        assert machine.passes(60) is None
        machine.downloaded += 1
    assert machine.passes(95) is None
    assert machine.passes(20) is not None


def test_late_checks_of_a_busy_machine_count_less() -> None:
    machine = Machine()
    machine.trains(1, 1)
    for _ in range(10):  # of 40 s each; a check is due every 5 s
        machine.now += 40
        assert machine.rule.check() is None
    assert machine.passes(110) is not None


def test_time_in_which_the_process_was_stopped_is_no_loop() -> None:
    machine = Machine("auto")
    machine.trains(1, 1)
    machine.now += 50_000
    machine.emit(trained(3))  # before the next check
    assert machine.rule.limit == 600
    assert machine.passes(2) is None
    machine.now += 50_000
    assert machine.passes(1) is None
    machine.emit(trained(4))
    assert machine.rule.limit == 600


PHASES = ["build", "restore", "compile", "train", "stage", "commit", "evaluate", "prepare-data", "launch", "report"]
EVENTS = [
    *(Phase(cause=cause) for cause in PHASES), *(trained(step) for step in range(4)), Waiting(on="callbacks"),
    Waiting(on="the save in flight"), Waiting(on="a remote stage"), COMMITTED,
]  # fmt: skip


@given(
    base=st.floats(1, 2000),
    steps=st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 0.99), st.floats(0, 1.2)), max_size=30),
)
def test_nothing_is_a_hang_that_gives_signs_in_time(base: float, steps: list[tuple[Event, float, float]]) -> None:
    """Whatever comes in whatever order: no alarm as long as the time between two events is below the limit."""
    machine = Machine(base)
    for event, part, load in steps:
        machine.emit(event)
        limit = machine.rule.limit
        before = machine.now
        if not isinstance(event, Committed):  # no sign of life within an inner loop
            assert machine.passes(part * (base if limit is None else limit), load=load) is None
        assert machine.now >= before


@given(base=st.floats(1, 2000), event=st.sampled_from(EVENTS), load=st.floats(0, 0.09))
def test_silence_is_found_soon_after_the_limit(base: float, event: Event, load: float) -> None:
    machine = Machine(base)
    machine.emit(event)
    limit = machine.rule.limit
    if limit is None:
        return
    assert machine.passes(limit + 3 * machine.rule.check_seconds, load=load) is not None
    assert machine.now <= limit + 2 * machine.rule.check_seconds
