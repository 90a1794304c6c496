"""The version of Baton that is installed."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

# The public index has another project with the name `baton`.
DISTRIBUTION: Final = "baton-relay"


def baton_version() -> str | None:
    """Return Baton's version; None where only its source files are, as in some images."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None
