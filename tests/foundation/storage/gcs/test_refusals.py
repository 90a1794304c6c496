"""What people meet who have the wrong credentials, role, bucket or clock: each its own sentence, with the remedy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.errors import BatonError, FileMissing, InvalidInput, StorageError, StoreRefused
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.gcs.refusals import refusal
from tasks.foundation.storage.gcs.responses import Answered, without_queries
from tasks.foundation.storage.gcs.retrying import RetryPolicy, is_transient
from tasks.foundation.storage.gcs.storage import CloudStorage
from tasks.foundation.storage.opening import open_storage
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan

QUICK = RetryPolicy(total_seconds=5, stall_seconds=2, first_wait_seconds=0.01)
ROLE = "roles/storage.objectUser"

# Asks for one object with Google's usual credentials, and says how that ended.
ASK = """
import sys
from tasks.foundation.errors import BatonError
from tasks.foundation.storage.gcs.responses import Answered, without_queries
from tasks.foundation.storage.gcs.retrying import RetryPolicy, is_transient
from tasks.foundation.storage.gcs.storage import CloudStorage
if len(sys.argv) > 1:
    # The fake as the real address, so that credentials are asked for.
    from gcsfs.core import GCSFileSystem
    GCSFileSystem._location = property(lambda _: sys.argv[1])
try:
    policy = RetryPolicy(total_seconds=3, stall_seconds=2, first_wait_seconds=0.01)
    there = CloudStorage("bucket", "", policy).exists("x")
    print("answered", there)
except BatonError as fault:
    print(type(fault).__name__, fault.exit_code, fault.retryable, fault)
"""


def asked(folder: Path, *arguments: str, **environment: str) -> str:
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "NO_GCE_CHECK": "true", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, *arguments],
        env={**plain, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def service_account(folder: Path, token_uri: str) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    file = folder / "account.json"
    file.write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": "project",
                "private_key_id": "1",
                "private_key": pem,
                "client_email": "baton@project.iam.gserviceaccount.com",
                "client_id": "1",
                "token_uri": token_uri,
            }
        )
    )
    return file


def test_no_credentials(tmp_path: Path) -> None:
    said = asked(tmp_path)
    assert said.startswith("StoreRefused 2 False gs://bucket/x: there are no credentials for Cloud Storage here.")
    assert "gcloud auth application-default login" in said
    assert "GOOGLE_APPLICATION_CREDENTIALS" in said


def test_a_service_account_is_used_and_its_token_renewed_when_the_store_refuses_it(tmp_path: Path) -> None:
    with FakeGcs(require_token=True) as server:
        file = service_account(tmp_path, f"{server.url}/_fake/token")
        assert asked(tmp_path, server.url, GOOGLE_APPLICATION_CREDENTIALS=str(file)) == "answered False\n"
        assert server.counts["GET", "object.get"] == 1


def test_a_wrong_clock_is_thought_of(tmp_path: Path) -> None:
    with FakeGcs(require_token=True) as server:
        server.control.refuse = True
        file = service_account(tmp_path, f"{server.url}/_fake/token")
        said = asked(tmp_path, server.url, GOOGLE_APPLICATION_CREDENTIALS=str(file))
    assert said.startswith("StoreRefused 2 False gs://bucket/x: Google refuses these credentials, most likely because")
    assert "this machine's clock is wrong: it says 20" in said
    assert "timedatectl set-ntp true" in said
    assert "PRIVATE" not in said
    assert "Bearer" not in said


@pytest.mark.parametrize(
    ("denied", "doing", "act"),
    [
        ("storage.objects.create", "make objects", lambda store: store.create("log/0", b"1")),
        ("storage.objects.create", "make objects", lambda store: store.write("x", b"1")),
        ("storage.objects.delete", "delete or replace objects", lambda store: store.delete("there")),
        ("storage.objects.delete", "delete or replace objects", lambda store: store.write("there", b"2")),
        ("storage.objects.get", "read objects", lambda store: store.read("there")),
        ("storage.objects.list", "list objects", lambda store: list(store.files(""))),
    ],
)
def test_a_missing_permission_is_named_with_the_role_that_has_it(
    cloud: FakeGcs, denied: str, doing: str, act: Any
) -> None:
    storage = CloudStorage("bucket", "", QUICK)
    storage.write("there", b"1")
    cloud.store.set_bucket("bucket", denied={denied})
    with pytest.raises(StoreRefused, match=rf"these credentials may not {doing} here \({denied} is missing\)") as fault:
        act(storage)
    assert ROLE in str(fault.value)
    assert "gcloud storage buckets add-iam-policy-binding gs://bucket" in str(fault.value)
    assert (fault.value.exit_code, fault.value.retryable) == (2, False)


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.create("log/0", b"1"),
        lambda store: store.upload(Path(__file__), "x"),
        lambda store: list(store.files("log")),
        lambda store: list(store.folders("")),
        lambda store: store.probe(),
    ],
    ids=["create", "upload", "files", "folders", "probe"],
)
@pytest.mark.usefixtures("cloud")
def test_a_missing_bucket_is_told_from_a_missing_object(act: Any) -> None:
    storage = CloudStorage("no-such-bucket", "runs", QUICK)
    with pytest.raises(StoreRefused, match=r"there is no bucket gs://no-such-bucket; .*gcloud storage buckets create"):
        act(storage)
    with pytest.raises(FileMissing, match=r"gs://bucket/x is not there"):
        CloudStorage("bucket", "", QUICK).read("x")


def test_a_bucket_that_keeps_everything_is_refused_before_anything_is_made(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", retention_seconds=86400)
    storage = CloudStorage("bucket", "runs", QUICK)
    with pytest.raises(StoreRefused, match=r"keeps every object for 86400 seconds .*--clear-retention-period"):
        storage.probe()
    assert cloud.store.names("bucket") == []


def test_where_the_bucket_may_not_be_looked_at_the_probe_finds_out(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get"})
    storage = CloudStorage("bucket", "runs", QUICK)
    assert storage.probe() == []
    assert cloud.store.names("bucket") == []
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get", "storage.objects.delete"})
    with pytest.raises(StoreRefused, match=r"may not delete.*\.probe-\w+ is left behind"):
        storage.probe()
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get", "storage.objects.create"})
    with pytest.raises(StoreRefused, match=r"may not make objects"):
        storage.probe()


def test_old_versions_that_are_kept_are_warned_of(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", versioning=True)
    [note] = CloudStorage("bucket", "runs", QUICK).probe()
    assert "keeps old versions" in note
    assert "deploy/README.md" in note


def test_a_retention_that_is_met_later(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "runs", QUICK)
    storage.write("x", b"1")
    cloud.store.set_bucket("bucket", retention_seconds=86400)
    with pytest.raises(StoreRefused, match=r"gs://bucket may not be deleted or replaced yet"):
        storage.delete("x")


def test_requester_pays(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", requester_pays=True)
    with pytest.raises(StoreRefused, match=r"lets its readers pay.*--no-requester-pays"):
        CloudStorage("bucket", "", QUICK).read("x")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("The billing account for the owning project is disabled in state absent", "no open billing account"),
        (
            "Cloud Storage JSON API has not been used in project 12 before or it is disabled",
            "gcloud services enable storage.googleapis.com",
        ),
        ("User project specified in the request is invalid.", "gcloud config set project PROJECT"),
        ("Unknown project id: 12", "gcloud config set project PROJECT"),
        (
            "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: x",
            "inside its perimeter",
        ),
        ("Permission denied on Cloud KMS key.", "encryption key"),
        ("KMS key version is not enabled, current state is: DISABLED.", "encryption key"),
        ("a is disabled somehow, see googleapis.com", "permission denied; grant"),
        ("Something new", "permission denied; grant"),
    ],
)
def test_what_the_store_says_leads_to_a_remedy(said: str, remedy: str) -> None:
    answer = Answered(403, json.dumps({"error": {"message": said, "errors": [{"reason": "forbidden"}]}}).encode())
    fault = refusal(answer, where="gs://kms-api-disabled/a/b")
    assert isinstance(fault, StoreRefused)
    assert str(fault).startswith("gs://kms-api-disabled/a/b: ")
    assert remedy in str(fault)
    assert said in str(fault)


def test_a_policy_that_answers_412_is_told_too() -> None:
    contents = b'{"error": {"message": "Constraint violated", "errors": [{"reason": "orgPolicyConstraintFailed"}]}}'
    fault = refusal(Answered(412, contents), where="gs://bucket/a")
    assert isinstance(fault, StoreRefused)
    assert "a policy of the organization" in str(fault)


def test_what_is_not_known_is_told_in_the_stores_words() -> None:
    fault = refusal(Answered(400, b"something new is invalid"), where="gs://bucket/a")
    assert type(fault) is StorageError
    assert "refuses with 400: something new is invalid" in str(fault)


@pytest.mark.parametrize("verb", ["write", "delete", "exists", "create"])
def test_a_412_is_no_file_that_is_there_already(cloud: FakeGcs, verb: str) -> None:
    storage = CloudStorage("bucket", "", QUICK)
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": f"object.{kind}"}, "fault": "status", "code": 412, "times": None}
            for kind in ("insert", "delete", "get")
            if (kind, verb) != ("get", "create")
        ]
    )
    arguments = ("x", b"1") if verb in {"write", "create"} else ("x",)
    with pytest.raises(StorageError, match="the store refuses with 412") as fault:
        getattr(storage, verb)(*arguments)
    assert type(fault.value) is StorageError


@pytest.mark.parametrize(
    ("content", "said"), [(None, "not found"), ("{", "valid json"), ("folder", "Is a directory"), ("{}", "type")]
)
def test_credentials_that_are_named_and_cannot_be_used(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "key.json"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_text(content)
    told = asked(tmp_path, GOOGLE_APPLICATION_CREDENTIALS=str(file))
    assert told.startswith(
        f"StoreRefused 2 False gs://bucket/x: GOOGLE_APPLICATION_CREDENTIALS={file} cannot be used ("
    )
    assert said in told


@pytest.mark.parametrize("address", ["http://", "http:///"])
def test_a_local_server_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    with pytest.raises(InvalidInput, match="names no server"):
        CloudStorage("bucket", "", QUICK).exists("x")


def test_a_certificate_that_is_not_believed_makes_think_of_the_clock() -> None:
    import aiohttp
    from aiohttp.client_reqrep import ConnectionKey

    key = ConnectionKey("storage.googleapis.com", 443, True, True, None, None, None)
    fault = aiohttp.ClientConnectorCertificateError(key, Exception("certificate has expired"))
    told = refusal(fault, where="gs://bucket/a")
    assert isinstance(told, StoreRefused)
    assert "this machine's clock" in str(told)
    assert not is_transient(fault)


def test_the_address_of_an_upload_is_told_to_nobody(
    cloud: FakeGcs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever knows it may write to it."""
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    storage = CloudStorage("bucket", "", QUICK)
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": "upload.chunk"}, "fault": "reset-in-body", "times": 1},
            {"match": {"kind": "upload.chunk"}, "fault": "unread", "times": 1},
            {"match": {"kind": "upload.chunk"}, "fault": "status", "code": 403, "times": 1},
        ]
    )
    with pytest.raises(StoreRefused) as fault:
        storage.upload(tmp_path / "large", "x")
    assert len(caplog.messages) == 2
    assert "upload_id" not in caplog.text + str(fault.value)
    assert without_queries("no: http://host/upload/b?upload_id=SECRET&a=1 (400)") == "no: http://host/upload/b (400)"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gs://", "'' is no name of a bucket"),
        ("gs:///runs", "'' is no name of a bucket"),
        ("gs://My_Bucket/runs", "'My_Bucket' is no name of a bucket"),
        ("gs://bucket//runs", "'/runs' is no prefix"),
        ("gs://bucket/a//b", "'a//b' is no prefix"),
        ("gs://bucket/../b", "'../b' is no prefix"),
        ("gs://bucket/a?b", "'a?b' is no prefix"),
        ("gs://bucket/a#1", "'a#1' is no prefix"),
        ("s3://bucket/a", "s3:// is unknown"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address: str, said: str) -> None:
    with pytest.raises(InvalidInput) as fault:
        open_storage(address, relative_to=Path.cwd())
    assert said in str(fault.value)
    assert isinstance(fault.value, BatonError)


@pytest.mark.parametrize(
    ("address", "uri"),
    [
        ("gs://bucket", "gs://bucket"),
        ("gs://bucket/", "gs://bucket"),
        ("gs://bucket/a/b/", "gs://bucket/a/b"),
        ("gs://my.bucket_1-x/a=1/b c", "gs://my.bucket_1-x/a=1/b c"),
    ],
)
def test_an_address_is_a_bucket_and_a_prefix(address: str, uri: str) -> None:
    storage: Storage = open_storage(address, relative_to=Path.cwd())
    assert storage.uri == uri
    assert storage.at("run").uri == f"{uri}/run"
