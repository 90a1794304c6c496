"""The metadata server: some notices are reasons to stop, and its failures never harm training."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.log_entry import StopReason
from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine import metadata_server
from baton.tasks.foundation.machine.metadata_server import (
    instance_attribute,
    metadata_address,
    upcoming_maintenance,
    watching_metadata,
)
from baton.tasks.foundation.machine.stops import Stop, Stops
from baton.tasks.foundation.machine.threads import run_uninterrupted
from tests.support.event_recorder import EventRecorder
from tests.support.training_process import wait_for

QUIET = {"preempted": "FALSE", "maintenance-event": "NONE", "upcoming-maintenance": "{ }"}
GOOGLE = ("Metadata-Flavor", "Google")


class MetadataServer(ThreadingHTTPServer):
    """Responds as `answers` says: by source a text, a status, or a function that returns either."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.answers: dict[str, Any] = dict(QUIET)
        self.flavor: tuple[str, str] | None = GOOGLE
        self.requests: list[str] = []
        self.hang_up = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def requests_to(self, name: str) -> int:
        return sum(name in path for path in self.requests)


class _Answering(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        assert self.headers[GOOGLE[0]] == GOOGLE[1]
        assert self.path.startswith("/computeMetadata/v1/instance/")
        self.server.requests.append(self.path)
        answer = self.server.answers.get(self.path.split("/")[-1].split("?")[0], 404)
        if callable(answer):
            answer = answer()
        self.send_response(answer if isinstance(answer, int) else 200)
        if self.server.flavor is not None:
            self.send_header(*self.server.flavor)
        self.end_headers()
        self.wfile.write(b"" if isinstance(answer, int) else answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


class Reasons:
    """A listener that records requests."""

    def __init__(self) -> None:
        self.requested: list[StopReason] = []

    def request_stop(self, reason: StopReason) -> None:
        self.requested.append(reason)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    with MetadataServer() as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("GCE_METADATA_HOST", serving.address)
        # A proxy that does not exist: requests to it fail.
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        yield serving
        serving.hang_up.set()
        serving.shutdown()
        thread.join()


def watching(reasons: Reasons) -> Any:
    return watching_metadata(reasons, grace_seconds=25, poll_seconds=0.01)


def in_turn(*answers: str | int) -> Callable[[], str | int]:
    left = list(answers)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def notice(status: str, opens: timedelta, closes: timedelta = timedelta(hours=4)) -> str:
    now = datetime.now(UTC)
    return json.dumps(
        {
            "can_reschedule": "false",
            "maintenance_status": status,
            "type": "SCHEDULED",
            "window_start_time": (now + opens).isoformat(),
            "window_end_time": (now + opens + closes).isoformat(),
        }
    )


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("preempted", "TRUE", "preempted"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance"),
        ("upcoming-maintenance", notice("ONGOING", -timedelta(minutes=1)), "maintenance"),
        ("upcoming-maintenance", notice("PENDING", timedelta(seconds=80)), "maintenance"),
    ],
)
def test_a_notice_requests_a_stop_once(server: MetadataServer, name: str, answer: str, reason: StopReason) -> None:
    server.answers[name] = answer
    reasons = Reasons()
    with watching(reasons):
        wait_for(lambda: reasons.requested)
        others = sum(name not in path for path in server.requests)
        wait_for(lambda: sum(name not in path for path in server.requests) > others + 4)
    assert reasons.requested == [reason]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("preempted", "FALSE"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE"),
        ("maintenance-event", 404),
        ("upcoming-maintenance", 404),
        ("upcoming-maintenance", 503),
        ("upcoming-maintenance", ""),
        ("upcoming-maintenance", "NONE"),
        ("upcoming-maintenance", "[]"),
        ("upcoming-maintenance", '{"error": "no notifications have been received yet, try again later"}'),
        ("upcoming-maintenance", notice("PENDING", timedelta(days=5))),
        ("upcoming-maintenance", '{"maintenance_status": "PENDING", "window_start_time": "soon"}'),
    ],
)
def test_other_responses_request_nothing(
    server: MetadataServer, name: str, answer: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers[name] = answer
    reasons = Reasons()
    with watching(reasons):
        wait_for(lambda: all(server.requests_to(source) > 3 for source in QUIET))
    assert reasons.requested == []
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_a_server_is_polled_again_after_failures(server: MetadataServer) -> None:
    server.answers["preempted"] = in_turn(503, 503, "TRUE")
    reasons = Reasons()
    with watching(reasons):
        wait_for(lambda: reasons.requested)
    assert reasons.requested == ["preempted"]


def test_a_silent_source_does_not_delay_the_others(server: MetadataServer) -> None:
    server.answers["upcoming-maintenance"] = 503
    with watching(Reasons()):
        wait_for(lambda: server.requests_to("preempted") > 60)
    assert server.requests_to("upcoming-maintenance") < 15


@pytest.mark.parametrize("flavor", [None, ("Metadata-Flavor", "Another")])
def test_other_servers_at_the_address_are_ignored(server: MetadataServer, flavor: tuple[str, str] | None) -> None:
    server.flavor = flavor
    server.answers["preempted"] = "TRUE"
    reasons = Reasons()
    with watching(reasons):
        wait_for(lambda: server.requests_to("preempted") > 3)
        assert reasons.requested == []
        server.flavor = GOOGLE
        wait_for(lambda: reasons.requested)


def test_a_hanging_server_does_not_delay_the_work(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_server, "_TIMEOUT_SECONDS", 1000)

    def hang() -> str:
        server.hang_up.wait()
        return "TRUE"

    server.answers["preempted"] = hang
    reasons = Reasons()
    with watching(reasons):
        wait_for(lambda: server.requests_to("preempted"))
    # The body ends while a request is in flight, and its response is ignored.
    assert not server.hang_up.is_set()
    watchers = [thread for thread in threading.enumerate() if thread.name == "baton-metadata"]
    server.hang_up.set()
    for thread in watchers:
        thread.join()
    assert reasons.requested == []


def test_polling_continues_after_a_hanging_request(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_server, "_TIMEOUT_SECONDS", 0.05)
    hung = threading.Event()

    def hang_once() -> str:
        if not hung.is_set():
            hung.set()
            server.hang_up.wait()
        return "TRUE"

    server.answers["preempted"] = hang_once
    reasons = Reasons()
    with watching(reasons):
        wait_for(lambda: reasons.requested)
        assert not server.hang_up.is_set()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "http://127.0.0.1/x", "[", "127.0.0.1:port"])
def test_an_address_without_a_server_is_harmless(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    reasons = Reasons()
    with watching(reasons):
        (watcher,) = (thread for thread in threading.enumerate() if thread.name == "baton-metadata")
        watcher.join(0.1)
        assert watcher.is_alive()
    assert reasons.requested == []


@pytest.mark.parametrize(
    ("product", "address"),
    [("Google Compute Engine\n", "169.254.169.254"), ("Google\n", "169.254.169.254"), ("KVM\n", None), (None, None)],
)
def test_only_machines_of_google_are_polled(
    product: str | None, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "")
    firmware = tmp_path / "product_name"
    if product is not None:
        firmware.write_text(product)
    monkeypatch.setattr(metadata_server, "_PRODUCT_NAME", firmware)
    assert metadata_address() == address
    if address is None:
        threads = threading.active_count()
        with watching(Reasons()):
            assert threading.active_count() == threads


NOW = datetime(2024, 12, 1, 19, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"maintenance_status": "ONGOING"}, "maintenance"),
        ({"maintenanceStatus": "ONGOING"}, "maintenance"),
        ({"Upcoming maintenance": {"maintenance_status": "ONGOING"}}, "maintenance"),
        ({"maintenance_status": "PENDING", "window_start_time": "2024-12-01T19:01:25Z"}, "maintenance"),
        ({"maintenance_status": "PENDING", "window_start_time": "2024-12-01T20:01:25+01:00"}, "maintenance"),
        ({"maintenance_status": "PENDING", "window_start_time": "2024-12-01T19:01:20.123456789Z"}, "maintenance"),
        ({"maintenance_status": "PENDING", "window_start_time": "2024-12-01T19:01:20"}, "maintenance"),
        ({"maintenanceStatus": "PENDING", "windowStartTime": "2024-12-01T19:01:25Z"}, "maintenance"),
        ({"maintenance_status": "PENDING", "window_start_time": "2024-12-01T19:01:26Z"}, None),
        ({"maintenance_status": "PENDING"}, None),
        ({"maintenance_status": "PENDING", "window_start_time": 5}, None),
        ({"maintenance_status": "COMPLETE", "window_start_time": "2024-12-01T18:00:00Z"}, None),
        ({"window_start_time": "2024-12-01T19:00:00Z"}, None),
        (
            {
                "maintenance_status": "PENDING",
                "window_start_time": "2024-12-01T18:00:00Z",
                "window_end_time": "2024-12-01T22:00:00Z",
            },
            "maintenance",
        ),
        # A window that passed without maintenance: an old notice must not stop every run forever.
        (
            {
                "maintenance_status": "PENDING",
                "window_start_time": "2024-12-01T14:00:00Z",
                "window_end_time": "2024-12-01T18:00:00Z",
            },
            None,
        ),
    ],
)
def test_upcoming_maintenance_stops_near_its_window(fields: dict[str, Any], reason: StopReason | None) -> None:
    assert upcoming_maintenance(json.dumps(fields), NOW, timedelta(seconds=85)) == reason


def test_a_preemption_requests_a_stop_and_raises_nothing(server: MetadataServer) -> None:
    server.answers["preempted"] = "TRUE"
    recorder = EventRecorder()

    def work(stops: Stops) -> Stop | None:
        wait_for(lambda: recorder.warnings)
        assert stops.grace_left() == 30
        return stops.requested

    assert run_uninterrupted(work, StopSpec(grace_seconds=30.0), clock=lambda: 5.0, telemetry=recorder) == Stop(
        "preempted", 5.0
    )
    assert "preempted" in recorder.warnings[0]
    before = len(server.requests)
    run_uninterrupted(lambda later: wait_for(lambda: later.requested), StopSpec())
    assert len(server.requests) > before


def test_notices_for_another_process_are_not_asked_for(server: MetadataServer) -> None:
    server.answers["preempted"] = "TRUE"
    assert run_uninterrupted(lambda stops: stops.requested, StopSpec(), of_machine=False) is None
    assert server.requests == []


def test_attribute_of_the_machine_is_read(server: MetadataServer) -> None:
    assert instance_attribute("accelerator-type") is None
    server.answers["accelerator-type"] = "v4-32"
    assert instance_attribute("accelerator-type") == "v4-32"
    assert server.requests[-1].endswith("/instance/attributes/accelerator-type")
    server.flavor = None  # another cloud
    assert instance_attribute("accelerator-type") is None
