"""The control endpoints below /_fake/, and the tokens that the fake issues. The real service has neither."""

import secrets
from typing import TYPE_CHECKING, Any

from tests.fakes.gcs.api import Call, Request, Response
from tests.fakes.gcs.faults import FaultPlan
from tests.fakes.gcs.objects import Refusal
from tests.fakes.gcs.wire import Body, Wire

if TYPE_CHECKING:
    from tests.fakes.gcs.server import FakeGcs

INVALID_GRANT = {
    "error": "invalid_grant",
    "error_description": "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. "
    "Check your iat and exp values in the JWT claim.",
}


class Control:
    """Handles /_fake/. These requests get no faults, and only token requests are counted."""

    def __init__(self, fake: "FakeGcs", *, require_token: bool) -> None:
        self.fake = fake
        self.required = require_token
        self.refuse = False
        self._tokens: set[str] = set()

    def handle(self, wire: Wire, request: Request) -> bool:
        """Respond to a request to a control endpoint; returns False for any other request."""
        if not request.path.startswith("/_fake/"):
            return False
        request.body = Body(wire, dict(request.headers)).fill()
        action = request.path.removeprefix("/_fake/")
        try:
            handlers = {
                "state": self._state,
                "faults": self._faults,
                "reset-counters": self._reset_counters,
                "token": self._token,
            }
            response = handlers.get(action, self._unknown)(request)
        except Refusal as refusal:
            response = Response.of_refusal(refusal)
        except (TypeError, ValueError, KeyError) as error:
            response = Response.of_refusal(Refusal(400, f"{type(error).__name__}: {error}"))
        wire.respond(response)
        return True

    def _state(self, _: Request) -> Response:
        fake = self.fake
        with fake.tally.lock, fake.store.lock:
            tally = fake.tally
            state: dict[str, Any] = {
                "counts": {f"{method} {kind}": number for (method, kind), number in tally.counts.items()},
                "statuses": {str(status): number for status, number in tally.statuses.items()},
                "media": {f"{bucket}/{name}": number for (bucket, name), number in tally.media.items()},
                "bytes_in": tally.bytes_in,
                "bytes_out": tally.bytes_out,
                "faults": list(fake.fault_run.log),
                "objects": {
                    name: {
                        one: {"size": found.size, "generation": found.generation} for one, found in home.live.items()
                    }
                    for name, home in fake.store.buckets.items()
                },
                "errors": [repr(error) for error in fake.errors],
            }
        return Response.of_json(state)

    def _unknown(self, request: Request) -> Response:
        raise Refusal(404, f"Not Found: no control endpoint {request.path}")

    def _faults(self, request: Request) -> Response:
        self.fake.faults = FaultPlan(**request.json())
        return Response.of_json({})

    def _reset_counters(self, _: Request) -> Response:
        self.fake.reset_counters()
        return Response.of_json({})

    def _token(self, request: Request) -> Response:
        self.fake.tally.request(request.method, Call("token"))
        if self.refuse:
            return Response.of_json(INVALID_GRANT, 400)
        token = f"fake-{secrets.token_hex(8)}"
        self._tokens.add(token)
        return Response.of_json({"access_token": token, "expires_in": 3600, "token_type": "Bearer"})

    def authorize(self, request: Request) -> None:
        """Refuse a request without a valid token from this fake."""
        if not self.required:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self._tokens:
            raise Refusal(401, "Invalid Credentials", "authError", {"WWW-Authenticate": 'Bearer realm="fake"'})
