"""Turns what Cloud Storage and Google's credentials refuse, and settings of a bucket that harm a run, into messages.

Each names the remedy. Until a command that trains has written, a refusal is input that is refused (`StoreRefused`,
exit code 2). Afterwards it is a failure of the store, as an outage is (`StorageError`, exit code 1): credentials and
bucket were right.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from baton.tasks.foundation.errors import StorageError, StoreRefused
from baton.tasks.foundation.storage.gcs.responses import UNAUTHORIZED, ErrorResponse, Settings, message_of
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE
from baton.tasks.foundation.text import abridged

_FORBIDDEN = 403
_VERBS = {
    "create": "create objects",
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
# Patterns of the store's messages; the first match decides. {bucket} is filled in.
_REMEDIES = {
    r"\bKMS\b|cloudkms": "the bucket's encryption key cannot be used; check who may use it, and whether it is enabled",
    r"is under active .*hold|event-based hold|temporary hold": (
        "objects of {bucket} are under a hold, and Baton replaces and deletes objects; gcloud storage buckets update "
        "{bucket} --no-default-event-based-hold, and for existing objects: gcloud storage objects update "
        "{bucket}/** --no-event-based-hold --no-temporary-hold"
    ),
    r"retention policy|object retention": (
        "objects of {bucket} cannot be deleted or replaced yet, and Baton deletes checkpoints that it retires; use a "
        "bucket without a retention policy or holds: gcloud storage buckets describe "
        '{bucket} --format="default(retention_policy)"'
    ),
    r"requester pays|no user project": (
        "{bucket} has requester pays enabled, and no project was named; disable it (gcloud storage buckets "
        "update {bucket} --no-requester-pays), or use another bucket"
    ),
    r"billing account|billing.*(disabled|closed|absent)|accountDisabled": (
        "the project that owns {bucket} has no active billing account; check Billing in the console, or use a bucket "
        "of another project"
    ),
    r"has not been used in project|accessNotConfigured|\bAPI\b.*(disabled|not enabled)": (
        "the Cloud Storage API is disabled in the project of these credentials; gcloud services enable "
        "storage.googleapis.com, or use credentials of the right project (gcloud config set project PROJECT)"
    ),
    r"userProjectAccountProblem|user project|project.*(not found|invalid|does not exist|deleted)|unknown project": (
        "the project is wrong; gcloud config set project PROJECT, and gcloud auth application-default "
        "set-quota-project PROJECT"
    ),
    r"organization'?s policy|orgPolicy|VPC Service Controls|vpcServiceControls": (
        "a policy of the organization forbids this; run inside its perimeter, or ask its administrator"
    ),
}
_CLOCK = re.compile(r"\biat\b|\bexp\b|reasonable timeframe|short-lived token|clock|not yet valid|Token used too early")
_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
_SHOWN_CHARS = 300
# About an object, and not about who asks: waiting would not help.
_OF_OBJECT = re.compile("|".join(key for key in _REMEDIES if "hold" in key or "retention" in key), re.IGNORECASE)
# Suffixes of the names that a run writes, for rules that select objects by suffix.
_SUFFIXES = (".json", ".tfrecord", "ckpt.index", "ckpt.data-00000-of-00001", "/HINT", ".html", ".png")
# Conditions that only noncurrent versions meet, and conditions on a custom time, which Baton never sets.
_OF_OLD_VERSIONS = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_OF_CUSTOM_TIMES = ("customTimeBefore", "daysSinceCustomTime")
_DAY_SECONDS = 86400


def refusal(error: Exception, *, where: str) -> StorageError:
    """The error to raise for a permanent failure.

    Args:
        error: an ErrorResponse, or what gcsfs, aiohttp or google.auth raised.
        where: address of the object or bucket.
    """
    import aiohttp
    import google.auth.exceptions

    for each in (error, error.__cause__):
        if isinstance(each, google.auth.exceptions.GoogleAuthError):
            return credentials_refused(each, where)
    if isinstance(error, aiohttp.ClientSSLError):
        return _refusing(
            f"{where}: no secure connection ({message_of(error)}); check this machine's clock ({_now()}; set it with "
            "timedatectl set-ntp true) and its certificates (ca-certificates)"
        )
    if isinstance(error, ErrorResponse):
        return _refused(error, where)
    message = abridged(message_of(error), _SHOWN_CHARS)
    return StorageError(f"{where}: {type(error).__name__}: {message}; check this machine, and run again")


def bucket_missing(where: str) -> StorageError:
    """The error for a 404 when an object is created or listed."""
    bucket = _bucket_of(where)
    return _refusing(
        f"{where}: bucket {bucket} not found; correct the name, or create it: gcloud storage buckets create {bucket} "
        "--location=REGION --uniform-bucket-level-access (in the region of the accelerators)"
    )


def compressed_object(where: str, encoding: str) -> StorageError:
    """The error for an object stored compressed: the store decompresses it, but its checksum is of the stored bytes."""
    return _refusing(
        f"{where}: stored with Content-Encoding: {encoding}, so its checksum is not that of its content; upload it "
        f"uncompressed (gcloud storage cp without --gzip-local), or have its bytes read as they are: gcloud storage "
        f"objects update {where} --clear-content-encoding"
    )


def credentials_refused(error: Exception, where: str) -> StorageError:
    """The error for credentials that are missing, unreadable or rejected."""
    import google.auth.exceptions

    message = abridged(message_of(error), _SHOWN_CHARS)
    file = os.environ.get(_CREDENTIALS)
    if isinstance(error, google.auth.exceptions.DefaultCredentialsError | OSError):
        if file:
            return _refusing(
                f"{where}: {_CREDENTIALS}={file} cannot be used ({message}); set it to a service account's key file, "
                "or unset it"
            )
        return _refusing(
            f"{where}: no credentials for Cloud Storage found. Run gcloud auth application-default login, or set "
            f"{_CREDENTIALS} to a service account's key file, or give the machine a service account"
        )
    if _CLOCK.search(message):
        return _refusing(
            f"{where}: Google rejects these credentials, most likely because this machine's clock is wrong: it shows "
            f"{_now()}. Set it (timedatectl set-ntp true) and run again (Google's message: {message})"
        )
    return _refusing(
        f"{where}: credentials rejected ({message}); renew them: gcloud auth application-default login, or use a "
        "service account's key that is not revoked"
    )


def _refused(error: ErrorResponse, where: str) -> StorageError:
    if error.code == UNAUTHORIZED:
        return credentials_refused(error, where)
    message, bucket = f"(the store's message: {abridged(error.message, _SHOWN_CHARS)})", _bucket_of(where)
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, f"{error.message} {error.reason}", re.IGNORECASE):
            return _refusing(f"{where}: {remedy.format(bucket=bucket)} {message}")
    if error.code != _FORBIDDEN:
        return StorageError(f"{where}: the store refused the request with {error.code} {message}")
    grant = _GRANT.replace("gs://BUCKET", bucket)
    found = _PERMISSION.search(error.message)
    if found is None:
        return _refusing(f"{where}: permission denied; grant {_ROLES}: {grant} {message}")
    return _refusing(
        f"{where}: no permission to {_VERBS.get(found[2], found[2])} ({found[0]} is missing); grant {_ROLES}: {grant} "
        f"{message}"
    )


def may_end(error: Exception) -> bool:
    """Whether a refusal may end by itself: of credentials, of a role, or of a project, and not of one object."""
    import aiohttp
    import google.auth.exceptions

    if isinstance(error, ErrorResponse):
        about_object = _OF_OBJECT.search(f"{error.message} {error.reason}")
        return error.code in {UNAUTHORIZED, _FORBIDDEN} and about_object is None
    return isinstance(error, google.auth.exceptions.GoogleAuthError | aiohttp.ClientSSLError)


def _refusing(message: str) -> StorageError:
    return StorageError(message) if PROCESS_DEADLINE.has_written else StoreRefused(message)


def _bucket_of(where: str) -> str:
    return "gs://" + where.removeprefix("gs://").split("/", 1)[0]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class SettingsProblems:
    """Problems with a bucket's settings.

    Attributes:
        errors: settings with which every run fails.
        warnings: settings that cost money, or may cost data later.
    """

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def check_settings(settings: Settings, *, prefix: str) -> SettingsProblems:
    """Check a bucket's settings.

    Object retention itself is harmless: it lets a client lock objects, and Baton locks none.

    Args:
        settings: of the bucket.
        prefix: where the runs are, without slashes at its ends; may be empty.
    """
    bucket = f"gs://{settings.name}"
    update = f"gcloud storage buckets update {bucket}"
    errors, warnings = [], []
    if settings.retention_seconds is not None:
        errors.append(
            f"{bucket} keeps every object for {settings.retention_seconds} seconds (retention policy), and Baton "
            f"replaces and deletes objects; use another bucket, or: {update} --clear-retention-period"
        )
    if settings.holds_new_objects:
        errors.append(
            f"{bucket} puts a hold on every new object (default event-based hold), and Baton replaces and deletes "
            f"objects; use another bucket, or: {update} --no-default-event-based-hold"
        )
    conditions = [rule.condition for rule in settings.rules if rule.action == "Delete"]
    for condition in conditions:
        if _matches_live_objects(condition) and _matches_names(condition, prefix):
            shown = ", ".join(f"{key} {value}" for key, value in condition.items()) or "always"
            warnings.append(
                f"a lifecycle rule of {bucket} deletes objects that runs need ({shown}): log entries, checkpoints and "
                "datasets; limit it to other prefixes (matchesPrefix), or use Baton's rule only: "
                f"{update} --lifecycle-file=deploy/storage/lifecycle.json"
            )
    if settings.keeps_old_versions and not any(map(_deletes_old_versions, conditions)):
        warnings.append(
            f"{bucket} keeps old versions of objects, so deleted objects still cost money; set the lifecycle rule "
            f"of deploy/google-cloud.md ({update} --lifecycle-file=deploy/storage/lifecycle.json)"
        )
    days = settings.soft_delete_seconds / _DAY_SECONDS
    if days > 0:
        warnings.append(
            f"{bucket} keeps deleted objects for {days:g} days (soft delete), and they cost money: "
            f"{update} --clear-soft-delete"
        )
    if settings.requester_pays:
        warnings.append(
            f"{bucket} has requester pays enabled, and Baton names no project to charge, so credentials of other "
            f"projects are refused: {update} --no-requester-pays"
        )
    return SettingsProblems(tuple(errors), tuple(warnings))


def _matches_live_objects(condition: Mapping[str, Any]) -> bool:
    if condition.get("isLive") is False:
        return False
    return not any(key in condition for key in (*_OF_OLD_VERSIONS, *_OF_CUSTOM_TIMES))


def _deletes_old_versions(condition: Mapping[str, Any]) -> bool:
    return condition.get("isLive") is False or any(key in condition for key in _OF_OLD_VERSIONS)


def _matches_names(condition: Mapping[str, Any], prefix: str) -> bool:
    """Whether the name of some object below the prefix can meet the condition."""
    below = f"{prefix}/" if prefix else ""
    prefixes, suffixes = condition.get("matchesPrefix", ()), tuple(condition.get("matchesSuffix", ()))
    by_prefix = not prefixes or any(below.startswith(each) or each.startswith(below) for each in prefixes)
    return by_prefix and (not suffixes or any(suffix.endswith(suffixes) for suffix in _SUFFIXES))
