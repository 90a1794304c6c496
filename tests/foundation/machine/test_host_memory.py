"""Memory that is left is the smallest of what the machine and every control group leave."""

from pathlib import Path

import pytest

from baton.tasks.foundation.machine.processes import available_bytes, enough_memory_for_snapshot

GiB = 1 << 30


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\n"}
GROUP = "sys/fs/cgroup/kubepods/pod7"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 8 * GiB),
        ({**MACHINE, "proc/self/cgroup": "0::/\n"}, 8 * GiB),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 8 * GiB),
        (
            {
                **MACHINE,
                "proc/self/cgroup": "0::/kubepods/pod7\n",
                f"{GROUP}/memory.max": f"{4 * GiB}\n",
                f"{GROUP}/memory.current": f"{3 * GiB}\n",
                f"{GROUP}/memory.stat": f"anon 5\ninactive_file {GiB}\n",
            },
            2 * GiB,
        ),
        (
            {
                **MACHINE,
                "proc/self/cgroup": "0::/kubepods/pod7\n",
                f"{GROUP}/memory.max": "max\n",
                "sys/fs/cgroup/kubepods/memory.max": f"{4 * GiB}\n",
                "sys/fs/cgroup/kubepods/memory.current": f"{5 * GiB}\n",
            },
            0,
        ),
        (
            {
                **MACHINE,
                "proc/self/cgroup": "12:cpu,cpuacct:/a\n5:memory:/not/mounted\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GiB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GiB}\n",
            },
            2 * GiB,
        ),
        ({**MACHINE, "proc/self/cgroup": "5:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "x"}, 8 * GiB),
    ],
)
def test_available_memory_is_the_smallest_limit(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert available_bytes(system(tmp_path, files)) == expected


@pytest.mark.parametrize(("size", "enough"), [(0, True), (7 * GiB, True), (8 * GiB, False), (80 * GiB, False)])
def test_a_snapshot_must_fit(tmp_path: Path, size: int, enough: bool) -> None:
    assert enough_memory_for_snapshot(size, root=system(tmp_path, MACHINE)) is enough
    assert enough_memory_for_snapshot(size, root=tmp_path / "unknown")


def test_this_machine_says_how_much_it_has() -> None:
    assert (available_bytes() or 0) > 1 << 20
