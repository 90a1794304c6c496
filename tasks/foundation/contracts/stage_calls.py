"""The calls of the five stages, one class each, and the error that a stage in another process answers with.

A stage that runs in another process gets its call as one flat JSON object, together with a `RemoteContext`.
"""

import json
from collections.abc import Sequence
from typing import Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator

from baton.tasks.foundation import errors
from baton.tasks.foundation.contracts.attempt import Time
from baton.tasks.foundation.contracts.base import AnswerPath, AttemptId, Contract
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import Environment, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BatonError, InvalidInput, error_words, whole_traceback
from baton.tasks.foundation.text import Usage, Words, parts_of


class StageCall(Contract):
    """The fields of every call."""

    format: Literal[1] = 1
    spec: RunSpec = Field(description="the run file; in a remote call, its storage is an absolute address")


class PrepareDataCall(StageCall):
    """Call of `prepare_data`, which returns a DatasetRef."""


class InitOrRestoreCall(StageCall):
    """Call of `init_or_restore`, which returns the Head."""

    dataset: DatasetRef
    accept: tuple[str, ...] = Field(default=(), description="identity keys that may differ from the run on disk")
    verify_bytes: bool = Field(
        default=False,
        description="read all bytes of the tip, because an attempt to restore it found them damaged",
    )


class TrainSegmentCall(StageCall):
    """Call of `train_segment`, which returns a SegmentResult."""

    request: SegmentRequest
    recorded: Environment = Field(description="the run's environment, from its log")
    accept: tuple[str, ...] = Field(default=(), description="identity keys that may differ from the run on disk")

    @classmethod
    def of(cls, request: SegmentRequest, recorded: Environment, accept: Sequence[str] = ()) -> "TrainSegmentCall":
        """The call for a request, with the run file of that request."""
        return cls(spec=request.spec, request=request, recorded=recorded, accept=tuple(accept))


class RemoteTrainSegmentCall(TrainSegmentCall):
    """`TrainSegmentCall` for another process, which may start later."""

    asked_at: Time | None = Field(
        default=None, description="when the segment was requested, UTC; its time budget counts from then"
    )


class CheckpointToGcsCall(StageCall):
    """Call of `checkpoint_to_gcs`, which returns the Entry."""

    request: SegmentRequest
    result: SegmentResult

    @classmethod
    def of(cls, request: SegmentRequest, result: SegmentResult) -> "CheckpointToGcsCall":
        """The call for a trained segment, with the run file of its request."""
        return cls(spec=request.spec, request=request, result=result)


class RemoteCheckpointToGcsCall(StageCall):
    """`CheckpointToGcsCall` for another process."""

    request: SegmentRequest
    result: AnswerPath = Field(
        description="path of the SegmentResult in the run's home; the metrics of a long segment exceed Prefect's limit"
    )


class EvaluateCall(StageCall):
    """Call of `evaluate`, which returns an Evaluation."""

    dataset: DatasetRef
    checkpoint: CheckpointRef
    recorded: Environment = Field(description="the run's environment, from its log")
    on: SetName = Field(default="validation", description="the set")
    confusion_matrix: bool = Field(default=False, description="whether to save that of a classifier; validation only")


class RemoteContext(Contract):
    """What a stage in another process needs besides its call."""

    code_folder: str = Field(description="the run file's folder, as the stage finds it")
    code: dict[str, str] = Field(
        default_factory=dict, description="digest of each function of that folder that the run file names, by reference"
    )
    attempt: AttemptId | None = Field(
        default=None, description="the attempt that waits for the stage; None outside a training run"
    )


C = TypeVar("C", bound=StageCall)


def pack(call: StageCall, context: RemoteContext) -> str:
    """One flat JSON object with the keys of a call and of its context.

    It is stored in Prefect. So it says nothing of trackers, whose addresses often have passwords: no stage needs them.
    """
    values = call.model_dump(mode="json")
    for holder in (values, values.get("request")):
        if isinstance(holder, dict) and isinstance(holder.get("spec"), dict):
            holder["spec"].pop("tracking", None)
    return json.dumps(values | context.model_dump(mode="json"))


def unpack(kind: type[C], text: str) -> tuple[C, RemoteContext]:
    """Read what `pack` returned, in this or in another version of Baton.

    Args:
        kind: the class of the call.

    Raises:
        InvalidInput: it is not such a call.
        AnotherVersion: a newer version wrote it, with keys that may not be ignored.
    """
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise InvalidInput(f"call: not a readable {kind.__name__}: it is not a JSON object")
    of_context = {key: value for key, value in values.items() if key in RemoteContext.model_fields}
    of_call = {key: value for key, value in values.items() if key not in of_context}
    call = kind.from_json(json.dumps(of_call).encode(), where="call", error=InvalidInput, unknown_keys="forbid")
    context = RemoteContext.from_json(json.dumps(of_context).encode(), where="call", error=InvalidInput)
    return call, context


_PARTS = TypeAdapter(tuple[str | Usage, ...])


class ErrorReport(Contract):
    """An error's class, message and fields, as JSON; options that the message names are values.

    The receiving process may run an older Baton that does not know the class. It then raises the nearest base class
    that it knows, with the same message.
    """

    format: Literal[1] = 1
    error: str = Field(description="name of the class, such as NonFinite")
    bases: tuple[str, ...] = Field(default=(), description="names of its base classes, nearest first")
    parts: tuple[str | Usage, ...] = Field(default=(), description="of the message, with options as values")
    message: str = Field(description="in the words of the command line")
    fields: dict[str, int | float | str] = Field(
        default_factory=dict, description="such as step; see BatonError.fields"
    )
    traceback: str | None = Field(default=None, description="where it was raised, and its causes")

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The report of an error; of one that nobody expects the message has its class, too, and no secrets."""
        if not isinstance(error, BatonError):
            return cls(error=type(error).__name__, message=error_words(error), traceback=whole_traceback(error))
        parts = parts_of(str(error))
        name, *bases = (kind.__name__ for kind in type(error).__mro__ if issubclass(kind, BatonError))
        return cls(
            error=name,
            bases=tuple(bases),
            parts=parts if any(isinstance(part, Usage) for part in parts) else (),
            message=str(error),
            fields=dict(error.fields),
            traceback=whole_traceback(error),
        )

    @property
    def is_expected(self) -> bool:
        """Whether it is one of Baton's errors, whose message has all that a user needs."""
        return bool(self.bases) or self.error == BatonError.__name__

    @field_validator("parts", mode="before")
    @classmethod
    def _known_parts(cls, parts: object) -> tuple[str | Usage, ...]:
        try:
            return _PARTS.validate_python(parts)
        except ValueError:  # a newer version wrote them
            return ()

    @field_validator("message")
    @classmethod
    def _with_values(cls, message: str, found: ValidationInfo) -> str:
        words = Words(*found.data["parts"])
        return words if words == message else message

    def to_error(self) -> BatonError:
        """An error of the same class, or of the nearest base class that this version knows and can construct.

        The traceback of the other process is a note of the error, which the traceback of this process ends with.
        """
        error = self._error()
        if self.traceback is not None:
            error.add_note(f"In the other process:\n{self.traceback}")
        return error

    def _error(self) -> BatonError:
        for name in (self.error, *self.bases):
            kind = getattr(errors, name, None)
            if not (isinstance(kind, type) and issubclass(kind, BatonError)):
                continue
            if set(kind.field_names) <= self.fields.keys():
                return kind(self.message, **{field: self.fields[field] for field in kind.field_names})
        return BatonError(self.message)
