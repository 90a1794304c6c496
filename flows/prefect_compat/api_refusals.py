"""What Prefect's API refuses for good: such a request is not retried."""

from typing import Final

from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from tasks.foundation.errors import InvalidInput
from tasks.foundation.messages import masked

_SERVER_FAULT: Final = 500
_TEMPORARY: Final = frozenset({408, 429})  # timeout, too many requests
CREDENTIALS: Final = frozenset({401, 403})


def require_temporary(fault: Exception) -> None:
    """Refuse to retry a request to Prefect's API that will fail again.

    Raises:
        InvalidInput: the API refuses the credentials.
        PrefectHTTPStatusError: it refuses the request for another reason.
    """
    if not isinstance(fault, PrefectHTTPStatusError):
        return
    code = fault.response.status_code
    if code in CREDENTIALS:
        url = masked(str(PREFECT_API_URL.value()))
        raise InvalidInput(
            f"PREFECT_API_URL = {url}: Prefect's API refuses the credentials (HTTP {code}). Set "
            "PREFECT_API_KEY (Prefect Cloud) or PREFECT_API_AUTH_STRING (a server with a password), or set "
            "PREFECT_API_URL to another server"
        ) from fault
    if code < _SERVER_FAULT and code not in _TEMPORARY:
        raise fault
