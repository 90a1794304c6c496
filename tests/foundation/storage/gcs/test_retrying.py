"""How long the store is waited for: to the limit and no longer, and less once this process has to go."""

import re
import threading
from itertools import pairwise

import aiohttp
import google.auth.exceptions
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.foundation.errors import StorageError, StoreUnreachable
from tasks.foundation.storage.deadline import LEAVING, Deadline
from tasks.foundation.storage.gcs.responses import Answered, Garbled, Malformed
from tasks.foundation.storage.gcs.retrying import RetryPolicy, Tries, is_transient, retrying
from tasks.foundation.storage.gcs.storage import CloudStorage
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan

GIVEN_UP = re.compile(r"given up after (?:(\d+) tries in|one try,) (\d+\.\d) s \(BATON_STORAGE_PATIENCE_SECONDS is")
SECONDS = st.floats(0.01, 1000, allow_nan=False)


class Time(Deadline):
    """A clock that only sleeping, and trying, moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[tuple[float, float]] = []
        super().__init__(lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.waits.append((self.now, self.now + seconds))
        self.now += seconds


class Failing:
    """Work that fails each time, after a while; somebody may ask the process to go during one of the tries."""

    def __init__(self, time: Time, takes: list[float], *, stop_at: int | None = None, grace: float = 0.0) -> None:
        self.time, self.takes, self.stop_at, self.grace = time, takes, stop_at, grace
        self.began: list[float] = []

    def __call__(self) -> None:
        if len(self.began) == self.stop_at:
            self.time.bind(self.grace)
        self.began.append(self.time.now)
        self.time.now += self.takes[(len(self.began) - 1) % len(self.takes)]
        raise TimeoutError


def given_up(time: Time, work: Failing, patience: RetryPolicy) -> StorageError:
    with pytest.raises(StorageError) as fault:
        retrying(work, Tries("gs://b/x", patience, clock=lambda: time.now, leaving=time))
    return fault.value


@given(total=SECONDS, first_wait=st.floats(0.001, 5), takes=st.lists(st.floats(0, 20), min_size=1, max_size=5))
def test_patience_lasts_to_its_limit_and_says_what_passed(total: float, first_wait: float, takes: list[float]) -> None:
    time = Time()
    work = Failing(time, takes)
    fault = given_up(time, work, RetryPolicy(total_seconds=total, first_wait_seconds=first_wait))
    limit = work.began[0] + takes[0] + total
    # The last try begins at the limit, unless a slow one went beyond it; nothing is waited for after it.
    assert work.began[-1] >= limit - 1e-6 or time.now >= limit - 1e-6
    assert all(until <= limit + 1e-6 for _, until in time.waits)
    assert len(work.began) >= 2
    assert type(fault) is StorageError
    found = GIVEN_UP.search(str(fault))
    assert found, fault
    assert int(found[1]) == len(work.began)
    assert float(found[2]) == pytest.approx(time.now - work.began[0], abs=0.06)


@given(total=SECONDS, takes=st.floats(0, 20))
def test_best_effort_has_one_deadline_for_all_tries(total: float, takes: float) -> None:
    time = Time()
    work = Failing(time, [takes])
    given_up(time, work, RetryPolicy().with_deadline(total))
    limit = work.began[0] + min(total, 300)
    assert all(began <= limit + 1e-6 for began in work.began)
    assert time.now <= limit + takes + 1e-6


@given(
    total=SECONDS,
    takes=st.lists(st.floats(0, 20), min_size=1, max_size=5),
    stop_at=st.integers(0, 4),
    grace=st.floats(0, 60),
)
def test_after_a_notice_nothing_is_waited_for_beyond_the_grace_period(
    total: float, takes: list[float], stop_at: int, grace: float
) -> None:
    time = Time()
    work = Failing(time, takes, stop_at=stop_at, grace=grace)
    fault = given_up(time, work, RetryPolicy(total_seconds=total))
    if len(work.began) <= stop_at:
        return  # given up before anybody asked
    asked_at = work.began[stop_at]
    assert all(until <= asked_at + grace + 1e-6 for began, until in time.waits if began >= asked_at)
    assert isinstance(fault, StoreUnreachable)
    assert (fault.exit_code, fault.retryable) == (3, True)
    assert "what is committed stays; run the same command to continue" in str(fault)
    # Whoever comes next does not wait again, and does not even ask once the time is over.
    over = time.left() == 0
    assert time.given_up == over
    next_one = Failing(time, takes)
    began = time.now
    given_up(time, next_one, RetryPolicy(total_seconds=total))
    assert (next_one.began == []) == over
    assert time.now <= max(began, asked_at + grace) + max(takes) + 1e-6
    time.lift()
    assert time.left() == float("inf")
    given_up(time, next_one, RetryPolicy(total_seconds=total))
    assert next_one.began


def test_waits_double_and_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    time = Time()
    patience = RetryPolicy(total_seconds=100, first_wait_seconds=0.5)
    tries = Tries("gs://b/x", patience, clock=lambda: time.now, leaving=time)
    for _ in range(9):
        tries.again_after(TimeoutError())
    with pytest.raises(StorageError, match=r"nothing moved for too long; given up after 10 tries in 100\.0 s"):
        tries.again_after(TimeoutError())
    assert [until - began for began, until in time.waits] == [0.5, 1, 2, 4, 8, 16, 30, 30, 8.5]
    tries.progress()
    tries.again_after(Garbled("once"))
    assert time.waits[-1][1] - time.waits[-1][0] == 0.5


@pytest.mark.parametrize(
    ("fault", "transient"),
    [
        (Malformed("a web page"), True),
        (aiohttp.ClientResponseError(None, (), status=400, message="Bad status line"), True),  # type: ignore[arg-type]
        (aiohttp.ServerDisconnectedError(), True),
        (Answered(400, b"no"), False),
        (Answered(403, b'{"error": {"message": "no", "errors": [{"reason": "forbidden"}]}}'), False),
        (Answered(403, b'{"error": {"message": "no", "errors": [{"reason": "rateLimitExceeded"}]}}'), True),
        (google.auth.exceptions.RefreshError("503", retryable=True), True),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.RefreshError("invalid_grant"), False),  # type: ignore[no-untyped-call]
        (google.auth.exceptions.TransportError("away"), True),  # type: ignore[no-untyped-call]
        (ZeroDivisionError(), False),
    ],
)
def test_what_may_succeed_a_little_later(fault: Exception, transient: bool) -> None:
    assert is_transient(fault) is transient


# The process's own deadline, real threads, a real server.

PATIENT = RetryPolicy(total_seconds=600, stall_seconds=600, first_wait_seconds=30)


def asking(storage: CloudStorage) -> tuple[threading.Thread, list[BaseException]]:
    faults: list[BaseException] = []

    def ask() -> None:
        try:
            storage.read("x")
        except BaseException as fault:  # noqa: BLE001 - looked at by the test
            faults.append(fault)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, faults


@pytest.mark.parametrize(
    "fault",
    [{"fault": "status", "code": 503}, {"fault": "stall", "stall_seconds": 120.0}],
    ids=["sleeps between tries", "waits for an answer"],
)
def test_whoever_waits_wakes_up_when_this_process_has_to_go(cloud: FakeGcs, fault: dict[str, object]) -> None:
    cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "times": None, **fault}])
    storage = CloudStorage("bucket", "", PATIENT)
    waiting = [asking(storage) for _ in range(3)]
    while cloud.count("object.media") < 3:
        threading.Event().wait(0.01)
    LEAVING.bind(0.2)
    for thread, faults in waiting:
        thread.join(60)  # a bound against hanging
        assert [type(each) for each in faults] == [StoreUnreachable]
    asked = cloud.count("")
    with pytest.raises(StoreUnreachable, match=r"gs://bucket/log/HINT: .*could not be reached before"):
        storage.with_deadline(5).write("log/HINT", b"1")
    assert cloud.count("") == asked, "a store that was found away is not asked again"


def test_a_store_that_answers_is_heard_after_the_deadline_too(cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds of bytes that arrive slowly, where four without any would be too long."""
    monkeypatch.setattr("tasks.foundation.storage.gcs.connection.LAST_SECONDS", 4.0)
    storage = CloudStorage("bucket", "", PATIENT)
    LEAVING.bind(0.0)
    data = b"committed" * 20_000
    storage.create("log/0", data)
    slow = {"match": {"kind": ""}, "fault": "slow", "times": 1, "bytes_per_second": 36_000.0}
    cloud.faults = FaultPlan.scripted([slow])
    assert storage.read("log/0") == data  # bytes move, though slowly
    assert not LEAVING.given_up


def test_a_deadline_wakes_the_sleeping_and_the_earliest_holds() -> None:
    deadline = Deadline()
    woken = threading.Event()
    thread = threading.Thread(target=lambda: (deadline.sleep(600), woken.set()), daemon=True)
    thread.start()
    deadline.bind(0.05)
    assert woken.wait(60)
    deadline.bind(500)
    assert deadline.left() <= 0.05
    for interruption, bound in ((KeyboardInterrupt(), True), (ValueError(), False)):
        command = deadline.of_a_command(7)
        with pytest.raises(type(interruption)), command:
            raise interruption
        assert deadline.is_set is bound


def test_the_shares_of_waits_never_overlap() -> None:
    time = Time()
    work = Failing(time, [1.0])
    given_up(time, work, RetryPolicy(total_seconds=50))
    assert all(first[1] <= second[0] for first, second in pairwise(time.waits))
