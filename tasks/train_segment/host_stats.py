"""What each host did between two commits, and what it needed of its own: that shows a slow host.

All hosts take the same time for a step, because a collective in it waits for the slowest. What is a host's own is its
wait for input and the processor time of the threads that train. A host whose processors are shared, throttled or
stopped uses no more processor time than the others, so the time in which its threads could run and did not counts too.
The numbers ride along with the decision that the hosts exchange before each inner loop; the chief keeps an interval of
them every few seconds. With one host, nothing is measured.
"""

import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from baton.tasks.foundation.contracts.log_entry import HostSteps, WorkerStats
from baton.tasks.foundation.log.host_history import MOST_INTERVALS, slow_hosts
from baton.tasks.foundation.machine.devices import Accelerator
from baton.tasks.foundation.telemetry.events import Note, Sink
from baton.tasks.foundation.telemetry.ledger import measured


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerLoop:
    """What one inner loop did on this host.

    Attributes:
        steps: number of steps.
        input_wait_seconds: seconds that it waited for batches.
        losses: of each replica of this host, since metrics were last reset; empty if the step returns none.
    """

    steps: int
    input_wait_seconds: float
    losses: tuple[float, ...]

    @property
    def loss(self) -> float | None:
        """The mean of the losses; None if the step returns none."""
        return sum(self.losses) / len(self.losses) if self.losses else None


class HostStats:
    """Sums over this host's inner loops, and on the chief the newest intervals of all hosts."""

    def __init__(self) -> None:
        self._steps = 0
        self._train_seconds = 0.0
        self._input_wait_seconds = 0.0
        self._losses: tuple[float, ...] = ()
        self._intervals: deque[tuple[HostSteps, ...]] = deque(maxlen=MOST_INTERVALS)

    def add(self, loop: InnerLoop, seconds: float) -> None:
        """Add an inner loop that took `seconds`, including the wait for input."""
        self._steps += loop.steps
        self._train_seconds += seconds
        self._input_wait_seconds += min(loop.input_wait_seconds, seconds)
        self._losses = loop.losses

    def add_interval(self, of_hosts: tuple[HostSteps, ...]) -> None:
        """Add an interval of each host, in their order."""
        self._intervals.append(of_hosts)

    def gather_from_hosts(
        self, accelerator: Accelerator, global_batch_size: int, *, telemetry: Sink
    ) -> tuple[WorkerStats, ...]:
        """The statistics of all hosts, in their order; empty if a value of any host is invalid.

        This is a collective: all hosts call it at the same step.
        """
        if not self._steps:
            return ()
        numbers = [self._steps, self._train_seconds, self._input_wait_seconds, *self._losses]
        local_replicas = accelerator.replicas // accelerator.hosts
        examples_per_step = global_batch_size // accelerator.hosts
        of_hosts = accelerator.gather_from_hosts(numbers).tolist()

        def build() -> tuple[WorkerStats, ...]:
            return tuple(
                WorkerStats(
                    host=host,
                    replicas=local_replicas,
                    steps=int(steps),
                    examples=int(steps) * examples_per_step,
                    train_seconds=train,
                    input_wait_seconds=wait,
                    losses=tuple(losses),
                    intervals=tuple(interval[host] for interval in self._intervals),
                )
                for host, (steps, train, wait, *losses) in enumerate(of_hosts)
            )

        return measured(build, (), what="statistics of the hosts", telemetry=telemetry)


_THREADS: Final = "/proc/self/task"
# A thread that uses less of a processor does not train; after a stop of the process, all of them queue for it.
_LEAST_USE: Final = 0.01
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.01, 0.04
# Another thread may keep Python's lock for 5 ms.
_LATE_SECONDS: Final = 0.01
_MOST_STOPPED: Final = 0.95


class ProcessorTime:
    """The processor time that the threads need which train. From `begin` to `end`, a thread looks for stops."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._ended.set()
        self._stopped = self._stopped_before = 0.0
        self._began = 0.0
        self._before: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Measure from now on; what was before does not count."""
        if self._ended.is_set():
            self._ended = threading.Event()
            look = partial(self._look_for_stops, self._ended)
            threading.Thread(target=look, name="baton-host-stops", daemon=True).start()
        self.lap()

    def lap(self) -> float | None:
        """Seconds since `begin` or the last lap, of all processors; None where the system does not know them.

        The threads that used or waited for a processor, without Baton's own beside the training: only the chief has
        some of them. It is longer by the share of time in which the process was stopped.
        """
        ended, stops, now = time.monotonic(), self._stopped, _thread_times()
        elapsed, stopped, before = ended - self._began, stops - self._stopped_before, self._before
        self._began, self._stopped_before, self._before = ended, stops, now
        if not now or elapsed <= 0:
            return None
        beside = {
            thread.native_id
            for thread in threading.enumerate()
            if thread.name.startswith("baton-") and thread is not threading.current_thread()
        }
        total = 0
        for number, (used, waited) in now.items():
            used_before, waited_before = before.get(number, (0, 0))
            if number not in beside and used - used_before >= _LEAST_USE * elapsed * 1e9:
                total += used - used_before + waited - waited_before
        return total / 1e9 / (1 - min(stopped / elapsed, _MOST_STOPPED))

    def end(self) -> None:
        """Measure no longer."""
        self._ended.set()

    def _look_for_stops(self, ended: threading.Event) -> None:
        """Sleep for random times. A sleep that ends late ended in a stop of the process, which began during it."""
        chance = random.Random()  # noqa: S311 - of its own: the user's draws stay as they are
        began, planned = time.monotonic(), chance.uniform(_SHORTEST_SLEEP, _LONGEST_SLEEP)
        while not ended.wait(planned):
            late = time.monotonic() - began - planned
            if late > _LATE_SECONDS:
                self._stopped += late + planned / 2
            began, planned = time.monotonic(), chance.uniform(_SHORTEST_SLEEP, _LONGEST_SLEEP)


def _thread_times() -> dict[int, tuple[int, int]]:
    """Nanoseconds that each thread of this process has used a processor, and has waited for one."""
    times = {}
    with suppress(OSError), os.scandir(_THREADS) as threads:
        for thread in threads:
            # A thread may have ended, and not every system counts.
            with suppress(OSError, ValueError):
                used, waited, _ = Path(thread.path, "schedstat").read_bytes().split()
                times[int(thread.name)] = int(used), int(waited)
    return times


_INTERVAL_SECONDS: Final = 5.0
_DIGITS: Final = 4


class HostPace:
    """What this host needs of its own for a step, and on the chief which host is slow. It does nothing with one host.

    Time counts between `enter` and `leave`: a commit or an evaluation is no training.
    """

    def __init__(self, accelerator: Accelerator, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure nothing yet.

        Args:
            clock: monotonic time in seconds.
        """
        self._active, self._is_chief, self._clock = accelerator.hosts > 1, accelerator.is_chief, clock
        self._processor = ProcessorTime()
        self._is_warm = False
        self._entered: float | None = None
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        self._processor_seconds: float | None = 0.0
        self._newest: tuple[float, ...] = (math.nan,) * 3 if self._active else ()
        self._ended: int | None = None  # steps of the interval that has just ended
        self._intervals: deque[tuple[HostSteps, ...]] = deque(maxlen=MOST_INTERVALS)
        self._named: set[tuple[int, str]] = set()

    def enter(self) -> None:
        """The training goes on."""
        if self._active:
            self._processor.begin()
            self._entered = self._clock()

    def leave(self) -> None:
        """The training waits for something else, or ends."""
        if self._entered is None:
            return
        self._take_time(self._entered)
        self._entered = None
        self._processor.end()

    def _take_time(self, since: float) -> None:
        """Add the time since then to the interval."""
        now, used = self._clock(), self._processor.lap()
        self._seconds, self._entered = self._seconds + max(now - since, 0.0), now
        both = None if used is None or self._processor_seconds is None else self._processor_seconds + used
        self._processor_seconds = both

    def add(self, loop: InnerLoop) -> None:
        """Add an inner loop. The first one has what happens once, such as TensorFlow's choice of kernels."""
        if not self._is_warm:
            self._is_warm = True
            self.enter()
            return
        self._steps += loop.steps
        self._waited += loop.input_wait_seconds

    def numbers(self) -> tuple[float, ...]:
        """Seconds per step of the newest interval: all, waiting for input, of processors; NaN if not known."""
        if self._entered is None:
            return self._newest
        self._ended = None
        if self._steps and self._seconds + self._clock() - self._entered >= _INTERVAL_SECONDS:
            self._take_time(self._entered)
            used = math.nan if self._processor_seconds is None else self._processor_seconds
            self._newest = tuple(each / self._steps for each in (self._seconds, self._waited, used))
            self._ended, self._steps = self._steps, 0
            self._seconds, self._waited, self._processor_seconds = 0.0, 0.0, 0.0
        return self._newest

    def gathered(self, of_hosts: Sequence[float], step: int, telemetry: Sink) -> tuple[HostSteps, ...]:
        """Take the numbers of all hosts, and report a slow host once.

        Args:
            of_hosts: the `numbers` of each, one after the other.
            step: that all have reached.
            telemetry: receives the note.

        Returns:
            The interval of each host if one has ended; only on the chief.
        """
        if self._ended is None or not self._is_chief:
            return ()
        rows = [of_hosts[begin : begin + len(self._newest)] for begin in range(0, len(of_hosts), len(self._newest))]
        if not all(math.isfinite(number) and number >= 0 for row in rows for number in row[:2]):
            return ()  # a host has no interval yet
        interval = tuple(
            HostSteps(
                step=step,
                steps=self._ended,
                step_seconds=_rounded(seconds),
                input_wait_seconds=_rounded(waited),
                processor_seconds=_rounded(used) if math.isfinite(used) and used >= 0 else None,
            )
            for seconds, waited, used in rows
        )
        self._intervals.append(interval)
        stats = [_stats(host, of_host) for host, of_host in enumerate(zip(*self._intervals, strict=True))]
        for slow in slow_hosts(stats):
            if (slow.host, slow.cause) not in self._named:
                self._named.add((slow.host, slow.cause))
                telemetry.emit(Note(text=slow.words, warning=True))
        return interval


def _stats(host: int, intervals: tuple[HostSteps, ...]) -> WorkerStats:
    """Statistics that have only the intervals."""
    return WorkerStats(
        host=host, replicas=1, steps=0, examples=0, train_seconds=0, input_wait_seconds=0, intervals=intervals
    )


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
