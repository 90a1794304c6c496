"""Finds settings of a bucket that harm a run: one message each, with the command that changes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = "versioning,retentionPolicy,defaultEventBasedHold,lifecycle,softDeletePolicy,billing"

# Suffixes of the names that a run writes, for rules that select objects by suffix.
_SUFFIXES = (".json", ".tfrecord", "ckpt.index", "ckpt.data-00000-of-00001", "/HINT", ".html", ".png")
# Conditions that only noncurrent versions meet, and conditions on a custom time, which Baton never sets.
_OF_OLD_VERSIONS = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
_OF_CUSTOM_TIMES = ("customTimeBefore", "daysSinceCustomTime")
_DAY_SECONDS = 86400


@dataclass(frozen=True, slots=True)
class SettingsProblems:
    """Problems with a bucket's settings.

    Attributes:
        errors: settings with which every run fails.
        warnings: settings that cost money, or may cost data later.
    """

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def check_settings(settings: Mapping[str, Any], *, bucket: str, prefix: str) -> SettingsProblems:
    """Check a bucket's settings.

    Object retention itself is harmless: it lets a client lock objects, and Baton locks none.

    Args:
        settings: with `FIELDS`; a missing field means off.
        bucket: its address, as gs://name.
        prefix: where the runs are, without slashes at its ends; may be empty.
    """
    update = f"gcloud storage buckets update {bucket}"
    errors, warnings = [], []
    retention = settings.get("retentionPolicy")
    if retention is not None:
        errors.append(
            f"{bucket} keeps every object for {_part(retention, 'retentionPeriod') or '?'} seconds (retention policy), "
            f"and Baton replaces and deletes objects; use another bucket, or: {update} --clear-retention-period"
        )
    if settings.get("defaultEventBasedHold"):
        errors.append(
            f"{bucket} puts a hold on every new object (default event-based hold), and Baton replaces and deletes "
            f"objects; use another bucket, or: {update} --no-default-event-based-hold"
        )
    rules = [rule for rule in _list(_part(settings.get("lifecycle"), "rule")) if _deletes(rule)]
    for rule in rules:
        condition = _condition(rule)
        if _matches_live_objects(condition) and _matches_names(condition, prefix):
            shown = ", ".join(f"{key} {value}" for key, value in condition.items()) or "always"
            warnings.append(
                f"a lifecycle rule of {bucket} deletes objects that runs need ({shown}): log entries, checkpoints and "
                "datasets; limit it to other prefixes (matchesPrefix), or use Baton's rule only: "
                f"{update} --lifecycle-file=deploy/storage/lifecycle.json"
            )
    if _part(settings.get("versioning"), "enabled") and not any(
        _deletes_old_versions(_condition(rule)) for rule in rules
    ):
        warnings.append(
            f"{bucket} keeps old versions of objects, so deleted objects still cost money; set the lifecycle rule "
            f"of deploy/google-cloud.md ({update} --lifecycle-file=deploy/storage/lifecycle.json)"
        )
    days = _seconds(_part(settings.get("softDeletePolicy"), "retentionDurationSeconds")) / _DAY_SECONDS
    if days > 0:
        warnings.append(
            f"{bucket} keeps deleted objects for {days:g} days (soft delete), and they cost money: "
            f"{update} --clear-soft-delete"
        )
    if _part(settings.get("billing"), "requesterPays"):
        warnings.append(
            f"{bucket} has requester pays enabled, and Baton names no project to charge, so credentials of other "
            f"projects are refused: {update} --no-requester-pays"
        )
    return SettingsProblems(tuple(errors), tuple(warnings))


def _deletes(rule: object) -> bool:
    return _part(_part(rule, "action"), "type") == "Delete"


def _condition(rule: object) -> Mapping[str, Any]:
    found = _part(rule, "condition")
    return found if isinstance(found, Mapping) else {}


def _matches_live_objects(condition: Mapping[str, Any]) -> bool:
    if condition.get("isLive") is False:
        return False
    return not any(key in condition for key in (*_OF_OLD_VERSIONS, *_OF_CUSTOM_TIMES))


def _deletes_old_versions(condition: Mapping[str, Any]) -> bool:
    return condition.get("isLive") is False or any(key in condition for key in _OF_OLD_VERSIONS)


def _matches_names(condition: Mapping[str, Any], prefix: str) -> bool:
    """Whether the name of some object below the prefix can meet the condition."""
    below = f"{prefix}/" if prefix else ""
    prefixes = [str(each) for each in _list(condition.get("matchesPrefix"))]
    suffixes = tuple(str(each) for each in _list(condition.get("matchesSuffix")))
    by_prefix = not prefixes or any(below.startswith(each) or each.startswith(below) for each in prefixes)
    return by_prefix and (not suffixes or any(suffix.endswith(suffixes) for suffix in _SUFFIXES))


def _part(found: object, key: str) -> object:
    return found.get(key) if isinstance(found, Mapping) else None


def _list(found: object) -> Sequence[object]:
    return found if isinstance(found, list) else []


def _seconds(found: object) -> float:
    """A number of seconds. JSON has an int64 as a string."""
    return float(str(found)) if str(found).isdecimal() else 0.0
