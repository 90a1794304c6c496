"""Stop requests: the first one counts, the grace period starts with a notice, and failing sinks are harmless."""

import math
from collections.abc import Callable

import pytest

from baton.tasks.foundation.contracts.log_entry import StopReason
from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine.stops import Stop, Stops
from baton.tasks.foundation.storage.transfers import Deadline
from baton.tasks.foundation.telemetry.events import Event
from tests.support.clock import FakeClock
from tests.support.event_recorder import EventRecorder
from tests.support.training_process import wait_for

SPEC = StopSpec(grace_seconds=25.0)


@pytest.mark.parametrize("reason", ["sigterm", "sigint", "preempted", "maintenance"])
def test_every_stop_limits_the_time_for_the_store(reason: StopReason) -> None:
    """Also after Ctrl-C: no machine ends, but the process should not wait for minutes."""
    clock, leaving = FakeClock(100.0), Deadline()
    stops = Stops(SPEC, clock=clock, telemetry=EventRecorder(), leaving=leaving)
    stops.stop_within(0)
    assert stops.requested is not None
    assert not leaving.is_set, "a time budget does not limit the time for the store"
    stops.request_stop(reason)
    wait_for(lambda: leaving.is_set)
    assert 0 < leaving.remaining() <= SPEC.grace_seconds


@pytest.mark.parametrize(
    ("ask", "grace"),
    [
        (lambda stops: stops.request_stop("preempted"), 25.0 - 3),
        (lambda stops: stops.request_stop("sigterm"), 25.0 - 3),
        (lambda stops: stops.request_stop("sigint"), math.inf),
        (lambda stops: stops.stop_within(0), math.inf),
    ],
)
def test_grace_is_left_only_if_the_machine_ends(ask: Callable[[Stops], None], grace: float) -> None:
    clock = FakeClock(100.0)
    stops = Stops(SPEC, clock=clock, telemetry=EventRecorder())
    ask(stops)
    clock.seconds += 3
    assert stops.requested is not None
    assert stops.requested.at == 100.0
    assert stops.grace_left() == grace


def test_a_host_among_others_leaves_after_the_grace_period() -> None:
    clock = FakeClock(100.0)
    alone, together = (Stops(SPEC, clock=clock, telemetry=EventRecorder()) for _ in range(2))
    together.together = True
    for stops in (alone, together):
        stops.request_stop("sigterm")
        assert not stops.may_leave
        stops.unsaved_work = False
    assert (alone.may_leave, together.may_leave) == (True, False)
    clock.seconds += SPEC.grace_seconds
    assert together.may_leave


def test_the_first_request_stays() -> None:
    clock = FakeClock(100.0)
    stops = Stops(SPEC, clock=clock, telemetry=EventRecorder())
    stops.stop_within(50)
    clock.seconds += 10
    stops.request_stop("sigint")
    clock.seconds += 10
    stops.request_stop("sigterm")
    clock.seconds += 80
    assert stops.requested == Stop("sigint", 110.0)
    assert stops.grace_left() == 25.0 - 80


def test_a_failing_sink_does_not_end_the_work() -> None:
    class Broken:
        def emit(self, event: Event) -> None:
            raise RuntimeError(str(event))

    stops = Stops(SPEC, clock=FakeClock(100.0), telemetry=Broken())
    stops.stop_within(0)
    assert stops.requested is not None
