"""The Git revision of the user's code, where its folder is in a Git checkout."""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tasks.foundation.contracts.saved_code import GitRevision

_SECONDS = 10.0
_COMMIT = re.compile(rb"# branch\.oid ([0-9a-f]{40,64})")
# Nothing that the checkout configures is run, and its index is not written.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=all", "--ignored=matching")


def git_revision(folder: Path, files: Iterable[str]) -> GitRevision | None:
    """Ask Git for the commit that is checked out.

    Args:
        folder: the run file's.
        files: of the code, relative to `folder`.

    Returns:
        None without files or Git, outside a checkout, before its first commit, if Git refuses (a checkout of another
        user), or if it takes longer than ten seconds.
    """
    named = [f":(literal){name}" for name in files]
    if not named:
        return None
    # Variables that name another checkout, as in a hook, do not count.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = [*_GIT, "-C", str(folder), *_STATUS, "--", *named]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    commit = next((found[1].decode() for line in lines if (found := _COMMIT.fullmatch(line))), None)
    if done.returncode or commit is None:
        return None
    return GitRevision(commit=commit, changed=any(not line.startswith(b"#") for line in lines))
