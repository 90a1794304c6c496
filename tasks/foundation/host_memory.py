"""How much memory this process may still use: of the machine, and of its container."""

from pathlib import Path

_ROOT = Path("/")
# Besides the copy itself: what a save in flight needs for blocks, requests and the index.
_MARGIN_BYTES = 256 << 20


def enough_memory_for_snapshot(size: int, *, root: Path = _ROOT) -> bool:
    """Whether a copy of the train state fits into memory, so that it can be saved beside the training.

    Args:
        size: of the copy, in bytes.
        root: where the system's files are.
    """
    available = available_bytes(root)
    return available is None or size + _MARGIN_BYTES <= available


def available_bytes(root: Path = _ROOT) -> int | None:
    """Memory that can be used without swapping, in bytes; None if the system does not say."""
    limits = [_of_machine(root), _of_container(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_machine(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _of_container(root: Path) -> int | None:
    """What is left of the limit of this process's control group and of those above it."""
    left: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        folder, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            folder /= "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        own = folder / group.strip("/")
        # In a container the group's own folder may be mounted as the root.
        for place in (own, *own.parents[: len(own.relative_to(folder).parts)]):
            left += _left_of(place, *files)
    return min(left, default=None)


def _left_of(place: Path, limit_file: str, used_file: str, cached_key: str) -> list[int]:
    limit, used = _text(place / limit_file).strip(), _text(place / used_file).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return []
    statistics = dict(line.split() for line in _text(place / "memory.stat").splitlines())
    # Files that were read and are not in use count as used, and are dropped when memory is needed.
    return [max(0, int(limit) - int(used) + int(statistics.get(cached_key, 0)))]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
