"""Listings of objects: prefix, delimiter and pages, over the current names."""

import base64
import bisect
import json
from collections.abc import Mapping
from typing import Any

from tests.fakes.gcs.objects import Bucket, Refusal, StoredObject, number_of
from tests.fakes.gcs.store import Store

# The service recommends 1000 and allows up to 5000, which gcsfs requests.
DEFAULT_PAGE, LARGEST_PAGE = 1000, 5000
KNOWN = {"prefix", "delimiter", "pageToken", "maxResults", "fields", "projection", "prettyPrint", "alt", "userProject"}


def list_objects(store: Store, bucket: str, query: Mapping[str, str], base: str) -> dict[str, Any]:
    unknown = {name for name, value in query.items() if value.lower() not in {"", "false"}} - KNOWN
    if unknown:
        raise Refusal(501, f"The fake does not know {', '.join(sorted(unknown))}")
    limit = min(number_of(query, "maxResults") or DEFAULT_PAGE, LARGEST_PAGE)
    with store.lock:
        items, prefixes, token = _page(store.require(bucket, "storage.objects.list"), query, limit)
    response: dict[str, Any] = {"kind": "storage#objects"}
    if items:
        response["items"] = [item.resource(base) for item in items]
    if prefixes:
        response["prefixes"] = prefixes
    if token:
        response["nextPageToken"] = token
    return response


def _page(home: Bucket, query: Mapping[str, str], limit: int) -> tuple[list[StoredObject], list[str], str | None]:
    prefix, delimiter, names = query.get("prefix", ""), query.get("delimiter", ""), home.names
    items: list[StoredObject] = []
    prefixes: list[str] = []
    index = bisect.bisect_left(names, prefix)
    if query.get("pageToken"):
        try:
            after, folded = json.loads(base64.urlsafe_b64decode(query["pageToken"]))
        except ValueError:
            raise Refusal(400, "Invalid pageToken") from None
        index = max(index, _index_after(names, after, folded=folded))
    last: tuple[str, bool] | None = None
    while index < len(names) and names[index].startswith(prefix):
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
            items.append(home.live[name])
            index += 1
    return items, prefixes, None


def _index_after(names: list[str], last: str, *, folded: bool) -> int:
    """Where the next page starts. A prefix stood for all names that start with it."""
    if not folded:
        return bisect.bisect_right(names, last)
    return bisect.bisect_left(names, True, key=lambda name: name > last and not name.startswith(last))
