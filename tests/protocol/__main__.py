"""Check the model of the protocol in larger spaces, and print what was visited.

python -m tests.protocol    about 10 minutes and 8 GB of memory
"""

import sys
import time

from tests.protocol.model_checker import check

SPACES = (
    {"WRITERS": 2, "CHECKPOINTS": 5, "ENTRIES": 10},
    {"WRITERS": 2, "CHECKPOINTS": 4, "ENTRIES": 9, "REWINDS": 1},
    {"WRITERS": 2, "CHECKPOINTS": 4, "ENTRIES": 9, "DAMAGES": 1},
    {"WRITERS": 2, "CHECKPOINTS": 4, "ENTRIES": 9, "FORK": 1},
    {"WRITERS": 3, "CHECKPOINTS": 3, "ENTRIES": 7},
    {"WRITERS": 3, "CHECKPOINTS": 3, "ENTRIES": 7, "REWINDS": 1, "DAMAGES": 1},
)


def main() -> int:
    """Check every space.

    Returns:
        The exit code: 1 if a rule is broken.
    """
    faults = 0
    for space in SPACES:
        began = time.monotonic()
        found = check(space, megabytes=8000)
        faults += bool(found.fault)
        words = ", ".join(f"{name.lower()} {value}" for name, value in space.items())
        seconds = time.monotonic() - began
        sys.stdout.write(f"{words}: {found.states:,} states, {seconds:.0f} s, {found.fault or 'sound'}\n")
        sys.stdout.flush()
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
