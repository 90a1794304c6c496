"""A FAKE of the Hugging Face hub on loopback, for tests: datasets at one commit each, with fault injection.

    with FakeHub() as hub:
        hub.add("owner/name", commit, {"README.md": b"...", "data/train-00000-of-00001.parquet": b"..."})
        ... HF_ENDPOINT=hub.url ...

It answers the two calls that a download needs: the listing of a commit's files, and one file. Files of Parquet are held
by LFS, so their ETag is their sha256, as on the hub.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class FakeHub:
    """The server.

    Attributes:
        requests: method and path of each request so far.
        damaged: names of files of which other bytes are sent than the hub says.
        status: a status that refuses every request, with the hub's code for it; None: none.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.damaged: set[str] = set()
        self.status: tuple[int, str] | None = None
        self._files: dict[tuple[str, str], dict[str, bytes]] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *_: Any) -> None:
                """Tests read `requests`."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, commit: str, files: dict[str, bytes]) -> None:
        """Have a dataset at a commit."""
        self._files[name, commit] = files

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = unquote(urlsplit(handler.path).path).strip("/")
        self.requests.append((handler.command, path))
        if self.status is not None:
            code, word = self.status
            _send(handler, code, b"", {"X-Error-Code": word})
            return
        match path.split("/"):
            case ["api", "datasets", owner, name, "tree", commit]:
                if files := self._of(handler, f"{owner}/{name}", commit):
                    _send(handler, 200, json.dumps([_entry(*each) for each in files.items()]).encode(), {})
            case ["datasets", owner, name, "resolve", commit, *parts]:
                if files := self._of(handler, f"{owner}/{name}", commit):
                    self._send_file(handler, files, "/".join(parts), commit)
            case _:
                _send(handler, 404, b"", {})

    def _of(self, handler: BaseHTTPRequestHandler, name: str, commit: str) -> dict[str, bytes] | None:
        found = self._files.get((name, commit))
        if found is None:
            known = name in {each for each, _ in self._files}
            _send(handler, 404, b"", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
        return found

    def _send_file(self, handler: BaseHTTPRequestHandler, files: dict[str, bytes], name: str, commit: str) -> None:
        if name not in files:
            _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_entry(name, data)["oid"]}"'}
        if "lfs" in _entry(name, data):
            headers |= {"X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        _send(handler, 200, bytes(len(data)) if name in self.damaged else data, headers)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    """Return a row of the listing."""
    oid = hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": oid}
    if name.endswith(".parquet"):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def _send(handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(data)
