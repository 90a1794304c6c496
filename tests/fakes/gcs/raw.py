"""An HTTP client without retries or checks, which shows what the fake really sends."""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

MULTIPART_TYPE = 'multipart/related; boundary="==0=="'


@dataclass(frozen=True, slots=True)
class RawResponse:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    @property
    def message(self) -> str:
        return str(self.json()["error"]["message"])


class Raw:
    """One keep-alive connection. A broken one is replaced by the next request."""

    def __init__(self, url: str, *, timeout_seconds: float = 10.0) -> None:
        self.url = url
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_seconds)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def request(
        self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None, **query: Any
    ) -> RawResponse:
        target = target.removeprefix(self.url)
        if query:
            target += ("&" if "?" in target else "?") + urlencode(query)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            self._connection.request(method, target, body=data, headers=dict(headers or {}))
            response = self._connection.getresponse()
            return RawResponse(response.status, response.headers, response.read())
        except Exception:
            self._connection.close()
            raise

    def insert(
        self, name: str, data: bytes, *, bucket: str = "bucket", headers: Mapping[str, str] | None = None, **query: Any
    ) -> RawResponse:
        """A simple upload."""
        path = f"/upload/storage/v1/b/{bucket}/o"
        return self.request("POST", path, data, headers, uploadType="media", name=name, **query)

    def insert_multipart(self, name: str, data: bytes, *, line: str = "\n", **query: Any) -> RawResponse:
        """A multipart upload as gcsfs sends it, or with other line ends."""
        parts = ("--==0==", "Content-Type: application/json", "", json.dumps({"name": name}), "--==0==")
        head = line.join((*parts, "Content-Type: text/plain", "", ""))
        body = head.encode() + data + f"{line}--==0==--".encode()
        path = "/upload/storage/v1/b/bucket/o"
        return self.request("POST", path, body, {"Content-Type": MULTIPART_TYPE}, uploadType="multipart", **query)

    def initiate(self, name: str, *, bucket: str = "bucket", **query: Any) -> str:
        """Start a resumable upload; returns its session URL."""
        path = f"/upload/storage/v1/b/{bucket}/o"
        response = self.request("POST", path, {}, uploadType="resumable", name=name, **query)
        assert response.status == 200, response.body
        return str(response.headers["Location"])

    def chunk(self, session: str, where: str, data: bytes = b"", method: str = "PUT") -> RawResponse:
        return self.request(method, session, data, {"Content-Range": f"bytes {where}"})

    def get(self, name: str, *, bucket: str = "bucket", **query: Any) -> RawResponse:
        return self.request("GET", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}", **query)

    def media(self, name: str, headers: Mapping[str, str] | None = None, **query: Any) -> RawResponse:
        return self.request(
            "GET", f"/storage/v1/b/bucket/o/{quote(name, safe='')}", None, headers, alt="media", **query
        )

    def delete(self, name: str, *, bucket: str = "bucket", **query: Any) -> RawResponse:
        return self.request("DELETE", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}", **query)

    def list(self, *, bucket: str = "bucket", **query: Any) -> RawResponse:
        return self.request("GET", f"/storage/v1/b/{bucket}/o", **query)
