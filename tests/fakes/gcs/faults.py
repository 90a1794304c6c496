"""Fault plans: which request gets which fault, scripted or drawn from a seed, so that it can be replayed."""

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

CODES = (429, 500, 503)
# The most consecutive faults by rates for one (method, path), so that retries end.
MAX_CONSECUTIVE = 3
EVERY = ""
MEDIA = r"object\.media"
WRITES = r"object\.(insert|delete|rewrite)|upload\.(initiate|chunk)"
UPLOADS = r"object\.insert|upload\.chunk"

# Each fault, with the kinds of requests that can get it.
FAULTS = {
    "status": EVERY,  # 429, 500 or 503
    "reset-before-body": EVERY,
    "reset-in-body": EVERY,
    "reset-after-body": EVERY,  # before the request takes effect
    "response-lost": EVERY,  # after the request took effect
    "reset-in-response": EVERY,
    "stall": EVERY,  # sleeps, then resets or continues
    "truncate": MEDIA,  # fewer bytes than Content-Length
    "truncate-quietly": MEDIA,  # Content-Length is wrong in the same way
    "corrupt-download": MEDIA,  # one bit; the checksum headers stay right
    "corrupt-upload": UPLOADS,  # other bytes are stored, and their checksum is reported
    "unread": UPLOADS,  # the body is not read for stall_seconds, then the connection is reset
    "short-chunk": r"upload\.chunk",  # fewer bytes are stored than were sent: allowed, and reported by Range
    "duplicate": WRITES,  # takes effect twice; the response is the second one's
    "expired-token": EVERY,  # 401
    "instead": EVERY,  # a proxy responds with code, headers and body; takes_effect: the store gets the request, too
    "cut-response": EVERY,  # fewer bytes, with a matching Content-Length
    "bad-status-line": EVERY,
    "bare": MEDIA,  # without the store's own headers
    "slow": EVERY,  # delay_seconds, bytes_per_second
}
# Faults that a client survives by retrying any request.
FAULTS_OF_ANY_REQUEST = (
    "status",
    "reset-before-body",
    "reset-in-body",
    "reset-after-body",
    "response-lost",
    "reset-in-response",
    "stall",
    "duplicate",
    "expired-token",
    "corrupt-upload",
    "unread",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one request.

    fraction: in [0, 1), how much of the body or response gets through, or the position of the flipped bit.
    """

    kind: str
    fraction: float = 0.5
    code: int = 503
    stall_seconds: float = 1.0
    stall_then: str = "reset"
    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    takes_effect: bool = False

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ValueError(f"fault={self.kind!r} is unknown; one of {', '.join(FAULTS)}")
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction={self.fraction} is not within [0, 1)")
        if self.stall_then not in {"reset", "continue"}:
            raise ValueError(f"stall_then={self.stall_then!r} is neither 'reset' nor 'continue'")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which requests get which faults: by a script first, and by rates for all other requests.

    script: entries such as {"match": {"kind": "object.insert", "path": "manifest$"}, "fault": "response-lost",
        "times": 1}; more keys are a `Fault`'s. `kind` is a prefix, `path` a regular expression searched in
        "/b/BUCKET/o/NAME", `skip` is the number of matching requests that pass first,
        `times` None means always.
    rates: a probability for each kind of fault; at most 1 in total.
    """

    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    script: Sequence[Mapping[str, Any]] = ()
    stall_seconds: float = 1.0
    delay_seconds: float = 0.01

    def __post_init__(self) -> None:
        unknown = set(self.rates) - set(FAULTS)
        if unknown:
            raise ValueError(f"rates={sorted(unknown)} are unknown; any of {', '.join(FAULTS)}")
        if min(self.rates.values(), default=0) < 0 or sum(self.rates.values()) > 1:
            raise ValueError(f"rates={dict(self.rates)} are not probabilities of at most 1 together")
        for entry in self.script:
            unknown = set(entry) - {"match", "fault", "times", "skip", *(one.name for one in fields(Fault))}
            unknown |= set(entry.get("match", {})) - {"kind", "path"}
            if unknown:
                raise ValueError(f"script entry {dict(entry)} has unknown keys {sorted(unknown)}")
            _fault_of(entry)

    @classmethod
    def random(cls, seed: int, rates: Mapping[str, float], **settings: Any) -> "FaultPlan":
        return cls(seed=seed, rates=dict(rates), **settings)

    @classmethod
    def scripted(cls, script: Sequence[Mapping[str, Any]], **settings: Any) -> "FaultPlan":
        return cls(script=tuple(script), **settings)

    @classmethod
    def on(cls, kind: str, fault: str, *, times: int | None = 1, **settings: Any) -> "FaultPlan":
        """One fault for requests whose kind starts with `kind`; `settings` are a `Fault`'s."""
        return cls.scripted([{"match": {"kind": kind}, "fault": fault, "times": times, **settings}])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def draw(self, number: int, kind: str) -> Fault | None:
        """The fault of the `number`-th request that the rates apply to. Depends on the plan and the arguments only."""
        source = random.Random(f"{self.seed}/{number}")
        choice, fraction, code = source.random(), source.random(), source.choice(CODES)
        for name in sorted(self.rates):
            choice -= self.rates[name]
            if choice < 0:
                if not _applies_to(name, kind):
                    return None
                return Fault(
                    kind=name,
                    fraction=fraction,
                    code=code,
                    stall_seconds=self.stall_seconds,
                    delay_seconds=self.delay_seconds,
                )
        return None


def _applies_to(fault: str, kind: str) -> bool:
    return not FAULTS[fault] or re.fullmatch(FAULTS[fault], kind) is not None


def _fault_of(entry: Mapping[str, Any]) -> Fault:
    settings = {key: value for key, value in entry.items() if key not in {"match", "fault", "times", "skip"}}
    return Fault(kind=entry["fault"], **settings)


class FaultRun:
    """The state of a running plan: the request number, the rest of the script, and the faults so far."""

    def __init__(self, plan: FaultPlan | None) -> None:
        self.plan = plan or FaultPlan()
        self.log: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._number = 0
        self._seen: Counter[int] = Counter()
        self._in_a_row: Counter[tuple[str, str]] = Counter()

    @property
    def is_idle(self) -> bool:
        return not self.plan.rates and not self.plan.script

    def next(self, method: str, kind: str, path: str) -> Fault | None:
        """The fault of the request that just arrived, if any."""
        with self._lock:
            fault = self._scripted(kind, path) or self._drawn(method, kind, path)
            if fault is not None:
                self.log.append({"method": method, "kind": kind, "path": path, "fault": fault.kind})
            return fault

    def _scripted(self, kind: str, path: str) -> Fault | None:
        for index, entry in enumerate(self.plan.script):
            match = entry.get("match", {})
            if (
                not _applies_to(entry["fault"], kind)
                or not kind.startswith(match.get("kind", ""))
                or not re.search(match.get("path", ""), path)
            ):
                continue
            seen, skip, times = self._seen[index], entry.get("skip", 0), entry.get("times", 1)
            if times is not None and seen >= skip + times:
                continue
            self._seen[index] += 1
            if seen >= skip:
                return _fault_of(entry)
        return None

    def _drawn(self, method: str, kind: str, path: str) -> Fault | None:
        plan = self.plan
        if not plan.rates:
            return None
        fault = plan.draw(self._number, kind)
        self._number += 1
        if fault is None or self._in_a_row[method, path] >= MAX_CONSECUTIVE:
            self._in_a_row[method, path] = 0
            return None
        # A slow response does not make a client retry.
        if fault.kind != "slow":
            self._in_a_row[method, path] += 1
        return fault
