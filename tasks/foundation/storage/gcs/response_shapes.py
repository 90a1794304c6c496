"""The shape of each answer of Cloud Storage, checked in one place before anything in it is used.

A proxy, a login page or a cache can answer in the store's place with status 200. Without these checks such an answer is
read as an empty listing, a missing file or a successful write.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.gcs.responses import RESUME_INCOMPLETE, Answer, Malformed, json_of

_CRC32C_BYTES = 4
_PACKINGS = {"br", "compress", "deflate", "gzip", "x-gzip", "zstd"}
_NO_CONTENT, _OK, _PARTIAL = 204, 200, 206
# The store sends at least one of these with the bytes of an object.
_OF_THE_STORE = ("X-Goog-Hash", "X-Goog-Generation", "X-Goog-Stored-Content-Length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """An object as the store describes it.

    Attributes:
        generation: a number for each version of it.
        metadata: its maker's own.
        encoding: how its stored bytes are packed, such as gzip; mostly empty.
        made: time of creation in RFC 3339, by the store's clock; may be empty.
    """

    name: str
    stored: Stored
    generation: str
    metadata: Mapping[str, str]
    encoding: str
    made: str

    def age_before(self, other: "Resource") -> float:
        """Seconds from the making of this object to that of another; 0 where the store does not say."""
        try:
            return (datetime.fromisoformat(other.made) - datetime.fromisoformat(self.made)).total_seconds()
        except (ValueError, TypeError):
            return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a listing."""

    names: tuple[str, ...]
    prefixes: tuple[str, ...]
    next_token: str | None


def resource_of(answer: Answer, *, key: str) -> Resource:
    """An object's description; a size that is left out is 0.

    Raises:
        Malformed: it is none, or that of another object.
    """
    return _resource(json_of(answer), key)


def page_of(answer: Answer, *, prefix: str, delimiter: str | None, token: str | None) -> Page:
    """A page of a listing.

    Args:
        answer: the answer.
        prefix: what was asked for: every name begins with it.
        delimiter: likewise: every prefix ends with it.
        token: of the page before.

    Raises:
        Malformed: it is none, or of something that was not asked for.
    """
    found = json_of(answer)
    if found.get("kind") != "storage#objects":
        raise _wrong("a listing", found, "kind")
    items, prefixes = found.get("items", []), found.get("prefixes", [])
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise _wrong("a listing", found, "items")
    page = Page(
        names=_below([item.get("name") for item in items], prefix),
        prefixes=_below(prefixes if isinstance(prefixes, list) else [None], prefix),
        next_token=found.get("nextPageToken"),
    )
    if not all(name.endswith(delimiter or "") for name in page.prefixes) or (page.prefixes and delimiter is None):
        raise _wrong("a listing", found, "prefixes")
    # The same page over and over would never end.
    if page.next_token is not None and (not isinstance(page.next_token, str) or page.next_token in {"", token}):
        raise _wrong("a listing", found, "nextPageToken")
    return page


def rewritten(answer: Answer, *, target: str) -> str | None:
    """The token to go on with a copy; None when it is done.

    Raises:
        Malformed: it is no answer to a copy, or one to another.
    """
    found = json_of(answer)
    done, token = found.get("done"), found.get("rewriteToken")
    if done is True:
        resource = found.get("resource")
        _resource(resource if isinstance(resource, dict) else {}, target)
        return None
    if done is not False or not isinstance(token, str) or not token:
        raise _wrong("an answer to a copy", found, "done")
    return token


def settings_of(answer: Answer, *, bucket: str) -> Mapping[str, Any]:
    """A bucket's settings.

    Raises:
        Malformed: they are none, or those of another bucket.
    """
    found = json_of(answer)
    if found.get("name") != bucket:
        raise _wrong(f"a description of the bucket {bucket}", found, "name")
    return found


def require_deleted(answer: Answer) -> None:
    """Check the answer to a delete.

    Raises:
        Malformed: the store did not send it.
    """
    if answer.status not in {_NO_CONTENT, _OK} or answer.contents.strip():
        raise Malformed(f"the answer to a delete is {answer.status} with {len(answer.contents)} bytes; it has none")


def session_of(answer: Answer) -> str:
    """The address of a resumable upload.

    Raises:
        Malformed: there is none.
    """
    location = answer.headers.get("Location", "")
    if answer.status != _OK or not location.startswith(("https://", "http://")) or "upload_id=" not in location:
        raise Malformed(f"the answer {answer.status} to the beginning of an upload names no address to send to")
    return location


def progress_of(answer: Answer, *, key: str, size: int) -> Resource | int:
    """State of an upload: the finished object, or how many bytes the store has so far.

    Args:
        answer: the answer.
        key: the object's name.
        size: of all that is to be sent.

    Raises:
        Malformed: it is neither.
    """
    if answer.status != RESUME_INCOMPLETE:
        return resource_of(answer, key=key)
    told = answer.headers.get("Range")
    if told is None:
        return 0
    last = told.removeprefix("bytes=0-")
    if not last.isdecimal() or int(last) >= size:
        raise Malformed(f"the store says that it has {told!r} of {size} bytes")
    return int(last) + 1


def crc32c_of_media(answer: Answer) -> str | None:
    """The crc32c of an object that its bytes come with; None if they come without.

    Raises:
        Malformed: the bytes are not the store's.
    """
    if answer.status != _OK:
        raise Malformed(f"the answer to a read is {answer.status}, not {_OK}")
    _require_of_the_store(answer)
    for value in _all_of(answer.headers, "X-Goog-Hash"):
        name, _, encoded = value.strip().partition("=")
        if name == "crc32c":
            return _crc32c(encoded)
    return None


def range_of_media(answer: Answer, *, begin: int, size: int) -> int:
    """The size of the whole object that a part was read of.

    Args:
        answer: the answer.
        begin: offset of the part.
        size: how many bytes were asked for; at the object's end there may be fewer.

    Raises:
        Malformed: it is not the part that was asked for, or not the store's.
    """
    unit, _, told = answer.headers.get("Content-Range", "").partition(" ")
    place, _, whole = told.partition("/")
    first, _, last = place.partition("-")
    if answer.status != _PARTIAL or unit != "bytes" or not all(map(str.isdecimal, (first, last, whole))):
        raise Malformed(f"the answer {answer.status} to the read of a part does not say which part it is")
    _require_of_the_store(answer)
    wanted = min(size, int(whole) - begin)
    if (int(first), int(last) + 1 - begin, len(answer.contents)) != (begin, wanted, wanted):
        raise Malformed(f"asked for {size} bytes from {begin} on, {len(answer.contents)} came, told as {told}")
    return int(whole)


def encoding_of_media(answer: Answer) -> str:
    """How the stored bytes of an object are packed, such as gzip; empty if they are not.

    Raises:
        Malformed: something on the way packed them.
    """
    stored = answer.headers.get("X-Goog-Stored-Content-Encoding", "")
    sent = _packing(answer.headers.get("Content-Encoding", ""))
    if sent and stored and not _packing(stored):
        raise Malformed(f"the bytes were packed ({sent}) on the way here, which was not asked for")
    return _packing(stored) or sent


def _packing(encoding: str) -> str:
    """The encoding if bytes are packed with it; some tools write a character set there, which packs nothing."""
    found = encoding.strip().lower()
    return found if found in _PACKINGS else ""


def _require_of_the_store(answer: Answer) -> None:
    if not any(name in answer.headers for name in _OF_THE_STORE):
        raise Malformed(f"{len(answer.contents)} bytes came without any of the store's headers")


def _resource(found: Mapping[str, Any], key: str) -> Resource:
    what = f"a description of {key}"
    size, generation, metadata = found.get("size", "0"), found.get("generation"), found.get("metadata", {})
    if found.get("name") != key:
        raise _wrong(what, found, "name")
    if not str(size).isdecimal():
        raise _wrong(what, found, "size")
    if not str(generation).isdecimal():
        raise _wrong(what, found, "generation")
    if not isinstance(metadata, Mapping):
        raise _wrong(what, found, "metadata")
    crc32c = _crc32c(found.get("crc32c"))
    if crc32c is None:
        raise _wrong(what, found, "crc32c")
    return Resource(
        name=key,
        stored=Stored(size=int(size), crc32c=crc32c),
        generation=str(generation),
        metadata=metadata,
        encoding=_packing(str(found.get("contentEncoding", ""))),
        made=str(found.get("timeCreated", "")),
    )


def _crc32c(encoded: object) -> str | None:
    """Hexadecimal, from the API's base64; None if it is no checksum."""
    try:
        data = base64.b64decode(str(encoded), validate=True)
    except binascii.Error:
        return None
    return data.hex() if len(data) == _CRC32C_BYTES else None


def _below(names: Iterable[object], prefix: str) -> tuple[str, ...]:
    found = []
    for name in names:
        if not isinstance(name, str) or not name.startswith(prefix) or name == "":
            raise Malformed(f"a listing of {prefix!r} holds {str(name)[:80]!r}")
        found.append(name)
    return tuple(found)


def _all_of(headers: Mapping[str, str], name: str) -> list[str]:
    """All values of a header: several are one header with commas, or several headers."""
    values = headers.getall(name, []) if hasattr(headers, "getall") else [headers.get(name, "")]
    return ",".join(values).split(",")


def _wrong(what: str, found: Mapping[str, Any], key: str) -> Malformed:
    shown = {name: str(value)[:40] for name, value in list(found.items())[:5]}
    return Malformed(f"the answer is not {what}: its {key} is {str(found.get(key))[:80]!r} ({shown})")
