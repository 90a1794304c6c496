"""Every error that Baton raises on purpose.

    BatonError                  exit 1  base class
    ├── InvalidInput            exit 2  input that is refused before anything is written
    │   ├── RunFileError        exit 2  a key of the run file
    │   ├── SourceError         exit 2  the data source, or one of its records
    │   │   ├── SourceChanged   exit 2  a source file was written while it was being read
    │   │   └── DamagedInTransit exit 2  bytes of a source changed between the store and this machine
    │   ├── ModelError          exit 2  the user's model or its code
    │   ├── AcceleratorError    exit 2  devices, replicas, batch arithmetic
    │   ├── WeightsError        exit 2  initial weights, or their fit to the model
    │   ├── IdentityChanged     exit 2  the run file differs from the run in its home
    │   ├── PrefectUnavailable  exit 2  no Prefect server answers, and none can be embedded
    │   └── NoSuchRun           exit 2  no run at this address
    ├── StorageError            exit 1  the store refused or failed
    │   ├── StoreRefused        exit 2  credentials, permissions, or the bucket's settings
    │   ├── StoreUnreachable    exit 3  the store did not answer before this process had to stop
    │   ├── PathRefused         exit 2  a path or a link that leads out of its folder
    │   ├── ForeignFile         exit 2  a file that somebody else can have written, where only the user's own will do
    │   ├── FileMissing         exit 1  a file is not there
    │   ├── FileTooShort        exit 1  a file ends too early
    │   ├── FileTooLarge        exit 4  a file is larger than any of its kind
    │   │   └── TooLargeToWrite exit 2  what is to be written is more than any reader reads
    │   └── FileAlreadyThere    exit 1  a create-only write found a file
    ├── RunLogError             exit 4  an entry of the log cannot be read
    │   └── StaleWriter         exit 1  another writer moved the tip first
    ├── DamagedCheckpoint       exit 4  bytes differ from the manifest
    │   └── NothingToRestore    exit 4  every retained checkpoint is damaged
    ├── DamagedDataset          exit 4  a shard differs from the manifest
    ├── StateMismatch           exit 2  the checkpoint belongs to another model
    ├── AnotherVersion          exit 2  a file in the home was written by a newer Baton
    ├── HostsDiffer             exit 4  hosts that must hold the same state hold different values
    ├── AcceleratorLost         exit 3  devices or other hosts went away during the run
    ├── StageLost               exit 3  a remote stage crashed or disappeared
    ├── RunAtWork               exit 3  another process is training this run
    ├── StepFailed              exit 1  a step, a callback or an evaluation failed after training began
    ├── NoProgress              exit 1  several attempts in a row did not advance the run
    └── BlowUp                  exit 1  the loss diverged
        └── NonFinite           exit 1  a loss or a weight is NaN or infinite

A message names the setting, its value and the remedy; options and commands in it are values (`text.Usage`). The
command exits with the error's exit code: 2 for refused input, 3 if the run can be resumed as it is, 4 for damage, 1
otherwise. An error crosses processes as an `ErrorReport`.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.text import Usage, Words, parts_of, worded

_TRACEBACK_CHARACTERS = 40_000


class BatonError(Exception):
    """Base class of Baton's errors.

    Attributes:
        exit_code: exit code of a command that ends with this error.
        field_names: attributes besides the message; the constructor takes each as a keyword argument.
    """

    exit_code: ClassVar[int] = 1
    field_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "") -> None:
        # An error goes to terminals, records and Prefect.
        words = Words(*(masked(part) if isinstance(part, str) else part for part in parts_of(message)))
        safe = masked(words)
        super().__init__(words if safe == words else safe)

    @property
    def fields(self) -> Mapping[str, int | float | str]:
        """Attributes besides the message, by name: the keyword arguments that make an equal error."""
        return {name: getattr(self, name) for name in self.field_names}


class InvalidInput(BatonError):
    """Input is refused before anything is rented, written or lost."""

    exit_code = 2


class RunFileError(InvalidInput):
    """A run file, or an override of it, cannot be used."""


class SourceError(InvalidInput):
    """The data source is missing, empty, or has an unusable record."""


class SourceChanged(SourceError):
    """A source file was written while it was being read."""


class DamagedInTransit(SourceError):
    """Bytes of a source changed between the store and this machine, twice; the source itself may be sound."""


class ModelError(InvalidInput):
    """The user's model, or the code that builds it, cannot be used."""


class AcceleratorError(InvalidInput):
    """The requested devices are not there, or do not fit the batch."""


class WeightsError(InvalidInput):
    """Initial weights are missing, unreadable, or do not fit the model."""


class IdentityChanged(InvalidInput):
    """The run file differs from the run that it would continue."""


class PrefectUnavailable(InvalidInput):
    """Prefect's API cannot be used as configured: no server answers, or none can be embedded."""


class NoSuchRun(InvalidInput):
    """There is no run at the given address."""


class StorageError(BatonError):
    """The store refused or failed."""


class StoreRefused(StorageError):
    """The store refuses until a person changes credentials, a role, or a bucket's settings.

    Only while nothing is written: afterwards a refusal is an outage, and a `StorageError`.
    """

    exit_code = 2


class StoreUnreachable(StorageError):
    """The store did not answer before this process had to stop; committed checkpoints are kept."""

    exit_code = 3


class PathRefused(StorageError):
    """A path leads out of its home, by its text or through a link."""

    exit_code = 2


class ForeignFile(StorageError):
    """Somebody else can have written a file, and what was asked for needs one of this user's own."""

    exit_code = 2


class FileMissing(StorageError):
    """A file is not there."""


class FileTooShort(StorageError):
    """A file ends before the requested range does."""


class FileTooLarge(StorageError):
    """A file has more bytes, or JSON of more values, than any of its kind; it is not read."""

    exit_code = 4


class TooLargeToWrite(FileTooLarge):
    """What is to be written has more bytes or values than any reader reads, as with huge options in a run file."""

    exit_code = 2


class FileAlreadyThere(StorageError):
    """A create-only write found a file at its path."""


class RunLogError(BatonError):
    """The run log cannot be read."""

    exit_code = 4


class StaleWriter(RunLogError):
    """The tip moved after this work started; its result is not committed."""

    exit_code = 1


class DamagedCheckpoint(BatonError):
    """A committed checkpoint's bytes differ from its manifest."""

    exit_code = 4


class NothingToRestore(DamagedCheckpoint):
    """Every retained checkpoint of the run is damaged."""


class DamagedDataset(BatonError):
    """A prepared shard's bytes differ from the dataset's manifest."""

    exit_code = 4


class StateMismatch(BatonError):
    """A checkpoint belongs to another model, or lacks part of this model's state."""

    exit_code = 2


class AnotherVersion(BatonError):
    """A newer Baton wrote a file or a stage's call; it is sound, but this version cannot read it."""

    exit_code = 2


class HostsDiffer(BatonError):
    """Hosts that must hold the same train state hold different values, so one of them computes wrongly."""

    exit_code = 4


class AcceleratorLost(BatonError):
    """Devices or other hosts went away during the run; committed checkpoints are kept."""

    exit_code = 3


class StageLost(BatonError):
    """A remote stage crashed or disappeared; committed checkpoints are kept."""

    exit_code = 3


class RunAtWork(BatonError):
    """Another process is training this run; nothing was started."""

    exit_code = 3


class StepFailed(BatonError):
    """A train step, a test step or a callback failed after training began; committed checkpoints are kept.

    It used an accelerator, so it counts as an attempt, although the data or the model may be the cause.
    """


class NoProgress(BatonError):
    """Several attempts in a row did not advance the run, so no further accelerator time is spent."""


class BlowUp(BatonError):
    """The loss diverged; the diverged state is not committed.

    Attributes:
        step: the step at which it was found, counted from initialization.
    """

    field_names = ("step",)

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NonFinite(BlowUp):
    """A loss or a weight is NaN or infinite; this state is not committed."""


@contextmanager
def errors_worded(face: Callable[[Usage], str]) -> Iterator[None]:
    """Word the errors that are raised inside as a face of Baton does, not as the command line; also a decorator."""
    try:
        yield
    except BatonError as fault:
        fault.args = (worded(str(fault), face),)
        raise


def error_words(error: BaseException) -> str:
    """The class and the message of an error, without secrets."""
    return masked(f"{type(error).__name__}: {error}".strip(": "))


def whole_traceback(error: BaseException) -> str | None:
    """Return the traceback of an error and of its causes, without secrets, and without its middle if it is very long.

    Returns:
        The text; None if the error was never raised.
    """
    if error.__traceback__ is None:
        return None
    text = masked("".join(traceback.format_exception(error)))
    if len(text) <= _TRACEBACK_CHARACTERS:
        return text
    half = _TRACEBACK_CHARACTERS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"
