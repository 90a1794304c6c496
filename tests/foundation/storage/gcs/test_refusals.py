"""Wrong credentials, roles, buckets, settings and clocks: each has its own message, with the remedy, and early."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.errors import FileMissing, StorageError, StoreRefused, StoreUnreachable
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy, is_transient
from baton.tasks.foundation.storage.gcs.refusals import check_settings, may_end, refusal
from baton.tasks.foundation.storage.gcs.responses import ErrorResponse, Settings
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE, checksum_bytes
from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support.small_logs import begin

QUICK = RetryPolicy(total_seconds=5, stall_seconds=2, first_wait_seconds=0.01)


ROLE = "roles/storage.objectUser"


# Requests one object with Google's default credentials, and prints the result: with those of each file that is given.
PROGRAM = """
import os, sys
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
server, *files = sys.argv[1:]
if server:
    # The fake at the real service's address, so that credentials are required.
    from gcsfs.core import GCSFileSystem
    GCSFileSystem._location = property(lambda _: server)
for file in files:
    if file:
        os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = file
    try:
        policy = RetryPolicy(total_seconds=3, stall_seconds=2, first_wait_seconds=0.01)
        print("exists:", CloudStorage("bucket", "", policy).exists("x"))
    except BatonError as error:
        print(type(error).__name__, error.exit_code, error)
    print("----")
"""


def outputs_of(folder: Path, server: str, *files: str) -> list[str]:
    """The output of a process that takes Google's default credentials from each file in turn; from none with ""."""
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "NO_GCE_CHECK": "true", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, server, *files]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    return done.stdout.split("----\n")[:-1]


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


def test_missing_and_unusable_credentials_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "torn").write_text("{")
    (tmp_path / "empty").write_text("{}")
    unusable = {
        "absent": "not found", "torn": "valid json", "folder": "Is a directory", "empty": "type",
        "pipe": "regular file",
    }  # fmt: skip
    missing, *others = outputs_of(tmp_path, "", "", *(str(tmp_path / name) for name in unusable))
    assert missing.startswith("StoreRefused 2 gs://bucket/x: no credentials for Cloud Storage found.")
    assert "gcloud auth application-default login" in missing
    assert "GOOGLE_APPLICATION_CREDENTIALS" in missing
    for (name, message), output in zip(unusable.items(), others, strict=True):
        cannot = f"GOOGLE_APPLICATION_CREDENTIALS={tmp_path / name} cannot be used ("
        assert output.startswith(f"StoreRefused 2 gs://bucket/x: {cannot}")
        assert message in output


def test_rejected_token_is_renewed_or_the_clock_is_suspected(tmp_path: Path) -> None:
    with FakeGcs(require_token=True) as server:
        file = str(service_account(tmp_path, f"{server.url}/_fake/token"))
        assert outputs_of(tmp_path, server.url, file) == ["exists: False\n"]
        assert server.counts["GET", "object.get"] == 1
        server.control.refuse = True
        (output,) = outputs_of(tmp_path, server.url, file)
    assert output.startswith("StoreRefused 2 gs://bucket/x: Google rejects these credentials, most likely because")
    assert "this machine's clock is wrong: it shows 20" in output
    assert "timedatectl set-ntp true" in output
    assert "PRIVATE" not in output
    assert "Bearer" not in output


@pytest.mark.parametrize(
    ("denied", "verb", "act"),
    [
        ("storage.objects.create", "create objects", lambda store: store.create("log/0", b"1")),
        ("storage.objects.create", "create objects", lambda store: store.write("x", b"1")),
        ("storage.objects.delete", "delete or replace objects", lambda store: store.delete("there")),
        ("storage.objects.delete", "delete or replace objects", lambda store: store.write("there", b"2")),
        ("storage.objects.get", "read objects", lambda store: store.read("there")),
        ("storage.objects.list", "list objects", lambda store: list(store.files(""))),
    ],
)
def test_missing_permission_is_named_with_its_role(cloud: FakeGcs, denied: str, verb: str, act: Any) -> None:
    storage = CloudStorage("bucket", "", QUICK)
    storage.write("there", b"1")
    cloud.store.set_bucket("bucket", denied={denied})
    with pytest.raises(StoreRefused, match=rf"no permission to {verb} \({denied} is missing\)") as error:
        act(storage)
    assert ROLE in str(error.value)
    assert "gcloud storage buckets add-iam-policy-binding gs://bucket" in str(error.value)
    assert error.value.exit_code == 2


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
def test_missing_bucket_differs_from_missing_object(act: Any) -> None:
    storage = CloudStorage("no-such-bucket", "runs", QUICK)
    with pytest.raises(StoreRefused, match=r"bucket gs://no-such-bucket not found; .*gcloud storage buckets create"):
        act(storage)
    with pytest.raises(FileMissing, match=r"gs://bucket/x does not exist"):
        CloudStorage("bucket", "", QUICK).read("x")


def test_retention_policy_set_later_is_refused(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "runs", QUICK)
    storage.write("x", b"1")
    cloud.store.set_bucket("bucket", retention_seconds=86400)
    with pytest.raises(StoreRefused, match=r"gs://bucket cannot be deleted or replaced yet"):
        storage.delete("x")


def test_requester_pays_is_refused(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", requester_pays=True)
    with pytest.raises(StoreRefused, match=r"has requester pays enabled.*--no-requester-pays"):
        CloudStorage("bucket", "", QUICK).read("x")


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("The billing account for the owning project is disabled in state absent", "no active billing account"),
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
def test_store_messages_lead_to_a_remedy(message: str, remedy: str) -> None:
    response = ErrorResponse(
        403, json.dumps({"error": {"message": message, "errors": [{"reason": "forbidden"}]}}).encode()
    )
    error = refusal(response, where="gs://kms-api-disabled/a/b")
    assert isinstance(error, StoreRefused)
    assert str(error).startswith("gs://kms-api-disabled/a/b: ")
    assert remedy in str(error)
    assert message in str(error)


def test_organization_policy_with_412_is_refused() -> None:
    contents = b'{"error": {"message": "Constraint violated", "errors": [{"reason": "orgPolicyConstraintFailed"}]}}'
    error = refusal(ErrorResponse(412, contents), where="gs://bucket/a")
    assert isinstance(error, StoreRefused)
    assert "a policy of the organization" in str(error)


def test_unknown_error_shows_the_stores_message() -> None:
    error = refusal(ErrorResponse(400, b"something new is invalid"), where="gs://bucket/a")
    assert type(error) is StorageError
    assert "refused the request with 400 (the store's message: something new is invalid)" in str(error)


@pytest.mark.parametrize("verb", ["write", "delete", "exists", "create"])
def test_status_412_alone_does_not_mean_the_file_exists(cloud: FakeGcs, verb: str) -> None:
    storage = CloudStorage("bucket", "", QUICK)
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": f"object.{kind}"}, "fault": "status", "code": 412, "times": None}
            for kind in ("insert", "delete", "get")
            if (kind, verb) != ("get", "create")
        ]
    )
    arguments = ("x", b"1") if verb in {"write", "create"} else ("x",)
    with pytest.raises(StorageError, match="the store refused the request with 412") as error:
        getattr(storage, verb)(*arguments)
    assert type(error.value) is StorageError


def test_certificate_error_suggests_the_clock() -> None:
    import aiohttp
    from aiohttp.client_reqrep import ConnectionKey

    key = ConnectionKey("storage.googleapis.com", 443, True, True, None, None, None)
    fault = aiohttp.ClientConnectorCertificateError(key, Exception("certificate has expired"))
    refused = refusal(fault, where="gs://bucket/a")
    assert isinstance(refused, StoreRefused)
    assert "this machine's clock" in str(refused)
    assert not is_transient(fault)


@pytest.mark.parametrize("code", [401, 403])
@pytest.mark.parametrize("act", [lambda s: s.write("x", b"2"), lambda s: s.read("x"), lambda s: list(s.files(""))])
def test_refusal_is_an_outage_once_the_command_has_written(cloud: FakeGcs, code: int, act: Any) -> None:
    def refused(times: int | None) -> FaultPlan:
        return FaultPlan.scripted([{"match": {"kind": ""}, "times": times, "fault": "status", "code": code}])

    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=0.3, stall_seconds=2, first_wait_seconds=0.01))
    storage.write("x", b"1")
    with PROCESS_DEADLINE.for_command(60.0):
        cloud.faults = refused(None)
        with pytest.raises(StoreRefused):  # nothing is written yet
            act(storage)
        cloud.faults = None
        storage.write("log/0", b"1")
        cloud.faults = refused(4)
        act(storage)
        cloud.faults = refused(None)
        with pytest.raises(StorageError, match=r"gave up after .* run the same command to continue") as error:
            act(storage)
        assert (type(error.value), error.value.exit_code) == (StorageError, 1)
        with pytest.raises(StorageError, match=r"permission denied|credentials rejected"):  # best effort does not wait
            act(storage.with_deadline(30.0))
        PROCESS_DEADLINE.start(0.2)
        with pytest.raises(StoreUnreachable, match="stopping, and the store refuses"):
            act(storage)
    PROCESS_DEADLINE.clear()
    with pytest.raises(StoreRefused):  # the next command's first look
        act(storage)


def test_refusal_is_an_outage_once_the_log_of_a_home_on_disk_grows(cloud: FakeGcs, tmp_path: Path) -> None:
    """The data lies in a bucket, and the home on a disk."""
    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=5, stall_seconds=2, first_wait_seconds=0.01))
    storage.write("x", b"1")
    with PROCESS_DEADLINE.for_command(60.0):
        begin(LocalStorage(tmp_path))
        cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "times": 4, "fault": "status", "code": 401}])
        assert storage.read("x") == b"1"
    PROCESS_DEADLINE.clear()


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (401, "Invalid Credentials", True),
        (403, "caller does not have storage.objects.create access", True),
        (403, "The billing account for the owning project is disabled in state absent", True),
        (403, "Object 'bucket/x' is under active Temporary hold and cannot be deleted", False),
        (403, "Object 'bucket/x' is subject to bucket's retention policy and cannot be deleted until 2030", False),
        (400, "something new is invalid", False),
    ],
)
def test_refusals_of_one_object_are_not_waited_for(code: int, message: str, expected: bool) -> None:
    assert may_end(ErrorResponse(code, json.dumps({"error": {"message": message}}).encode())) == expected


@pytest.mark.usefixtures("cloud")
def test_bucket_that_is_deleted_meanwhile_is_not_refused_input() -> None:
    storage = CloudStorage("no-such-bucket", "runs", QUICK)
    with PROCESS_DEADLINE.for_command(60.0):
        CloudStorage("bucket", "", QUICK).write("log/0", b"1")
        with pytest.raises(StorageError, match="not found") as error:
            storage.write("x", b"1")
    assert error.value.exit_code == 1


PROBING = RetryPolicy(total_seconds=5, stall_seconds=60, first_wait_seconds=0.01)


DELETE = {"type": "Delete"}


def rule(**condition: Any) -> dict[str, Any]:
    return {"action": DELETE, "condition": condition}


def lifecycle(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"lifecycle": {"rule": list(rules)}}


OLD_VERSIONS_ONLY = rule(isLive=False, daysSinceNoncurrentTime=1)


@pytest.mark.parametrize(
    ("settings", "errors", "warnings"),
    [
        ({}, [], []),
        ({"versioning": {"enabled": False}, "softDeletePolicy": {"retentionDurationSeconds": "0"}}, [], []),
        ({"retentionPolicy": {"retentionPeriod": "60"}}, ["60 seconds (retention", "--clear-retention-period"], []),
        ({"defaultEventBasedHold": True}, ["a hold on every new object", "--no-default-event-based-hold"], []),
        ({"versioning": {"enabled": True}}, [], ["keeps old versions", "--lifecycle-file=deploy/storage"]),
        ({"versioning": {"enabled": True}, **lifecycle(OLD_VERSIONS_ONLY)}, [], []),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, [], ["for 7 days", "--clear-soft-delete"]),
        ({"billing": {"requesterPays": True}}, [], ["requester pays", "--no-requester-pays"]),
        ({"objectRetention": {"mode": "Enabled"}}, [], []),
        (lifecycle(rule(age=30)), [], ["deletes objects that runs need (age 30)", "matchesPrefix"]),
        (lifecycle(rule()), [], ["runs need (always)"]),
        (lifecycle(rule(age=30, isLive=True)), [], ["age 30, isLive True"]),
        (lifecycle(rule(createdBefore="2026-01-01")), [], ["createdBefore 2026-01-01"]),
        (lifecycle(rule(age=30, matchesPrefix=["team/runs/digits/log"])), [], ["age 30"]),
        (lifecycle(rule(age=30, matchesPrefix=["tea"])), [], ["age 30"]),
        (lifecycle(rule(age=30, matchesPrefix=["team/runs2", "tmp/"])), [], []),
        (lifecycle(rule(age=30, matchesSuffix=[".tmp"])), [], []),
        (lifecycle(rule(age=30, matchesSuffix=[".json", ".tmp"])), [], ["age 30"]),
        (lifecycle(rule(age=30, isLive=False)), [], []),
        (lifecycle(rule(numNewerVersions=3)), [], []),
        (lifecycle(rule(daysSinceCustomTime=3)), [], []),
        (lifecycle({"action": {"type": "SetStorageClass"}, "condition": {"age": 1}}), [], []),
        ({"lifecycle": None, "billing": "x", "softDeletePolicy": []}, [], []),
    ],
)
def test_harmful_settings_name_the_command_that_changes_them(
    settings: dict[str, Any], errors: list[str], warnings: list[str]
) -> None:
    found = check_settings(Settings.model_validate({"name": "b", **settings}), prefix="team/runs")
    assert len(found.errors) == bool(errors)
    assert len(found.warnings) == bool(warnings)
    for texts, words in ((found.errors, errors), (found.warnings, warnings)):
        for text in texts:
            assert "gs://b" in text
            for word in words:
                assert word in text


def test_probe_reports_all_harmful_settings(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "runs", PROBING)
    cloud.store.set_bucket(
        "bucket", versioning=True, soft_delete_seconds=86400, lifecycle=[rule(age=3)], object_retention=True
    )
    notes = storage.probe()
    for words in ("keeps old versions", "for 1 days (soft delete)", "a lifecycle rule of gs://bucket deletes"):
        assert sum(words in note for note in notes) == 1
    assert len(notes) == 3
    cloud.store.set_bucket("bucket", default_event_based_hold=True)
    with pytest.raises(StoreRefused, match=r"gs://bucket puts a hold .*--no-default-event-based-hold"):
        storage.probe()
    assert cloud.store.names("bucket") == []
    # Without permission to read the settings, the probe runs into the hold.
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get"})
    with pytest.raises(StoreRefused, match=r"objects of gs://bucket are under a hold.*\.probe-\w+ is left behind"):
        storage.probe()


@pytest.mark.parametrize("permission", ["create", "get", "list", "delete"])
def test_probe_finds_each_missing_permission(cloud: FakeGcs, permission: str) -> None:
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get", f"storage.objects.{permission}"})
    with pytest.raises(StoreRefused, match=rf"storage\.objects\.{permission} is missing"):
        CloudStorage("bucket", "runs", PROBING).probe()


def test_empty_object_may_have_no_size(cloud: FakeGcs, tmp_path: Path) -> None:
    cloud.store.set_bucket("bucket", leaves_out_zeros=True)
    storage = CloudStorage("bucket", "runs", PROBING)
    assert storage.probe() == []
    (tmp_path / "empty").touch()
    storage.create("a", b"")
    storage.write("b", b"")
    storage.upload(tmp_path / "empty", "c")
    storage.copy("c", "d")
    for path in "abcd":
        assert storage.exists(path)
        assert storage.read(path) == b""
        assert storage.stat(path) == checksum_bytes(b"") == storage.download(path, tmp_path / "got")


def test_concurrent_probes_use_their_own_objects(cloud: FakeGcs) -> None:
    slow = {"match": {"path": r"/\.probe"}, "fault": "slow", "times": None, "delay_seconds": 0.05}
    cloud.faults = FaultPlan.scripted([slow])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: CloudStorage("bucket", "runs", PROBING).probe(), range(4)))
    assert found == [[]] * 4
    made = [entry["path"] for entry in cloud.fault_run.log if entry["kind"] == "object.insert"]
    assert len(set(made)) == 4 == len(made)
    assert cloud.store.names("bucket") == []


def test_expired_probes_are_deleted_and_recent_ones_kept(cloud: FakeGcs) -> None:
    now = time.time()
    for age, name in ((7200, "runs/.probe"), (7200, "runs/.probe-dead"), (1, "runs/.probe-alive"), (7200, "runs/x")):
        cloud.store.clock = lambda age=age: now - age
        cloud.store.put("bucket", name, b"")
    cloud.store.clock = time.time
    CloudStorage("bucket", "runs", PROBING).probe()
    assert cloud.store.names("bucket") == ["runs/.probe-alive", "runs/x"]


def test_settings_that_may_not_be_read_are_no_problem(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get"})
    assert CloudStorage("bucket", "runs", PROBING).probe() == []
    assert cloud.store.names("bucket") == []
