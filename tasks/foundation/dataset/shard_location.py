"""Where a shard lies: in the dataset's folder, or as part of a file that was there before."""

from pathlib import Path

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage


def located(storage: Storage, record: ShardRecord) -> tuple[Storage, str]:
    """The store of a shard, and its path there.

    Args:
        storage: rooted at the dataset's folder.
        record: one of its shards.
    """
    if not record.is_elsewhere:
        return storage, record.path
    folder, _, name = record.path.rpartition("/")
    return open_storage(folder or "/", relative_to=Path("/"), fenced=False), name
