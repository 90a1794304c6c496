"""Memory for large copies is kept, grows, and is never lent twice; what the process has allocated gets huge pages."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from tasks.foundation.state import host_state
from tasks.foundation.state.host_state import PageBuffer, use_huge_pages


def test_memory_is_kept_and_grows() -> None:
    buffer = PageBuffer()
    first = buffer.borrow(100)
    first[:] = b"x" * 100
    buffer.give_back(first)
    again = buffer.borrow(50)
    assert bytes(again) == b"x" * 50
    buffer.give_back(again)
    large = buffer.borrow(5 << 20)
    assert len(large) == 5 << 20
    assert bytes(large[:100]) == bytes(100)


def test_lent_memory_is_not_lent_again() -> None:
    buffer = PageBuffer()
    first, second = buffer.borrow(10), buffer.borrow(10)
    first[:], second[:] = b"1" * 10, b"2" * 10
    assert (bytes(first), bytes(second)) == (b"1" * 10, b"2" * 10)
    buffer.give_back(first)  # late: the second is still lent
    third = buffer.borrow(10)
    third[:] = b"3" * 10
    assert bytes(second) == b"2" * 10


def test_reserved_memory_is_the_one_that_is_lent() -> None:
    buffer = PageBuffer()
    thread = buffer.reserve(20 << 20)
    assert buffer.size == 20 << 20
    lent = buffer.borrow((20 << 20) - 5)
    lent[:] = b"x" * len(lent)
    assert thread is not None
    thread.join()
    assert bytes(lent) == b"x" * len(lent)  # getting it ready changes no content
    assert buffer.reserve(100) is None
    assert buffer.size == 20 << 20


def on_huge_pages(area: mmap.mmap) -> int:
    """Bytes of the mapping, or mappings, from an area's first byte to its last."""
    first = np.frombuffer(area, np.uint8).ctypes.data
    pattern = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (?:.*\n)*?AnonHugePages: +([0-9]+)", re.MULTILINE)
    found = pattern.findall(Path("/proc/self/smaps").read_text())
    return 1024 * sum(
        int(size) for *ends, size in found if int(ends[0], 16) < first + len(area) and int(ends[1], 16) > first
    )


def areas() -> tuple[mmap.mmap, mmap.mmap]:
    """Memory as a C library allocates it, full and nearly empty, each a mapping of its own."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    full, empty = (mmap.mmap(-1, 16 << 20, flags=flags) for _ in range(2))
    for area in (full, empty):
        area.madvise(mmap.MADV_NOHUGEPAGE)  # what is beside them belongs to no mapping of theirs
    full[:] = np.random.default_rng(1).bytes(len(full))
    empty[0] = 1
    full.madvise(mmap.MADV_HUGEPAGE)
    return full, empty


def test_what_is_allocated_gets_huge_pages_and_keeps_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, empty = areas()
    before = bytes(full)
    assert on_huge_pages(full) == on_huge_pages(empty) == 0
    for asks in ("always madvise [never]", "[always] madvise never"):
        (tmp_path / "enabled").write_text(asks)
        monkeypatch.setattr(host_state, "_HUGE_PAGES", tmp_path / "enabled")
        use_huge_pages()
        assert on_huge_pages(full) == 0
    monkeypatch.undo()
    if "[madvise]" not in host_state._HUGE_PAGES.read_text():
        pytest.skip("this system gives huge pages to all, or to none")
    thread = PageBuffer().reserve(100, huge_pages=True)
    assert thread is not None
    thread.join()
    assert bytes(full) == before
    # Its two ends belong to no whole page, and a system under load may have none for some parts.
    assert on_huge_pages(full) >= 8 << 20
    assert on_huge_pages(empty) == 0
