"""Lets TensorFlow's own reader of gs:// addresses reach the fake Cloud Storage server.

That reader has no setting for the address of the store. But its libcurl takes a proxy and a certificate authority from
the environment, so a proxy on loopback can be the store: it ends TLS with a certificate of its own for
*.googleapis.com, and passes each request on to the fake.
"""

import datetime as dt
import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NAMES = "*.googleapis.com"
_DOWNLOADS = "storage.googleapis.com"  # its paths are /BUCKET/NAME; the JSON API has another host
_NOT_PASSED_ON = {"connection", "content-length", "date", "server", "transfer-encoding"}


class GoogleProxy(ThreadingHTTPServer):
    """The proxy, in threads of this process.

    Attributes:
        environment: the variables with which a process reads gs:// through it.
        downloads: paths of the downloads that were passed on.
        refuses: respond 403 to every request, as to an account without access.
    """

    def __init__(self, store: str, folder: Path) -> None:
        """Listen on a free port.

        Args:
            store: the URL of the fake.
            folder: for the certificate and its key.
        """
        super().__init__(("127.0.0.1", 0), _Connection)
        self.store = urlsplit(store).netloc
        self.downloads: list[str] = []
        self.refuses = False
        certificate, key = _self_signed(folder)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate, key)
        self.environment = {
            "https_proxy": f"http://127.0.0.1:{self.server_port}",
            "no_proxy": "127.0.0.1,localhost",
            "NO_PROXY": "127.0.0.1,localhost",
            "CURL_CA_BUNDLE": str(certificate),
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }


class _Connection(BaseHTTPRequestHandler):
    server: GoogleProxy
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self) -> None:
        self._host = self.path.partition(":")[0]
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def do_GET(self) -> None:
        path = self.path
        if self._host == _DOWNLOADS:
            _, bucket, name = path.split("/", 2)
            path = f"/download/storage/v1/b/{bucket}/o/{name}?alt=media"
            self.server.downloads.append(self.path)
        with closing(http.client.HTTPConnection(self.server.store)) as store:
            store.request("GET", path, headers={name: value for name, value in self.headers.items() if name != "Host"})
            found = store.getresponse()
            body = b"Access denied." if self.server.refuses else found.read()
        self.send_response(403 if self.server.refuses else found.status)
        for name, value in found.getheaders():
            if name.lower() not in _NOT_PASSED_ON:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def google_proxy(store: str, folder: Path) -> Iterator[GoogleProxy]:
    """The proxy, listening within the block."""
    with GoogleProxy(store, folder) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()


def _self_signed(folder: Path) -> tuple[Path, Path]:
    """Make a certificate, which is its own authority, and its key; returns their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test of Baton")])
    now, day = dt.datetime.now(dt.UTC), dt.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAMES)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    return files
