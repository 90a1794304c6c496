"""Listings of objects: prefix, delimiter, offsets and pages, over the current names."""

import base64
import bisect
import json
from collections.abc import Mapping
from typing import Any

from tests.fakes.gcs.objects import Bucket, Refusal, StoredObject, number_of
from tests.fakes.gcs.store import Store

# The service recommends 1000 and allows up to 5000, which gcsfs requests.
DEFAULT_PAGE, LARGEST_PAGE = 1000, 5000
UNSUPPORTED = ("matchGlob", "softDeleted")


def list_objects(store: Store, bucket: str, query: Mapping[str, str], base: str) -> dict[str, Any]:
    for name in UNSUPPORTED:
        if query.get(name, "").lower() not in {"", "false"}:
            raise Refusal(501, f"The fake does not know {name}")
    limit = min(number_of(query, "maxResults") or DEFAULT_PAGE, LARGEST_PAGE)
    versions = query.get("versions", "").lower() == "true"
    with store.lock:
        home = store.require(bucket, "storage.objects.list")
        items, prefixes, token = _page(home, query, limit, versions=versions)
    response: dict[str, Any] = {"kind": "storage#objects"}
    if items:
        response["items"] = [item.resource(base) for item in items]
    if prefixes:
        response["prefixes"] = prefixes
    if token:
        response["nextPageToken"] = token
    return response


def _page(
    home: Bucket, query: Mapping[str, str], limit: int, *, versions: bool
) -> tuple[list[StoredObject], list[str], str | None]:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    end = query.get("endOffset", "")
    names = sorted({*home.names, *home.archived}) if versions else home.names
    items: list[StoredObject] = []
    prefixes: list[str] = []
    index = bisect.bisect_left(names, max(prefix, query.get("startOffset", "")))
    if query.get("pageToken"):
        try:
            after, folded = json.loads(base64.urlsafe_b64decode(query["pageToken"]))
        except ValueError:
            raise Refusal(400, "Invalid pageToken") from None
        index = max(index, _index_after(names, after, folded=folded))
    last: tuple[str, bool] | None = None
    while index < len(names) and names[index].startswith(prefix) and not (end and names[index] >= end):
        if len(items) + len(prefixes) >= limit and last is not None:
            return items, prefixes, base64.urlsafe_b64encode(json.dumps(last).encode()).decode()
        name = names[index]
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        if cut >= 0:
            last = name[: cut + len(delimiter)], True
            prefixes.append(last[0])
            index = _index_after(names, last[0], folded=True)
        else:
            last = name, False
            items += _generations(home, name) if versions else [home.live[name]]
            index += 1
    return items, prefixes, None


def _index_after(names: list[str], last: str, *, folded: bool) -> int:
    """Where the next page starts. A prefix stood for all names that start with it."""
    if not folded:
        return bisect.bisect_right(names, last)
    return bisect.bisect_left(names, True, key=lambda name: name > last and not name.startswith(last))


def _generations(home: Bucket, name: str) -> list[StoredObject]:
    found = sorted(home.archived.get(name, {}).values(), key=lambda one: one.generation)
    return [*found, home.live[name]] if name in home.live else found
