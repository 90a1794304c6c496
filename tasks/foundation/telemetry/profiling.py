"""A trace of some steps of a process at work, for TensorBoard's profiler; it is asked for by a file in the home.

`baton profile` writes `profile.json`, which names the attempts at work. The thread that writes the heartbeats of an
attempt looks for it, so that no step waits for the store. The training loop begins the trace before its next inner
loop, and ends it when the steps are done. The trace goes to `tensorboard/plugins/profile/`, and the answer takes the
place of the request. A trace reads no state, and changes none: it only makes inner loops end where it ends.
"""

import logging
import math
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.errors import (
    AnotherVersion,
    BatonError,
    FileMissing,
    InvalidInput,
    RunLogError,
    StorageError,
)
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.storage.interface import Storage, discard
from baton.tasks.foundation.telemetry.events import Note, Sink

_LOGGER = logging.getLogger(__name__)
MOST_STEPS: Final = 10_000  # a trace of more fills the memory of the process
_REQUEST: Final = "profile.json"
_TRACES: Final = "tensorboard/plugins/profile"  # where TensorBoard looks, below its --logdir
_STORE_SECONDS: Final = 30.0  # the training waits for the upload of a trace
_REFUSAL_CHARACTERS: Final = 1000
_POLL_SECONDS: Final = 0.5
_POLLS_PER_LOOK: Final = 10


class ProfileRequest(Contract):
    """What `baton profile` asks, and what the process at work answered."""

    format: Literal[1] = 1
    id: str = Field(description="of this request")
    steps: int = Field(ge=1, le=MOST_STEPS)
    attempts: tuple[str, ...] = Field(description="those at work, which are asked")
    trace: str | None = Field(default=None, description="the folder of the trace in the home; None: not traced")
    first_step: int | None = Field(default=None, ge=0, description="the step before the first one that was traced")
    last_step: int | None = Field(default=None, ge=0)
    refused: str | None = Field(default=None, description="why there is no trace")

    @property
    def is_open(self) -> bool:
        """Whether nobody has answered it."""
        return self.trace is None and self.refused is None


def _read(home: Storage) -> ProfileRequest | None:
    """The request in a home, or its answer; None if there is none that can be read."""
    try:
        return ProfileRequest.from_json(home.read(_REQUEST), where=f"{home.uri}/{_REQUEST}", error=RunLogError)
    except FileMissing:
        return None
    except (StorageError, RunLogError, AnotherVersion) as fault:
        _LOGGER.debug("the request for a trace cannot be read: %s", fault)
        return None


def ask_for_trace(
    home: Storage, steps: int, attempts: Sequence[str], *, is_at_work: Callable[[], bool]
) -> ProfileRequest:
    """Ask the processes at work for a trace of their next steps, and wait until one has answered.

    Args:
        steps: how many.
        attempts: ids of the attempts at work.
        is_at_work: whether one of them still is.

    Raises:
        InvalidInput: a trace is asked for already, or the process cannot trace.
        BatonError: the process ended before, or another request took the place of this one.
    """
    before = _read(home)
    if before is not None and before.is_open and set(before.attempts) & set(attempts):
        raise InvalidInput(
            f"{home.uri}: a trace of {before.steps} steps is asked for already; wait until that command has it, or "
            f"delete {_REQUEST} there"
        )
    request = ProfileRequest(id=uuid.uuid4().hex, steps=steps, attempts=tuple(attempts))
    home.write(_REQUEST, request.to_json())
    polls = 0
    try:
        while True:
            time.sleep(_POLL_SECONDS)
            polls += 1
            at_work = polls % _POLLS_PER_LOOK != 0 or is_at_work()
            answer = _read(home)
            if answer is not None and answer.id == request.id and not answer.is_open:
                break
            if answer is not None and answer.id != request.id:
                raise BatonError(f"{home.uri}: another request for a trace took the place of this one; ask again")
            if not at_work:
                raise BatonError(f"{home.uri}: the process at work ended before it had traced a step; start it again")
    finally:
        discard(home, _REQUEST)
    if answer.refused is not None:
        raise InvalidInput(f"{home.uri}: {answer.refused}")
    return answer


class Profiler:
    """Traces steps of this process when its home asks for them.

    `look` is for the thread of the heartbeats; all others are for the thread that trains, and for the end of the
    attempt. Nothing raises: a trace is not worth a training run.
    """

    def __init__(self) -> None:
        """Nothing is asked for yet."""
        self._asked: ProfileRequest | None = None
        self._known = ""
        self._tracing: ProfileRequest | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._step = 0

    def look(self, home: Storage, attempts: Sequence[str | None]) -> None:
        """Look whether the home asks one of these attempts for a trace."""
        try:
            request = _read(home)
        except Exception as fault:  # noqa: BLE001 - the heartbeats go on
            _LOGGER.debug("the request for a trace cannot be read: %s", fault)
            return
        if request is not None and request.is_open and request.id != self._known:
            self._known = request.id
            if set(attempts) & set(request.attempts):
                self._asked = request

    def steps_left(self, step: int, home: Storage, telemetry: Sink) -> float:
        """Begin a trace if one is asked for. Returns how many steps the next inner loop may have; mostly infinite."""
        if self._asked is not None and self._tracing is None:
            self._begin(self._asked.model_copy(update={"first_step": step}), home, telemetry)
        self._step, tracing = step, self._tracing
        if tracing is None or tracing.first_step is None:
            return math.inf
        return max(tracing.first_step + tracing.steps - step, 1)

    def inner_loop(self, steps: int) -> AbstractContextManager[object]:
        """Mark an inner loop of this many steps in the trace, if there is one."""
        if self._tracing is None:
            return nullcontext()
        import tensorflow as tf

        marker: AbstractContextManager[object] = tf.profiler.experimental.Trace(
            "train", step_num=self._step + steps, _r=1
        )
        return marker

    def end_if_done(self, step: int, home: Storage, telemetry: Sink) -> None:
        """End the trace if its steps are done."""
        self._step, tracing = step, self._tracing
        if tracing is not None and tracing.first_step is not None and step >= tracing.first_step + tracing.steps:
            self.end(home, telemetry)

    def end(self, home: Storage, telemetry: Sink) -> None:
        """End the trace, if there is one, and write to the home what was traced."""
        request, folder, self._tracing, self._folder = self._tracing, self._folder, None, None
        if request is None or folder is None:
            return
        with folder:
            try:
                answer = self._traced(request, Path(folder.name), home.with_deadline(_STORE_SECONDS))
            except Exception as fault:  # noqa: BLE001 - see the class
                answer = _refusal(request, f"the trace could not be written: {fault}")
            _answer(answer, home, telemetry)

    def _begin(self, request: ProfileRequest, home: Storage, telemetry: Sink) -> None:
        self._asked, folder = None, None
        try:
            folder = tempfile.TemporaryDirectory(prefix="baton-profile-", ignore_cleanup_errors=True)
            import tensorflow as tf

            profiler = tf.profiler.experimental
            # Without a trace of Python, which would make steps slower.
            options = profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0, device_tracer_level=1)
            profiler.start(folder.name, options)
        # It is not in every build of TensorFlow, and refuses if the user's code traces already.
        except Exception as fault:  # noqa: BLE001 - see the class
            if folder is not None:
                folder.cleanup()
            text = f"TensorFlow's profiler (tf.profiler.experimental) cannot trace in the process at work: {fault}"
            _answer(_refusal(request, text), home, telemetry)
        else:
            self._tracing, self._folder = request, folder

    def _traced(self, request: ProfileRequest, folder: Path, home: Storage) -> ProfileRequest:
        import tensorflow as tf

        tf.profiler.experimental.stop()
        first, last = request.first_step or 0, self._step
        trace = f"{_TRACES}/steps-{first + 1}-{last}-{request.id[:8]}"
        files = sorted(file for file in folder.rglob("*.xplane.pb") if file.is_file())
        if last <= first or not files:
            return _refusal(request, "the training ended before a step was traced")
        for file in files:
            home.upload(file, f"{trace}/{file.name}")
        return request.model_copy(update={"trace": trace, "last_step": last})


def _refusal(request: ProfileRequest, text: str) -> ProfileRequest:
    return request.model_copy(update={"refused": masked(text)[:_REFUSAL_CHARACTERS]})


def _answer(answer: ProfileRequest, home: Storage, telemetry: Sink) -> None:
    """Write an answer in place of its request, and say it."""
    if answer.trace is None:
        note = Note(text=f"no trace for baton profile: {answer.refused}", warning=True)
    else:
        first = 1 + (answer.first_step or 0)
        note = Note(text=f"traced steps {first} to {answer.last_step}: {home.uri}/{answer.trace}")
    with suppress(BatonError):  # who asked sees that nobody answers
        home.with_deadline(_STORE_SECONDS).write(_REQUEST, answer.to_json())
    telemetry.emit(note)
