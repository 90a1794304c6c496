"""Every error that Baton raises on purpose.

    BatonError                      exit  retry can help
    ├── InvalidInput                   2  no    refused before anything is written
    │   ├── RunFileError                        a key of the run file
    │   ├── SourceError                         a record of the data
    │   │   ├── SourceChanged                   a file was written while it was being read
    │   │   └── DamagedInTransit        yes     its bytes were damaged on their way here, twice
    │   ├── ModelError                          the user's model or its code
    │   ├── AcceleratorError                    devices, replicas, batch arithmetic
    │   ├── WeightsError                        initial weights, or their fit to the model
    │   ├── IdentityChanged                     the run on disk is another one
    │   ├── PrefectUnavailable                  Prefect's server, or the folder of an embedded one, cannot be used
    │   └── NoSuchRun                           nothing is at that address
    ├── StorageError                   1  yes   the store refused or failed
    │   ├── StoreRefused             2  no    credentials, permissions, or the bucket's settings
    │   ├── StoreUnreachable         3  yes   this process had to go while the store was away; what is committed stays
    │   ├── PathRefused              2  no    a name or a link that leads out of the folder it belongs to
    │   ├── FileMissing                   no
    │   ├── FileTooShort                  no    it ends before the bytes that were asked for
    │   └── FileAlreadyThere                    a create-only write came second
    ├── RunLogError                    4  no    an entry cannot be read
    │   └── StaleWriter                1  no    another writer moved the tip first
    ├── DamagedCheckpoint              4  yes   bytes differ from the manifest
    │   └── NothingToRestore           4  no    every retained checkpoint is damaged
    ├── DamagedDataset                 4  no    a shard differs from the manifest
    ├── StateMismatch                  2  no    the checkpoint is of another model
    ├── AnotherVersion                 2  no    a file of a run's home was written by a newer Baton
    ├── StageLost                      3  yes   a stage that ran elsewhere crashed, or was not heard of again
    ├── AcceleratorLost                3  yes   devices or other hosts went away under the run; what is committed stays
    ├── RunAtWork                      3  yes   another process trains the run at this moment
    ├── StepFailed                     1  no    a step, a callback or an evaluation, once training had begun
    ├── NoProgress                     1  no    attempt after attempt, the run gets no further
    └── BlowUp                         1  no    the loss has run away
        └── NonFinite                  1  no    a loss or a weight is NaN or infinite

Each says the name, the value and the remedy. The command turns them into its exit code; retries ask
`retryable`.
"""

from typing import ClassVar


class BatonError(Exception):
    """Root of the tree."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class InvalidInput(BatonError):
    """Input that is refused before anything is rented, written or lost."""

    exit_code = 2


class RunFileError(InvalidInput):
    """A run file, or an override of it, cannot be used."""


class SourceError(InvalidInput):
    """The data source is missing, empty or holds an unusable record."""


class SourceChanged(SourceError):
    """A file of the source was written while it was being read."""


class DamagedInTransit(SourceError):
    """Bytes of a source were damaged on their way here; the source itself may be sound."""

    retryable = True


class ModelError(InvalidInput):
    """The user's model or the code that builds it cannot be used."""


class AcceleratorError(InvalidInput):
    """The devices asked for are not there, or do not fit the batch."""


class WeightsError(InvalidInput):
    """Initial weights are not there, cannot be read, or do not fit the model."""


class IdentityChanged(InvalidInput):
    """The run file differs from the run that it would continue."""


class PrefectUnavailable(InvalidInput):
    """Prefect's API cannot be had as it is set up: no server answers, or none can be embedded."""


class NoSuchRun(InvalidInput):
    """No run's home is at the address given."""


class StorageError(BatonError):
    """The store refused or failed."""

    retryable = True


class StoreRefused(StorageError):
    """The store will not have it until a person changes something: credentials, a role, a bucket's settings."""

    exit_code = 2
    retryable = False


class StoreUnreachable(StorageError):
    """The store could not be reached before this process had to go; what is committed stays."""

    exit_code = 3


class PathRefused(StorageError):
    """A path of a home leads out of it: by its text, or by a link."""

    exit_code = 2
    retryable = False


class FileMissing(StorageError):
    """A file that was asked for is not there."""

    retryable = False


class FileTooShort(StorageError):
    """A file ends before the bytes that were asked for."""

    retryable = False


class FileAlreadyThere(StorageError):
    """A create-only write found the file there."""

    retryable = False


class RunLogError(BatonError):
    """The run log cannot be read."""

    exit_code = 4


class StaleWriter(RunLogError):
    """The tip moved since this work started; its result is not committed."""

    exit_code = 1


class DamagedCheckpoint(BatonError):
    """A committed checkpoint's bytes differ from its manifest."""

    exit_code = 4
    retryable = True


class NothingToRestore(DamagedCheckpoint):
    """Every checkpoint that the run retained is damaged."""

    retryable = False


class DamagedDataset(BatonError):
    """A prepared shard's bytes differ from the dataset's manifest."""

    exit_code = 4


class StateMismatch(BatonError):
    """A checkpoint belongs to another model, or lacks part of this one's state."""

    exit_code = 2


class AnotherVersion(BatonError):
    """A file, or a stage's call, was written by a newer Baton; it is sound, and this version cannot read it."""

    exit_code = 2


class AcceleratorLost(BatonError):
    """Devices, or other hosts of the same run, went away under it; what is committed stays."""

    exit_code = 3
    retryable = True


class StageLost(BatonError):
    """A stage that ran elsewhere crashed, or was not heard of again; what is committed stays."""

    exit_code = 3
    retryable = True


class RunAtWork(BatonError):
    """Another process trains the run at this moment; nothing was begun."""

    exit_code = 3
    retryable = True


class StepFailed(BatonError):
    """A train step, a test step or a callback failed once training had begun; what is committed stays.

    The data, the model or the machine may be to blame. It costs devices each time, so it counts as an attempt.
    """


class NoProgress(BatonError):
    """Several attempts in a row did not bring the run further; another one would only cost."""


class BlowUp(BatonError):
    """The loss has run away; nothing of it is committed.

    Attributes:
        step: the step it was found at, counted from initialization.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NonFinite(BlowUp):
    """A loss or a weight is NaN or infinite; nothing of it is committed."""
