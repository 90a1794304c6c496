"""Locates a shard: in the dataset's folder, or as a range of a file that existed before."""

from pathlib import Path

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage


def locate_shard(storage: Storage, record: ShardRecord) -> tuple[Storage, str]:
    """Return the store of a shard, and its path there.

    Args:
        storage: store rooted at the dataset's folder.
        record: one shard of the dataset.
    """
    if not record.is_external:
        return storage, record.path
    folder, _, name = record.path.rpartition("/")
    return open_storage(folder or "/", relative_to=Path("/"), guarded=False), name
