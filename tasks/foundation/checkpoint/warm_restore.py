"""Restore a checkpoint into the state that a process keeps."""

from tasks.foundation.checkpoint.restore import restore_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.state.warm_state import WarmState
from tasks.foundation.storage.base import Storage


def restore_warm_state(warm: WarmState, home: Storage, ref: CheckpointRef) -> bool:
    """Restore a checkpoint, unless the state holds it already. With several hosts, all of them call it.

    Args:
        warm: the state; every variable gets a new value.
        home: the run's home.
        ref: the checkpoint.

    Returns:
        Whether it was restored; False if all hosts held it, and nothing was read.

    Raises:
        DamagedCheckpoint: see `restore_checkpoint`.
        StateMismatch: the checkpoint belongs to another model.
        StorageError: the store or the temporary folder failed.
    """
    if warm.state.accelerator.all_agree(warm.holds(ref)):
        return False
    initial = warm.initial_values()
    warm.forget_content()
    restore_checkpoint(warm.state, home, ref, initial=initial)
    warm.restores += 1
    warm.set_content(ref)
    return True
