"""Print the content of an image as JSON. The arguments are names of modules to import."""

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
    """Import a module; returns the traceback, or "" if the import succeeds."""
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - reported to the test
        return traceback.format_exc()[-1500:]
    return ""


def normalized(name: str) -> str:
    """The name of a package as in the locks."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    site = Path(sys.prefix) / "lib"
    content = {
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
        content["libtpu"] = importlib.import_module("libtpu").get_library_path()
    except ImportError:
        content["libtpu"] = None
    sys.stdout.write(f"\n{json.dumps(content)}\n")


if __name__ == "__main__":
    main()
