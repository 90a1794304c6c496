"""The package `baton`: Baton from Python is `from baton import run, Run`.

What is installed is this package alone: `baton.flows` and `baton.tasks` are the folders `flows/` and `tasks/`
(pyproject.toml), so that a user's own `flows` or `tasks` hides nothing of Baton. Importing it imports nothing else;
`flows/api.py` is loaded when one of the two names is used.
"""

from typing import TYPE_CHECKING

__all__ = ["Run", "run"]

if TYPE_CHECKING:
    from baton.flows.api import Run, run
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from baton.flows import api

        return getattr(api, name)
