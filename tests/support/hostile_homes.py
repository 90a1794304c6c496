"""A home with one string of its files replaced; all digests match the new content."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.tasks.foundation.contracts.checkpoint import SourceReport, WeightsReport, manifest_digest
from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, content_digest
from baton.tasks.foundation.contracts.identity import digest_of
from baton.tasks.foundation.contracts.log_entry import Change, Finish, SegmentResult
from baton.tasks.foundation.errors import DamagedDataset
from baton.tasks.foundation.log.appends import quarantine
from baton.tasks.foundation.log.stage_results import write_answer
from tests.support.fake_run import DATASET, FakeRun
from tests.support.small_logs import signed

Key = str | int
Place = tuple[Key, ...]
KEY = "(key)"  # at the end of a place: the key itself, not its value

# Mappings with user-defined keys.
_NAMED = {"metrics", "seconds", "versions", "loaded", "origin", "identity"}
LENGTH = 200_000
ESCAPES = "\x1b]0;owned\x07\x1b[31m[/x][bold]$\\frac\u202e\x9b2J\nerror: forged\r"
SEGMENT, PREPARED = "0b7d1a52-0000-4000-8000-000000000000", "0b7d1a52-0000-4000-8000-000000000001"
KINDS = {
    "log": "log/0",
    "manifest": "checkpoints/",
    "dataset": f"../{DATASET}/manifest.json",
    "attempt": "attempts/",
    "answer": "answers/",
}


@dataclass(frozen=True, slots=True)
class Case:
    """The string to replace: its place in all files of a kind. List indices are not part of the place."""

    kind: str
    place: Place

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.place))}"


class HostileHome:
    """A sound run with a file of every kind, which can be changed and restored, and a victim folder beside it."""

    def __init__(self, folder: Path) -> None:
        self.run = _varied(folder / "storage")
        self.storage = folder / "storage" / "runs"
        self.victim = folder / "victim"
        self.victim.mkdir()
        (self.victim / "manifest.json").write_text("{}")
        (self.victim / ".bashrc").write_text("# mine\n")
        self._watched = folder
        self._sound = {path: self.run.home.read(path) for path in self.run.home.files("")}
        self._sound |= {f"../{path}": self.run.root.read(path) for path in self.run.root.files("datasets")}
        self._outside = self.outside()

    def json_of(self, path: str) -> Any:
        """The content of a sound file of the home."""
        return json.loads(self._sound[path])

    def cases(self) -> list[Case]:
        """One for every string and every user-defined key in the files."""
        found = {Case(kind, place) for kind in KINDS for _, data in self._files(kind) for place in _places(data)}
        return sorted(found, key=str)

    def spoil(self, case: Case, text: str, *, once: bool = False) -> None:
        """Replace the string of a case, then the digests of the changed files.

        Args:
            case: the string to replace.
            text: the new string.
            once: replace only one occurrence, in the newest file.
        """
        changed: dict[str, Any] = {}
        for path, data in self._files(case.kind):
            if case.place in _places(data):
                changed[path] = _replaced(data, case.place, text)
        if once:
            path = max(changed)
            done: list[bool] = []
            changed = {path: _replaced(dict(self._files(case.kind))[path], case.place, text, done=done)}
        self.spoil_files(changed)

    def spoil_files(self, changed: dict[str, Any]) -> None:
        """Restore the home except for these files; the log gets the digests of their new content."""
        files = self._sound | {path: json.dumps(data).encode() for path, data in changed.items()}
        digests = {
            manifest_digest(self._sound[path]): manifest_digest(data)
            for path, data in files.items()
            if path.endswith("/manifest.json") and data != self._sound[path]
        }
        dataset = KINDS["dataset"]
        if dataset in changed:
            sound = self.json_of(dataset)["content_digest"]
            files[dataset], digests[sound] = _with_digest(changed[dataset], sound)
        entries = {path: _renamed(data, digests) for path, data in files.items() if path.startswith("log/0")}
        identities = {
            old: new
            for path, data in entries.items()
            for old, new in zip(_identity_digests(self._sound[path]), _identity_digests(data), strict=False)
        }
        for path, data in entries.items():
            renamed = _renamed(data, identities)
            files[path] = renamed if renamed == self._sound[path] else signed(json.loads(renamed))
        shutil.rmtree(self.storage / "forked", ignore_errors=True)
        for path in set(self.run.home.files("")) - files.keys():
            self.run.path(path).unlink()
        for path, data in files.items():
            file = Path(os.path.normpath(self.run.home.root / path))
            if not file.is_file() or file.read_bytes() != data:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)

    def outside(self) -> dict[str, bytes | str]:
        """Everything around the storage: names, contents and targets of links."""
        found: dict[str, bytes | str] = {}
        for folder, below, files in os.walk(self._watched):
            if folder == str(self.storage.parent):
                below.remove(self.storage.name)
            for path in (Path(folder, name) for name in (*below, *files)):
                is_link, is_file = path.is_symlink(), path.is_file()
                found[str(path)] = str(path.readlink()) if is_link else path.read_bytes() if is_file else ""
        return found

    def assert_nothing_left_it(self, what: str) -> None:
        """Assert that nothing outside was created, changed or removed."""
        found = self.outside()
        assert found.keys() == self._outside.keys(), what
        assert found == self._outside, what

    def _files(self, kind: str) -> Iterator[tuple[str, Any]]:
        for path, data in self._sound.items():
            if path.startswith(KINDS[kind]) and path.endswith(".json"):
                yield path, json.loads(data)


def _varied(folder: Path) -> FakeRun:
    run = FakeRun(folder).train(100, 200)
    run.evaluate(0.75)
    run.train(300, 400)
    quarantine(run.log, run.tip, "flipped", attempt="q" * 32)
    run.train(500)
    run.retire(keep_last=2)
    run.train(600, 700)  # the retired checkpoints are now due for deletion
    head = run.head
    changed = Change(environment=head.environment, identity=head.identity, accepted=("data",))
    run.log.append(lambda _: changed, attempt="c")
    run.log.append(lambda _: Finish(checkpoint=run.tip, reason="early stopping"), attempt="f")
    _begun_from_weights(run)
    run.attempt("a" * 32, ended="failed", message="it died", process="host 1 2", within="w", staged=run.tip.path)
    run.attempt("b" * 32, began="2026-01-01T00:00:00+00:00")
    result = SegmentResult(
        staged=run.tip, parent=run.tip.path, exit_reason="segment_end", history=(), examples=1, seconds={"train": 1.0}
    )
    content = run.head.identity["data.content_digest"]
    dataset = DatasetRef(
        folder=DATASET, content_digest=content, train_examples=1, validation_examples=0, already_prepared=True
    )
    write_answer(run.home, SEGMENT, result)
    write_answer(run.home, PREPARED, dataset)
    return run


def _begun_from_weights(run: FakeRun) -> None:
    """Add initial weights to the first commit, and the run that this one was forked from."""
    report = WeightsReport(
        sources=(
            SourceReport(
                source="w.h5", kind="an HDF5 file", place="/w.h5", loaded={"model/a": "a"}, missing=("b",),
                unused=("c",), misfits=("d",), cast=("e",), remarks=("f",), not_asked=0, ignored=0,
            ),
        ),
        left=("g",), overlaid=("h",), digest="d" * 64,
    )  # fmt: skip
    lineage = {"home": "/other", "path": run.tip.path, "step": 0, "state_digest": "s" * 64, "entry": 1}
    for number, key, value in ((0, "forked_from", lineage), (1, "initialized_from", report.model_dump(mode="json"))):
        file = run.path(f"log/{number:08d}.json")
        entry = json.loads(file.read_bytes())
        entry["body"][key] = value
        file.write_bytes(signed(entry))


def _renamed(data: bytes, digests: Mapping[str, str]) -> bytes:
    for old, new in digests.items():
        data = data.replace(old.encode(), new.encode())
    return data


def _identity_digests(data: bytes) -> Sequence[str]:
    """The digests of the identity that an entry sets; none if it sets none."""
    identity = json.loads(data)["body"].get("identity")
    if not isinstance(identity, dict):
        return ()
    return (digest_of(identity),)


def _with_digest(data: Any, sound: str) -> tuple[bytes, str]:
    """A dataset manifest and its digest; that of the sound one if it cannot be read."""
    text = json.dumps(data).encode()
    try:
        manifest = DatasetManifest.from_json(text, where="", error=DamagedDataset)
    except DamagedDataset:
        return text, sound
    digest = content_digest(manifest.features, manifest.train, manifest.validation, manifest.held_out)
    if data["content_digest"] == sound:
        data = {**data, "content_digest": digest}
    return json.dumps(data).encode(), digest


def _places(value: Any, above: Place = ()) -> set[Place]:
    if isinstance(value, dict):
        keys = {(*above, key, KEY) for key in value} if above and above[-1] in _NAMED else set()
        return keys.union(*(_places(below, (*above, key)) for key, below in value.items()))
    if isinstance(value, list):
        return {place for below in value for place in _places(below, (*above, "*"))}
    return {above} if isinstance(value, str) else set()


def _replaced(value: Any, place: Place, text: str, done: list[bool] | None = None) -> Any:
    if not place:
        if done:
            return value
        if done is not None:
            done.append(True)
        return text
    first, rest = place[0], place[1:]
    if isinstance(value, list) and first == "*":
        return [_replaced(below, rest, text, done) for below in value]
    if not isinstance(value, dict) or first not in value:
        return value
    if rest == (KEY,):
        return {text if key == first else key: below for key, below in value.items()}
    return {key: _replaced(below, rest, text, done) if key == first else below for key, below in value.items()}


def traversals(home: HostileHome) -> Sequence[str]:
    """Paths to the victim: from the home, from a checkpoint folder, and absolute."""
    return ("checkpoints/../../../../victim", f"{'../' * 5}victim/.bashrc", str(home.victim))
