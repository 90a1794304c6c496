"""How stages are chained: flows, launching, and the `baton` command. Baton from Python: `from flows import run, Run`.

Importing it imports nothing else; `flows/api.py` is loaded when one of the two names is used.
"""

from typing import TYPE_CHECKING

__all__ = ["Run", "run"]

if TYPE_CHECKING:
    from flows.api import Run, run
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from flows import api

        return getattr(api, name)
