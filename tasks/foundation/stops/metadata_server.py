"""What Google Compute Engine's metadata server says of the machine's near end.

Sources, below docs.cloud.google.com, as of 2026:

- `preempted`, compute/docs/instances/create-use-preemptible: TRUE once preempted, some 30 s before the end.
- `maintenance-event`, compute/docs/metadata/getting-live-migration-notice and compute/docs/gpus/gpu-host-maintenance:
  changes 60 s before the event, an hour before it on machines with GPUs, and only for those who have asked before.
- `upcoming-maintenance`, tpu/docs/view-maintenance-notifications and
  compute/docs/instances/monitor-plan-host-maintenance-event: PENDING for days, ONGOING while it is done; it begins by
  itself when its window opens. Keys are in snake_case here and in camelCase in the API. Without a notice the answer
  is {}, {"error": …}, NONE or 404, and 503 has been seen.
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

from tasks.foundation.contracts.segment import StopReason

_LOGGER = logging.getLogger(__name__)

_ADDRESS: Final = "169.254.169.254"
_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
_FLAVOR: Final = ("Metadata-Flavor", "Google")
_TIMEOUT_SECONDS: Final = 2.0
_LONGEST_WAIT_SECONDS: Final = 10.0
_LONGEST_ANSWER: Final = 65536
_PARTING_SECONDS: Final = 0.2
# A window opens on the minute at best, and committing on its first second would be too late.
_WINDOW_MARGIN_SECONDS: Final = 60.0


def metadata_address() -> str | None:
    """Host, or host:port, of the metadata server; None elsewhere than on Google's machines.

    As google-auth finds it: from GCE_METADATA_HOST, or by the product name that the firmware tells. No network.
    """
    if named := os.environ.get("GCE_METADATA_HOST"):
        return named
    try:
        on_google = _PRODUCT_NAME.read_text(encoding="utf-8", errors="replace").strip().startswith("Google")
    except OSError:
        return None
    return _ADDRESS if on_google else None


class Listener(Protocol):
    """Who is told, at most once by each of the three sources."""

    def request_stop(self, reason: StopReason) -> None:
        """Called from the polling thread."""


@contextmanager
def watching_metadata(listener: Listener, *, grace_seconds: float, poll_seconds: float = 1.0) -> Iterator[None]:
    """Poll the metadata server, where there is one, from a thread; failures are quiet and never end it.

    Args:
        listener: is told, but not after the exit.
        grace_seconds: a maintenance window that opens within these and a minute counts as a stop.
        poll_seconds: between two looks at a source; a source that does not answer is asked up to 10 s apart.
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
        thread.join(_PARTING_SECONDS)  # a request in flight ends by itself, unheard


class _Watch:
    def __init__(self, address: str, listener: Listener, *, grace_seconds: float, poll_seconds: float) -> None:
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
        # Each source waits on its own: upcoming-maintenance may never answer, and must not slow down the others.
        waits = dict.fromkeys(self._sources, self._poll_seconds)
        due = dict.fromkeys(self._sources, time.monotonic())
        while due and not self.ended.wait(min(due.values()) - time.monotonic()):
            source = min(due, key=lambda name: due[name])
            answered, reason = self._look(source)
            if self.ended.is_set():
                return
            if reason is not None:
                self._listener.request_stop(reason)
                del due[source]
                continue
            waits[source] = self._poll_seconds if answered else min(2 * waits[source], _LONGEST_WAIT_SECONDS)
            due[source] = time.monotonic() + waits[source]

    def _look(self, source: str) -> tuple[bool, StopReason | None]:
        """Whether the source answered, and the stop that it asks for."""
        try:
            return True, self._sources[source](_ask(self._address, source))
        except (OSError, http.client.HTTPException, ValueError) as error:
            _LOGGER.debug("metadata server: no %s: %r", source, error)
            return False, None


def _ask(address: str, source: str) -> str:
    """One answer, or an OSError, HTTPException or ValueError."""
    # http.client knows no proxies, and this address must never be asked through one.
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"/computeMetadata/v1/instance/{source}", headers=dict([_FLAVOR]))
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}")
        # Other servers live at this address too: in other clouds, in captive networks.
        if answer.getheader(_FLAVOR[0]) != _FLAVOR[1]:
            raise ValueError("the answer is not Google's")
        return answer.read(_LONGEST_ANSWER).decode("utf-8", "replace").strip()
    finally:
        connection.close()


def preempted(text: str) -> StopReason | None:
    """The stop in an answer of `instance/preempted`: TRUE or FALSE."""
    return "preempted" if text == "TRUE" else None


def maintenance_event(text: str) -> StopReason | None:
    """The stop in an answer of `instance/maintenance-event`: a machine that only migrates trains on."""
    return "maintenance" if text == "TERMINATE_ON_HOST_MAINTENANCE" else None


def upcoming_maintenance(text: str, now: datetime, horizon: timedelta) -> StopReason | None:
    """The stop in an answer of `instance/upcoming-maintenance?alt=json`.

    Maintenance under way is one; so is a pending one whose window is open or opens before `now + horizon`, and is
    not over.

    Raises:
        ValueError: a time in it is none.
    """
    try:
        notice = json.loads(text)
    except ValueError:
        return None  # NONE, or nothing
    if isinstance(notice, dict) and isinstance(inner := notice.get("Upcoming maintenance"), dict):
        notice = inner  # as the documentation's example has it
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
