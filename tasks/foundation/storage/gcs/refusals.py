"""What Cloud Storage and Google's credentials refuse, each as one sentence with its remedy."""

import re
from datetime import UTC, datetime

from tasks.foundation.errors import StorageError, StoreRefused

_PERMISSION = re.compile(r"storage\.(objects|buckets)\.(\w+)")
_ROLES = "roles/storage.objectUser on the bucket (to read only: roles/storage.objectViewer)"
_GRANT = (
    "gcloud storage buckets add-iam-policy-binding gs://BUCKET --member=serviceAccount:NAME "
    "--role=roles/storage.objectUser"
)
# In the store's words, the first that is found decides; {bucket} is filled in.
_REMEDIES = {
    r"retention policy|object retention|is under active .*hold|event-based hold|temporary hold": (
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
    r"has not been used in project|accessNotConfigured|is not enabled|API.*disabled": (
        "the Cloud Storage API is off in the project of these credentials; gcloud services enable "
        "storage.googleapis.com, or use credentials of the right project (gcloud config set project "
        "PROJECT)"
    ),
    r"userProjectAccountProblem|user project|project.*(not found|invalid|does not exist|deleted)|unknown project": (
        "the project is not the right one; gcloud config set project PROJECT, and gcloud auth application-"
        "default set-quota-project PROJECT"
    ),
    r"organization'?s policy|VPC Service Controls|vpcServiceControls": (
        "a policy of the organization forbids it from here; run inside its perimeter, or ask who administers it"
    ),
    r"KMS|cloudkms": ("the bucket's encryption key refuses to be used; see who may use it, and whether it is enabled"),
}
_CLOCK = re.compile(r"\biat\b|\bexp\b|reasonable timeframe|short-lived token|clock|not yet valid|Token used too early")


def refusal(fault: Exception, *, where: str) -> StorageError:
    """The error to raise for what is not worth trying again.

    Args:
        fault: what gcsfs, aiohttp or google.auth raised. Its text goes into the message; it holds no credentials.
        where: address of what was worked on.
    """
    import google.auth.exceptions

    if isinstance(fault, StorageError):
        return fault
    for each in (fault, fault.__cause__):
        if isinstance(each, google.auth.exceptions.GoogleAuthError):
            return _credentials_refused(each, where)
    text = " ".join(str(fault).split())
    code = getattr(fault, "code", None)
    bucket = "gs://" + where.removeprefix("gs://").split("/", 1)[0]
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, text, re.IGNORECASE):
            return StoreRefused(f"{where}: {remedy.format(bucket=bucket)} (the store said: {_short(text)})")
    if code == 401:  # noqa: PLR2004 - HTTP's
        return _credentials_refused(fault, where)
    if text.startswith("Forbidden") or code == 403:  # noqa: PLR2004
        return _forbidden(text, where, bucket)
    return StorageError(f"{where}: {type(fault).__name__}: {_short(text)}; see the store's own words, and run again")


def bucket_missing(where: str) -> StoreRefused:
    """404 where an object was to be made or listed."""
    bucket = "gs://" + where.removeprefix("gs://").split("/", 1)[0]
    return StoreRefused(
        f"{where}: there is no bucket {bucket}; correct the name, or make it: gcloud storage buckets create {bucket} "
        "--location=REGION --uniform-bucket-level-access (in the region of the accelerators)"
    )


def _forbidden(text: str, where: str, bucket: str) -> StoreRefused:
    found = _PERMISSION.search(text)
    grant = _GRANT.replace("gs://BUCKET", bucket)
    if found is None:
        return StoreRefused(f"{where}: permission denied; grant {_ROLES}: {grant} (the store said: {_short(text)})")
    doing = {
        "create": "make objects",
        "delete": "delete or replace objects",
        "get": "read objects",
        "list": "list objects",
    }.get(found[2], found[2])
    return StoreRefused(
        f"{where}: these credentials may not {doing} here ({found[0]} is missing); grant {_ROLES}: {grant} "
        f"(the store said: {_short(text)})"
    )


def _credentials_refused(fault: Exception, where: str) -> StoreRefused:
    import google.auth.exceptions

    if isinstance(fault, google.auth.exceptions.DefaultCredentialsError):
        return StoreRefused(
            f"{where}: there are no credentials for Cloud Storage here. Run gcloud auth application-default login, or "
            "set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file, or give the machine a service account"
        )
    text = " ".join(str(fault).split())
    if _CLOCK.search(text):
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return StoreRefused(
            f"{where}: Google refuses these credentials, most likely because this machine's clock is wrong: it says "
            f"{now}. Set it (timedatectl set-ntp true) and run again (Google said: {_short(text)})"
        )
    return StoreRefused(
        f"{where}: these credentials are refused ({_short(text)}); renew them: gcloud auth application-default "
        "login, or a service account's key that is not revoked"
    )


def _short(text: str) -> str:
    limit = 300
    return text if len(text) <= limit else f"{text[:limit]}…"
