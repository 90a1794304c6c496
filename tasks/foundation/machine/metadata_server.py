"""Google Compute Engine's metadata server: its notices that the machine is about to end, and the machine's attributes.

Sources, below docs.cloud.google.com, as of 2026:

- `preempted`, compute/docs/instances/create-use-preemptible: TRUE once preempted, about 30 s before the end.
- `maintenance-event`, compute/docs/metadata/getting-live-migration-notice and compute/docs/gpus/gpu-host-maintenance:
  changes 60 s before the event, or an hour before it on machines with GPUs. It does so only after a first request.
- `upcoming-maintenance`, tpu/docs/view-maintenance-notifications and
  compute/docs/instances/monitor-plan-host-maintenance-event: PENDING for days, then ONGOING; it starts by itself when
  its window opens. Keys are in snake_case here and in camelCase in the API. Without a notice the response is {},
  {"error": …}, NONE or 404, sometimes 503.
"""

import http.client
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from baton.tasks.foundation.contracts.log_entry import StopReason

_LOGGER = logging.getLogger(__name__)

_ADDRESS: Final = "169.254.169.254"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
_FLAVOR: Final = ("Metadata-Flavor", "Google")
_TIMEOUT_SECONDS: Final = 2.0
_MAX_WAIT_SECONDS: Final = 10.0
_MAX_RESPONSE_BYTES: Final = 65536
_JOIN_SECONDS: Final = 0.2
# Windows open on the minute, and a commit that starts in their first second would be too late.
_WINDOW_MARGIN_SECONDS: Final = 60.0


def metadata_address() -> str | None:
    """Host, or host:port, of the metadata server; None on machines outside Google Cloud.

    Found as in google-auth: from GCE_METADATA_HOST, or from the product name in the firmware. Uses no network.
    """
    if named := os.environ.get("GCE_METADATA_HOST"):
        return named
    try:
        on_google = _PRODUCT_NAME.read_text(encoding="utf-8", errors="replace").strip().startswith("Google")
    except OSError:
        return None
    return _ADDRESS if on_google else None


def instance_attribute(name: str) -> str | None:
    """An attribute of this machine, such as `accelerator-type` of a TPU VM; None if it has none, or does not respond.

    Takes at most some seconds, and no time outside Google Cloud.
    """
    address = metadata_address()
    if address is None:
        return None
    try:
        return _request(address, f"attributes/{name}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        _LOGGER.debug("metadata server: no attribute %s: %r", name, error)
        return None


class StopListener(Protocol):
    """Receives stop requests, at most one from each of the three sources."""

    def request_stop(self, reason: StopReason) -> None:
        """Called in the polling thread."""


@contextmanager
def watching_metadata(listener: StopListener, *, grace_seconds: float, poll_seconds: float = 1.0) -> Iterator[None]:
    """Inside, poll the metadata server from a thread, if there is one. Failures are ignored.

    Args:
        listener: receives stop requests, but none after the exit.
        grace_seconds: a maintenance window that opens within this time and a minute is a reason to stop.
        poll_seconds: between two requests to a source. If a source does not respond, this grows to 10 s.
    """
    address = metadata_address()
    if address is None:
        yield
        return
    watch = _Watch(address, listener, grace_seconds=grace_seconds, poll_seconds=poll_seconds)
    thread = threading.Thread(target=watch.run, name="baton-metadata", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.ended.set()
        thread.join(_JOIN_SECONDS)  # a request in flight ends by itself, and its response is ignored


class _Watch:
    def __init__(self, address: str, listener: StopListener, *, grace_seconds: float, poll_seconds: float) -> None:
        self.ended = threading.Event()
        self._address = address
        self._listener = listener
        self._poll_seconds = poll_seconds
        horizon = timedelta(seconds=grace_seconds + _WINDOW_MARGIN_SECONDS)
        self._sources: dict[str, Callable[[str], StopReason | None]] = {
            "preempted": preempted,
            "maintenance-event": maintenance_event,
            "upcoming-maintenance?alt=json": lambda text: upcoming_maintenance(text, datetime.now(UTC), horizon),
        }

    def run(self) -> None:
        # Each source has its own interval: upcoming-maintenance may never respond, and must not delay the others.
        waits = dict.fromkeys(self._sources, self._poll_seconds)
        due = dict.fromkeys(self._sources, time.monotonic())
        while due and not self.ended.wait(min(due.values()) - time.monotonic()):
            source = min(due, key=lambda name: due[name])
            responded, reason = self._poll(source)
            if self.ended.is_set():
                return
            if reason is not None:
                self._listener.request_stop(reason)
                del due[source]
                continue
            waits[source] = self._poll_seconds if responded else min(2 * waits[source], _MAX_WAIT_SECONDS)
            due[source] = time.monotonic() + waits[source]

    def _poll(self, source: str) -> tuple[bool, StopReason | None]:
        """Whether the source responded, and its reason to stop."""
        try:
            return True, self._sources[source](_request(self._address, source))
        except (OSError, http.client.HTTPException, ValueError) as error:
            _LOGGER.debug("metadata server: no %s: %r", source, error)
            return False, None


def _request(address: str, source: str) -> str:
    """Send one request and return the body of its response.

    Raises:
        OSError, HTTPException, ValueError: no response, or not one of Google's.
    """
    # http.client uses no proxies, and requests to this address must never go through one.
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"/computeMetadata/v1/instance/{source}", headers=dict([_FLAVOR]))
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"status {response.status}")
        # Other clouds and captive networks have other servers at this address.
        if response.getheader(_FLAVOR[0]) != _FLAVOR[1]:
            raise ValueError("the response is not Google's")
        return response.read(_MAX_RESPONSE_BYTES).decode("utf-8", "replace").strip()
    finally:
        connection.close()


def preempted(text: str) -> StopReason | None:
    """The reason to stop in a response of `instance/preempted`, which is TRUE or FALSE."""
    return "preempted" if text == "TRUE" else None


def maintenance_event(text: str) -> StopReason | None:
    """The reason to stop in a response of `instance/maintenance-event`. A machine that migrates continues training."""
    return "maintenance" if text == "TERMINATE_ON_HOST_MAINTENANCE" else None


def upcoming_maintenance(text: str, now: datetime, horizon: timedelta) -> StopReason | None:
    """The reason to stop in a response of `instance/upcoming-maintenance?alt=json`.

    Ongoing maintenance is a reason. So is pending maintenance whose window is open, or opens before `now + horizon`.

    Raises:
        ValueError: a time in the response cannot be parsed.
    """
    try:
        notice = json.loads(text)
    except ValueError:
        return None  # NONE, or an empty response
    if isinstance(notice, dict) and isinstance(inner := notice.get("Upcoming maintenance"), dict):
        notice = inner  # as in the documentation's example
    if not isinstance(notice, dict):
        return None
    status = _field(notice, "maintenance_status", "maintenanceStatus")
    if status == "ONGOING":
        return "maintenance"
    opens = _time(_field(notice, "window_start_time", "windowStartTime"))
    closes = _time(_field(notice, "window_end_time", "windowEndTime"))
    over = closes is not None and closes < now
    if status == "PENDING" and opens is not None and opens <= now + horizon and not over:
        return "maintenance"
    return None


def _field(notice: dict[str, Any], *names: str) -> object:
    return next((notice[name] for name in names if name in notice), None)


def _time(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    moment = datetime.fromisoformat(value)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
