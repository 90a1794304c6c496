"""A service account through google.auth: signed request, token, expiry, and a wrong clock."""

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.api_core.exceptions import Unauthorized
from google.auth.exceptions import RefreshError
from google.cloud import storage
from google.oauth2 import service_account

from tests.fakes.gcs.server import FakeGcs


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return str(pem.decode())


def client_of(server: FakeGcs, private_key: str) -> storage.Client:
    account = {
        "type": "service_account",
        "project_id": "p",
        "client_email": "tester@project.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": private_key,
        "token_uri": f"{server.url}/_fake/token",
    }
    credentials = service_account.Credentials.from_service_account_info(account)
    return storage.Client(project="p", credentials=credentials, client_options={"api_endpoint": server.url})


def test_expired_token_is_renewed(private_key: str) -> None:
    with FakeGcs(require_token=True) as server:
        bucket = client_of(server, private_key).bucket("bucket")
        bucket.blob("n").upload_from_string(b"data")
        # More than one, because the client also reads the bucket's metadata in another thread.
        fetched = server.count("token")
        assert fetched >= 1
        server.control.set_auth(revoke=True)
        assert bucket.blob("n").download_as_bytes() == b"data"
        assert server.count("token") > fetched
        assert server.tally.statuses[401] >= 1


def test_wrong_clock_gets_no_token(private_key: str) -> None:
    with FakeGcs(require_token=True) as server:
        server.control.set_auth(refuse=True)
        with pytest.raises(RefreshError, match="invalid_grant: Invalid JWT"):
            client_of(server, private_key).bucket("bucket").blob("n").exists()


def test_immediately_expired_tokens_are_refused(private_key: str) -> None:
    with FakeGcs(require_token=True) as server:
        server.control.set_auth(expires_in=-1)
        with pytest.raises(Unauthorized, match="Invalid Credentials"):
            client_of(server, private_key).bucket("bucket").blob("n").exists()
