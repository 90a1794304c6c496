"""Commands of a user id that is in no user database, as containers often have, with an empty environment."""

import os
import shutil

_USER_ID = 54321


def can_become_unknown() -> bool:
    """Whether this process can start such commands."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


def command_of_unknown_user(*words: str, **environment: str) -> list[str]:
    """The command that runs `words` as an unknown user, without HOME.

    It may read what root may, because the interpreter can be in root's home folder.

    Args:
        words: the command.
        environment: its whole environment, besides PATH.
    """
    rights = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["setpriv", "--reuid", str(_USER_ID), "--regid", str(_USER_ID), "--clear-groups", *rights]
    variables = [f"{name}={value}" for name, value in {"PATH": os.defpath, **environment}.items()]
    return [*user, "env", "--ignore-environment", *variables, *words]
