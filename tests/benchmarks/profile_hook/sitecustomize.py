"""Writes the name of each Python thread with the id that the kernel gives it, for `--profile`."""

import os
import threading

_FILE = os.environ.get("BENCHMARK_THREADS")


def _install(file: str) -> None:
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def named(thread: threading.Thread) -> None:
        with open(file, "a", encoding="utf-8") as names:  # noqa: PTH123 - before anything else is imported
            names.write(f"{threading.get_native_id()} {thread.name}\n")
        bootstrap(thread)

    threading.Thread._bootstrap_inner = named  # type: ignore[attr-defined]


if _FILE:
    _install(_FILE)
