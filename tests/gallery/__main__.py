"""Check all examples of the gallery, or those that are named, and print a table: `python -m tests.gallery [NAME…]`."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.checkout import CHECKOUT

# The processes that train import `tests` from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.gallery.checks import chunks, examples, largest_difference, run_checks

_HEAD = f"| {'example':22} | {'weights':>7} | straight, cut | on 2 replicas | difference from fit | seconds |"
_RULE = "| --- | ---: | --- | --- | ---: | ---: |"


def line_of(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in found:
        reason = found["error"].strip().splitlines()[-1]
        return f"| {name:22} | {reason}"
    same = not found["differing"] and len(set(found["digests"])) == 1 and found["rows"][0] == found["rows"][1]
    kept = not found["changed"] and found["went_on"]
    far = f"{largest_difference(found['losses'], found['fit']):.1e}" if found["fit"] else "draws its own"
    words = f"| {name:22} | {found['weights']:7} | {'same bits' if same else 'DIFFERENT':13} "
    return f"{words}| {'same bits' if kept else 'DIFFERENT':13} | {far:>19} | {found['seconds']:7.1f} |"


def main(names: Sequence[str]) -> None:
    sys.stdout.write(f"{_HEAD}\n{_RULE}\n")
    for some in chunks(names or examples()):
        with tempfile.TemporaryDirectory() as folder:
            for name, found in run_checks(Path(folder), some, log_every=3).items():
                sys.stdout.write(f"{line_of(name, found)}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
