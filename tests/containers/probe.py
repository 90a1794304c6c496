"""Runs within an image: tells what it holds. Arguments: modules to import; the last line is the answer, as JSON."""

import importlib
import json
import os
import re
import shutil
import sys
import traceback
from importlib.metadata import distributions
from pathlib import Path


def imported(name: str) -> str:
    """What came of importing a module: nothing to say, or the error."""
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - the test shows it, whatever it is
        return traceback.format_exc()[-1500:]
    return ""


def normalized(name: str) -> str:
    """A package's name as locks write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    site = Path(sys.prefix) / "lib"
    answer = {
        "imports": {name: imported(name) for name in sys.argv[1:]},
        "distributions": sorted(normalized(found.metadata["Name"] or "") for found in distributions()),
        "programs": {name: shutil.which(name) for name in ("baton", "prefect", "python", "gcc", "cc", "make", "git")},
        "prefix": sys.prefix,
        "uid": os.getuid(),
        "folder": str(Path.cwd()),
        "writable": [name for name in ("/code", "/home/baton", "/opt/baton", "/opt/venv") if os.access(name, os.W_OK)],
        "environment": dict(os.environ),
        "leftovers": [
            str(path)
            for pattern in ("root/.cache/*", "home/baton/.cache/*", "var/lib/apt/lists/*_*", "tmp/*", "src")
            for path in Path("/").glob(pattern)
        ],
        "bytecode": any(site.rglob("prefect/__pycache__/flows.*.pyc")),
    }
    try:
        answer["libtpu"] = importlib.import_module("libtpu").get_library_path()
    except ImportError:
        answer["libtpu"] = None
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
