"""What Cloud Storage and Google's credentials refuse, each as one sentence with its remedy."""

import os
import re
from datetime import UTC, datetime

from tasks.foundation.errors import StorageError, StoreRefused
from tasks.foundation.storage.gcs.responses import UNAUTHORIZED, Answered, said_by

_FORBIDDEN = 403
_DOING = {
    "create": "make objects",
    "delete": "delete or replace objects",
    "get": "read objects",
    "list": "list objects",
}
_PERMISSION = re.compile(r"storage\.(objects|buckets)\.(\w+)")
_ROLES = "roles/storage.objectUser on the bucket (to read only: roles/storage.objectViewer)"
_GRANT = (
    "gcloud storage buckets add-iam-policy-binding gs://BUCKET --member=serviceAccount:NAME "
    "--role=roles/storage.objectUser"
)
# In the store's words, the first that is found decides; {bucket} is filled in.
_REMEDIES = {
    r"\bKMS\b|cloudkms": (
        "the bucket's encryption key refuses to be used; see who may use it, and whether it is enabled"
    ),
    r"is under active .*hold|event-based hold|temporary hold": (
        "objects of {bucket} are under a hold, and Baton replaces and deletes objects; gcloud storage buckets update "
        "{bucket} --no-default-event-based-hold, and for those that are there: gcloud storage objects update "
        "{bucket}/** --no-event-based-hold --no-temporary-hold"
    ),
    r"retention policy|object retention": (
        "objects of {bucket} may not be deleted or replaced yet, and Baton deletes checkpoints that it "
        "retires; use a bucket without a retention policy or holds: gcloud storage buckets describe "
        '{bucket} --format="default(retention_policy)"'
    ),
    r"requester pays|no user project": (
        "{bucket} lets its readers pay, and no project was named; switch that off (gcloud storage buckets "
        "update {bucket} --no-requester-pays), or use another bucket"
    ),
    r"billing account|billing.*(disabled|closed|absent)|accountDisabled": (
        "the project that owns {bucket} has no open billing account; see Billing in the console, or name a"
        " bucket of another project"
    ),
    r"has not been used in project|accessNotConfigured|\bAPI\b.*(disabled|not enabled)": (
        "the Cloud Storage API is off in the project of these credentials; gcloud services enable "
        "storage.googleapis.com, or use credentials of the right project (gcloud config set project "
        "PROJECT)"
    ),
    r"userProjectAccountProblem|user project|project.*(not found|invalid|does not exist|deleted)|unknown project": (
        "the project is not the right one; gcloud config set project PROJECT, and gcloud auth application-"
        "default set-quota-project PROJECT"
    ),
    r"organization'?s policy|orgPolicy|VPC Service Controls|vpcServiceControls": (
        "a policy of the organization forbids it from here; run inside its perimeter, or ask who administers it"
    ),
}
_CLOCK = re.compile(r"\biat\b|\bexp\b|reasonable timeframe|short-lived token|clock|not yet valid|Token used too early")
_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"


def refusal(fault: Exception, *, where: str) -> StorageError:
    """The error to raise for what is not worth trying again.

    Args:
        fault: what the store answered, or what gcsfs, aiohttp or google.auth raised.
        where: address of what was worked on.
    """
    import aiohttp
    import google.auth.exceptions

    for each in (fault, fault.__cause__):
        if isinstance(each, google.auth.exceptions.GoogleAuthError):
            return credentials_refused(each, where)
    if isinstance(fault, aiohttp.ClientSSLError):
        return StoreRefused(
            f"{where}: no secure connection ({said_by(fault)}); see whether this machine's clock is right ({_now()}, "
            "timedatectl set-ntp true), and whether its certificates are (ca-certificates)"
        )
    if isinstance(fault, Answered):
        return _refused(fault, where)
    return StorageError(
        f"{where}: {type(fault).__name__}: {_short(said_by(fault))}; see to this machine, and run again"
    )


def bucket_missing(where: str) -> StoreRefused:
    """404 where an object was to be made or listed."""
    bucket = _bucket_of(where)
    return StoreRefused(
        f"{where}: there is no bucket {bucket}; correct the name, or make it: gcloud storage buckets create {bucket} "
        "--location=REGION --uniform-bucket-level-access (in the region of the accelerators)"
    )


def packed(where: str, encoding: str) -> StoreRefused:
    """The error for an object that is stored packed: the store sends it unpacked, and its checksum is of the packed."""
    return StoreRefused(
        f"{where}: is stored with Content-Encoding: {encoding}, so its checksum is not that of its content. Store it "
        f"unpacked (gcloud storage cp without --gzip-local), or have its bytes read as they are: gcloud storage "
        f"objects update {where} --clear-content-encoding"
    )


def credentials_refused(fault: Exception, where: str) -> StoreRefused:
    """What to say of credentials that are not there, cannot be read, or are refused."""
    import google.auth.exceptions

    said = _short(said_by(fault))
    named = os.environ.get(_CREDENTIALS)
    if isinstance(fault, google.auth.exceptions.DefaultCredentialsError | OSError):
        if named:
            return StoreRefused(
                f"{where}: {_CREDENTIALS}={named} cannot be used ({said}); name a service account's key file, or unset "
                "it"
            )
        return StoreRefused(
            f"{where}: there are no credentials for Cloud Storage here. Run gcloud auth application-default login, or "
            f"set {_CREDENTIALS} to a service account's key file, or give the machine a service account"
        )
    if _CLOCK.search(said):
        return StoreRefused(
            f"{where}: Google refuses these credentials, most likely because this machine's clock is wrong: it says "
            f"{_now()}. Set it (timedatectl set-ntp true) and run again (Google said: {said})"
        )
    return StoreRefused(
        f"{where}: these credentials are refused ({said}); renew: gcloud auth application-default login, or a service "
        "account's key that is not revoked"
    )


def _refused(fault: Answered, where: str) -> StorageError:
    if fault.code == UNAUTHORIZED:
        return credentials_refused(fault, where)
    said, bucket = _short(fault.said), _bucket_of(where)
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, f"{fault.said} {fault.reason}", re.IGNORECASE):
            return StoreRefused(f"{where}: {remedy.format(bucket=bucket)} (the store said: {said})")
    if fault.code != _FORBIDDEN:
        return StorageError(f"{where}: the store refuses with {fault.code}: {said}; see its own words, and run again")
    grant = _GRANT.replace("gs://BUCKET", bucket)
    found = _PERMISSION.search(fault.said)
    if found is None:
        return StoreRefused(f"{where}: permission denied; grant {_ROLES}: {grant} (the store said: {said})")
    return StoreRefused(
        f"{where}: these credentials may not {_DOING.get(found[2], found[2])} here ({found[0]} is missing); grant "
        f"{_ROLES}: {grant} (the store said: {said})"
    )


def _bucket_of(where: str) -> str:
    return "gs://" + where.removeprefix("gs://").split("/", 1)[0]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _short(text: str) -> str:
    limit = 300
    return text if len(text) <= limit else f"{text[:limit]}…"
