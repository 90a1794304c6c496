"""Retries last to the limit and no longer, and end sooner once this process has a deadline."""

import re
import threading
from itertools import pairwise

import aiohttp
import google.auth.exceptions
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.errors import StorageError, StoreUnreachable
from baton.tasks.foundation.storage.gcs.connection import Retry, RetryPolicy, is_transient, retrying
from baton.tasks.foundation.storage.gcs.responses import ChecksumMismatch, ErrorResponse, MalformedResponse
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE, Deadline
from tests.fakes.gcs.server import FakeGcs, FaultPlan

GAVE_UP = re.compile(r"gave up after (?:(\d+) attempts|one attempt) in (\d+\.\d) s \(BATON_STORAGE_PATIENCE_SECONDS=")
SECONDS = st.floats(0.01, 1000, allow_nan=False)


class FakeTime(Deadline):
    """A deadline whose clock moves only by sleeping and by attempts."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.waits: list[tuple[float, float]] = []
        super().__init__(lambda: self.seconds)

    def sleep(self, seconds: float) -> None:
        self.waits.append((self.seconds, self.seconds + seconds))
        self.seconds += seconds


class Failing:
    """Work that fails on each attempt. The process may be asked to stop during one of them.

    takes: seconds of each attempt, in turn.
    stop_at: the attempt during which the deadline starts, with `grace` seconds.
    """

    def __init__(self, time: FakeTime, takes: list[float], *, stop_at: int | None = None, grace: float = 0.0) -> None:
        self.time, self.takes, self.stop_at, self.grace = time, takes, stop_at, grace
        self.began: list[float] = []

    def __call__(self) -> None:
        if len(self.began) == self.stop_at:
            self.time.start(self.grace)
        self.began.append(self.time.seconds)
        self.time.seconds += self.takes[(len(self.began) - 1) % len(self.takes)]
        raise TimeoutError


def error_of(time: FakeTime, work: Failing, policy: RetryPolicy) -> StorageError:
    with pytest.raises(StorageError) as error:
        retrying(work, Retry("gs://b/x", policy, deadline=time))
    return error.value


@given(total=SECONDS, first_wait=st.floats(0.001, 5), takes=st.lists(st.floats(0, 20), min_size=1, max_size=5))
def test_retries_last_to_the_limit_and_report_time_and_attempts(
    total: float, first_wait: float, takes: list[float]
) -> None:
    time = FakeTime()
    work = Failing(time, takes)
    error = error_of(time, work, RetryPolicy(total_seconds=total, first_wait_seconds=first_wait))
    limit = work.began[0] + takes[0] + total
    # The last attempt begins at the limit, unless a slow one went beyond it, and no wait follows it.
    assert work.began[-1] >= limit - 1e-6 or time.seconds >= limit - 1e-6
    assert all(until <= limit + 1e-6 for _, until in time.waits)
    assert len(work.began) >= 2
    assert type(error) is StorageError
    found = GAVE_UP.search(str(error))
    assert found, error
    assert int(found[1]) == len(work.began)
    assert float(found[2]) == pytest.approx(time.seconds - work.began[0], abs=0.06)


@given(total=SECONDS, takes=st.floats(0, 20))
def test_best_effort_has_one_deadline_for_all_attempts(total: float, takes: float) -> None:
    time = FakeTime()
    work = Failing(time, [takes])
    error_of(time, work, RetryPolicy().with_deadline(total))
    limit = work.began[0] + min(total, 300)
    assert all(began <= limit + 1e-6 for began in work.began)
    assert time.seconds <= limit + takes + 1e-6


@given(
    total=SECONDS,
    takes=st.lists(st.floats(0, 20), min_size=1, max_size=5),
    stop_at=st.integers(0, 4),
    grace=st.floats(0, 60),
)
def test_no_wait_lasts_beyond_the_grace_period(total: float, takes: list[float], stop_at: int, grace: float) -> None:
    time = FakeTime()
    work = Failing(time, takes, stop_at=stop_at, grace=grace)
    error = error_of(time, work, RetryPolicy(total_seconds=total))
    if len(work.began) <= stop_at:
        return  # gave up before the stop
    stopped_at = work.began[stop_at]
    assert all(until <= stopped_at + grace + 1e-6 for began, until in time.waits if began >= stopped_at)
    assert isinstance(error, StoreUnreachable)
    assert error.exit_code == 3
    assert "what is committed stays; run the same command to continue" in str(error)
    # The next operation does not wait again, and sends no request once the time is over.
    over = time.remaining() == 0
    assert time.store_unreachable == over
    following = Failing(time, takes)
    began = time.seconds
    error_of(time, following, RetryPolicy(total_seconds=total))
    assert (following.began == []) == over
    assert time.seconds <= max(began, stopped_at + grace) + max(takes) + 1e-6
    time.clear()
    assert time.remaining() == float("inf")
    error_of(time, following, RetryPolicy(total_seconds=total))
    assert following.began


def test_waits_double_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    time = FakeTime()
    policy = RetryPolicy(total_seconds=100, first_wait_seconds=0.5)
    retry = Retry("gs://b/x", policy, deadline=time)
    for _ in range(9):
        retry.wait_after(TimeoutError())
    with pytest.raises(
        StorageError, match=r"timed out: no bytes sent or received; gave up after 10 attempts in 100\.0 s"
    ):
        retry.wait_after(TimeoutError())
    assert [until - began for began, until in time.waits] == [0.5, 1, 2, 4, 8, 16, 30, 30, 8.5]
    retry.reset()
    retry.wait_after(ChecksumMismatch("once"))
    assert time.waits[-1][1] - time.waits[-1][0] == 0.5


@pytest.mark.parametrize(
    ("fault", "transient"),
    [
        (MalformedResponse("a web page"), True),
        (aiohttp.ClientResponseError(None, (), status=400, message="Bad status line"), True),  # type: ignore[arg-type]
        (aiohttp.ServerDisconnectedError(), True),
        (ErrorResponse(400, b"no"), False),
        (ErrorResponse(403, b'{"error": {"message": "no", "errors": [{"reason": "forbidden"}]}}'), False),
        (ErrorResponse(403, b'{"error": {"message": "no", "errors": [{"reason": "rateLimitExceeded"}]}}'), True),
        (google.auth.exceptions.RefreshError("503", retryable=True), True),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.RefreshError("invalid_grant"), False),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.TransportError("away"), True),  # type: ignore[no-untyped-call]
        (ZeroDivisionError(), False),
    ],
)
def test_transient_errors_are_recognized(fault: Exception, transient: bool) -> None:
    assert is_transient(fault) is transient


# The real process deadline, real threads, a real server.

PATIENT = RetryPolicy(total_seconds=600, stall_seconds=600, first_wait_seconds=30)


def reading(storage: CloudStorage) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def read() -> None:
        try:
            storage.read("x")
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize(
    "fault",
    [{"fault": "status", "code": 503}, {"fault": "stall", "stall_seconds": 120.0}],
    ids=["sleeps between attempts", "waits for a response"],
)
def test_process_deadline_ends_waits_in_other_threads(cloud: FakeGcs, fault: dict[str, object]) -> None:
    cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "times": None, **fault}])
    storage = CloudStorage("bucket", "", PATIENT)
    waiting = [reading(storage) for _ in range(3)]
    while cloud.count("object.media") < 3:
        threading.Event().wait(0.01)
    PROCESS_DEADLINE.start(0.2)
    for thread, errors in waiting:
        thread.join(60)  # a bound against hanging
        assert [type(each) for each in errors] == [StoreUnreachable]
    sent = cloud.count("")
    with pytest.raises(StoreUnreachable, match=r"gs://bucket/log/HINT: stopping, and the store does not respond; "):
        storage.with_deadline(5).write("log/HINT", b"1")
    assert cloud.count("") == sent, "an unreachable store gets no further requests"


def test_slow_response_is_still_read_after_the_deadline(cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes arrive slowly for five seconds; four seconds without any would end the request."""
    monkeypatch.setattr("baton.tasks.foundation.storage.gcs.connection.LAST_SECONDS", 4.0)
    storage = CloudStorage("bucket", "", PATIENT)
    PROCESS_DEADLINE.start(0.0)
    data = b"committed" * 20_000
    storage.create("log/0", data)
    slow = {"match": {"kind": ""}, "fault": "slow", "times": 1, "bytes_per_second": 36_000.0}
    cloud.faults = FaultPlan.scripted([slow])
    assert storage.read("log/0") == data  # bytes move, though slowly
    assert not PROCESS_DEADLINE.store_unreachable


def test_waits_never_overlap() -> None:
    time = FakeTime()
    work = Failing(time, [1.0])
    error_of(time, work, RetryPolicy(total_seconds=50))
    assert all(first[1] <= second[0] for first, second in pairwise(time.waits))
