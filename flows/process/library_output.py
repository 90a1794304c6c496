"""Masks secrets in what libraries and the user's code log and warn of: addresses with passwords, headers, tracebacks.

Their records go to terminals and, with tracebacks, to Prefect's server, past everything that masks Baton's messages.
"""

import logging
import warnings

from tasks.foundation.messages import masked


class _MaskedRecord(logging.LogRecord):
    """A record of any logger; each handler formats what this class gives it."""

    def __setattr__(self, name: str, value: object) -> None:
        """Mask the traceback, which the first handler formats and keeps here."""
        super().__setattr__(name, masked(value) if name == "exc_text" and isinstance(value, str) else value)

    def getMessage(self) -> str:  # noqa: N802 - the name in `logging`
        """See `logging`."""
        return masked(super().getMessage())


_format_warning = warnings.formatwarning


def _masked_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return masked(_format_warning(message, category, filename, lineno, line))


def mask_library_output() -> None:
    """Mask secrets in log records and warnings from here on, in this process. Repeating it changes nothing."""
    logging.setLogRecordFactory(_MaskedRecord)
    warnings.formatwarning = _masked_warning
