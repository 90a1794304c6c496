"""Log records, tracebacks and warnings of libraries have no secrets, whatever formats them."""

import io
import logging
import warnings
from collections.abc import Iterator

import pytest

from flows.process.library_output import mask_library_output

ADDRESS = "https://me:hunter2/with blank@host/x"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a library's handler prints."""
    before = logging.getLogRecordFactory()
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    mask_library_output()
    text, logger = io.StringIO(), logging.getLogger("library")
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)
    logging.setLogRecordFactory(before)


def test_messages_and_tracebacks_are_masked(printed: io.StringIO) -> None:
    logger = logging.getLogger("library")
    logger.warning("asked %s with %r", ADDRESS, {"api_key": "hunter2"})
    try:
        raise OSError(f"{ADDRESS} refused")  # noqa: TRY301 - a library does
    except OSError:
        logger.exception("no answer")
    assert "hunter2" not in printed.getvalue()
    assert "asked https://***@host/x with {'api_key': '***'}" in printed.getvalue()
    assert "OSError: https://***@host/x refused" in printed.getvalue()


@pytest.mark.usefixtures("printed")
def test_warnings_are_masked() -> None:
    text = warnings.formatwarning(f"{ADDRESS} is slow", UserWarning, "library.py", 3, f"get('{ADDRESS}')")  # type: ignore[arg-type]
    assert text == "library.py:3: UserWarning: https://***@host/x is slow\n  get('https://***@host/x')\n"
