"""Commands on homes with hostile content: they change no file outside the home and never end with a traceback.

Each string of every file is replaced in turn. The tests find the strings by walking the files, so strings of future
fields are covered, too. Code that commands share with training (fetching, retention) is called as training calls it.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from baton.flows.commands.main import app, main
from baton.tasks.foundation.checkpoint.retention import KeepLast, apply_retention
from baton.tasks.foundation.checkpoint.selection import select_checkpoint
from baton.tasks.foundation.checkpoint.verify import fetch, read_manifest
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import SegmentResult
from baton.tasks.foundation.dataset.manifest import read_manifest as read_dataset_manifest
from baton.tasks.foundation.dataset.shards import VerifiedShards
from baton.tasks.foundation.errors import BatonError, FileMissing
from baton.tasks.foundation.log.files import entry_path
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.log.stage_results import handed_on, take_answer
from baton.tasks.foundation.storage.transfers import checksum_bytes
from baton.tasks.foundation.telemetry.tensorboard import write_curves
from tests.support.fake_run import DATASET
from tests.support.hostile_homes import ESCAPES, LENGTH, PREPARED, SEGMENT, Case, HostileHome, traversals

MOST_PRINTED = 60_000
EXIT_CODES = {0, 2, 3, 4}
KINDS = [pytest.param("log", marks=pytest.mark.slow), "manifest", "dataset", "attempt", "answer"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> HostileHome:
    return HostileHome(tmp_path_factory.mktemp("around"))


class Commands:
    """The commands for each kind of hostile file, and checks of what they print."""

    def __init__(self, home: HostileHome, capsys: pytest.CaptureFixture[str], scratch: Path) -> None:
        self.home = home
        self.capsys = capsys
        self.scratch = scratch
        self.log = RunLog(home.run.home)

    def of(self, kind: str) -> Iterator[Callable[[], int]]:
        address, storage = self.home.run.address, self.home.run.root.uri
        verbs: dict[str, list[list[str]]] = {
            "log": [
                ["status", address], ["log", address], ["list", storage], ["verify", address],
                ["fork", address, "--as", "forked"],
            ],
            "manifest": [["verify", address], ["fork", address, "--as", "forked"]],
            "dataset": [["verify", address]],
            "attempt": [["status", address]],
            "answer": [],
        }  # fmt: skip
        work: dict[str, list[Callable[[], object]]] = {
            "log": [self.fetch, self.write_curves, self.apply_retention],
            "manifest": [self.fetch],
            "dataset": [self.read_shards],
            "attempt": [],
            "answer": [self.commit_what_is_handed_on, lambda: take_answer(self.log.home, PREPARED, DatasetRef)],
        }
        yield from (lambda verb=verb: main(verb) for verb in verbs[kind])  # type: ignore[misc]
        yield from (lambda each=each: exit_code_of(each) for each in work[kind])  # type: ignore[misc]

    def fetch(self) -> None:
        """Fetch a checkpoint as a restore, init.weights and export do."""
        ref = select_checkpoint(self.log.home, None, error=FileMissing)
        folder = self.scratch / "fetched"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            fetch(self.log.home, ref, read_manifest(self.log.home, ref), folder)
        finally:
            shutil.rmtree(folder)

    def write_curves(self) -> None:
        """Write TensorBoard's curves, as every commit does."""
        shutil.rmtree(self.home.run.path("tensorboard"), ignore_errors=True)
        write_curves(self.log)

    def apply_retention(self) -> None:
        for _ in range(2):
            apply_retention(self.log, [KeepLast(1)], attempt="keeper")

    def read_shards(self) -> None:
        root = self.home.run.root
        identity = self.log.require_head().identity
        folder = identity["data.folder"]
        manifest = read_dataset_manifest(root, folder)
        with VerifiedShards(root.at(folder)) as shards:
            shards.open((*manifest.train, *manifest.validation))

    def commit_what_is_handed_on(self) -> None:
        result = handed_on(self.log.home, f"answers/{SEGMENT}.json")
        assert result.staged is not None
        read_manifest(self.log.home, result.staged)
        take_answer(self.log.home, SEGMENT, SegmentResult)

    def run_all(self, case: Case, what: str) -> None:
        """Run every command for this kind of file, and check its exit code and output."""
        for number, command in enumerate(self.of(case.kind)):
            where = f"{case}, {what}, command {number}"
            code = command()
            captured = self.capsys.readouterr()
            printed = captured.out + captured.err
            assert code in EXIT_CODES, f"{where}: exit code {code}\n{printed[:2000]}"
            assert len(printed) < MOST_PRINTED, f"{where}: {len(printed)} characters"
            assert all(line.isprintable() for line in printed.split("\n")), f"{where}: {printed[:2000]!r}"
            assert "Traceback" not in printed, where
            self.home.assert_nothing_left_it(where)


def exit_code_of(work: Callable[[], object]) -> int:
    try:
        work()
    except BatonError as fault:
        return fault.exit_code
    return 0


@pytest.fixture
def commands(
    home: HostileHome, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Commands:
    # Building the command line takes longer than most commands, so it is built once.
    command = typer.main.get_command(app)
    monkeypatch.setattr(typer.main, "get_command", lambda _: command)
    return Commands(home, capsys, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_paths_that_leave_the_home_do_no_harm(kind: str, home: HostileHome, commands: Commands) -> None:
    for number, case in enumerate(case for case in home.cases() if case.kind == kind):
        paths = traversals(home)
        # Fields that hold a path get every hostile path, other fields only one of them.
        names = {"path", "name", "paths", "data.folder", "parent", "folder"}
        is_path = names.intersection(map(str, case.place))
        for path in paths if is_path else (paths[number % len(paths)],):
            home.spoil(case, path)
            commands.run_all(case, path)


@pytest.mark.parametrize("kind", KINDS)
def test_control_characters_never_reach_the_terminal(kind: str, home: HostileHome, commands: Commands) -> None:
    for case in home.cases():
        if case.kind == kind:
            home.spoil(case, ESCAPES)
            commands.run_all(case, "escapes")


@pytest.mark.parametrize("kind", KINDS)
def test_very_long_strings_do_no_harm(kind: str, home: HostileHome, commands: Commands) -> None:
    for case in home.cases():
        if case.kind == kind:
            home.spoil(case, "A-" * (LENGTH // 2), once=True)
            commands.run_all(case, "long")


def test_invalid_times_do_no_harm(home: HostileHome, commands: Commands) -> None:
    for case in (Case("attempt", ("alive",)), Case("attempt", ("began",)), Case("log", ("time",))):
        for time in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "yesterday"):
            home.spoil(case, time)
            commands.run_all(case, time)


def test_file_names_never_overwrite_user_files(home: HostileHome, commands: Commands) -> None:
    """`../../.bashrc` is in the home, seen from the checkpoint, but is the user's file, seen from the fetch folder."""
    ref = home.run.tip
    path = f"{ref.path}/manifest.json"
    manifest = home.json_of(path)
    stored = checksum_bytes(b"stranger's")
    manifest["files"][0] = {"name": "../../.bashrc", "size": stored.size, "crc32c": stored.crc32c}
    home.spoil_files({path: manifest})
    home.run.path(".bashrc").write_bytes(b"stranger's")
    users = commands.scratch.parent / ".bashrc"
    users.write_text("# mine\n")
    code = exit_code_of(commands.fetch)
    assert not users.is_symlink()
    assert users.read_text() == "# mine\n"
    assert code in EXIT_CODES - {0}
    home.run.path(".bashrc").unlink()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in ("manifest", "dataset") for name in ("../../.bashrc", "..", "a/../../b", "a\\b")),
        ("manifest", "/etc/passwd"),  # in a dataset it is an external shard, see test_foreign_shards.py
    ],
)
def test_a_traversal_is_said_as_what_it_is(kind: str, name: str, home: HostileHome, commands: Commands) -> None:
    """All digests are right, so somebody wrote it: neither damage of a disk nor another version of Baton."""
    is_dataset = kind == "dataset"
    path = f"../{DATASET}/manifest.json" if is_dataset else f"{home.run.tip.path}/manifest.json"
    manifest = home.json_of(path)
    manifest["train" if is_dataset else "files"][0]["path" if is_dataset else "name"] = name
    home.spoil_files({path: manifest})
    for command in commands.of(kind):
        assert command() == 4
        captured = commands.capsys.readouterr()
        printed = " ".join((captured.out + captured.err).split())
        assert not printed or "no version of Baton writes such a name" in printed
        assert "another version" not in printed
        home.assert_nothing_left_it(name)


def test_retiring_deletes_nothing_outside_the_home(home: HostileHome, commands: Commands) -> None:
    newest = entry_path(home.run.head.number)
    entry = home.json_of(newest)
    assert entry["head"]["retired"]
    entry["head"]["retired"] = [{"path": "../../../victim", "at_commit": 0}]
    home.spoil_files({newest: entry})
    code = exit_code_of(commands.apply_retention)
    home.assert_nothing_left_it("retiring")
    assert code in EXIT_CODES - {0}


def test_a_checkpoint_that_is_its_own_parent_does_no_harm(home: HostileHome, commands: Commands) -> None:
    """Following the parents from the tip would never end."""
    entries = {path: home.json_of(path) for path in map(entry_path, range(home.run.head.number + 1))}
    for entry in entries.values():
        if "parent" in entry["body"]:
            entry["body"]["parent"] = entry["body"]["checkpoint"]["path"]
    home.spoil_files(entries)
    assert main(["report", home.run.address]) == 4
    assert "or the checkpoint is its own ancestor" in commands.capsys.readouterr().err


def test_a_report_escapes_unusual_names(home: HostileHome, commands: Commands) -> None:
    """A metric, a cause and a version contain formulas, HTML and markup; one name is very long."""
    text = "</script><b>$\\frac{[/x]"
    changed = {}
    for number in range(20):
        path = entry_path(number)
        if not home.run.home.exists(path):
            break
        entry = home.json_of(path)
        if "environment" in entry["body"]:
            entry["body"]["environment"]["versions"] = {text: "A-" * (LENGTH // 2)}
        if entry["body"].get("history"):
            entry["body"]["history"][0]["metrics"] = {text: 1.0, "A-" * 1000: 2.0}
            entry["body"]["seconds"] = {text: 2.0, "A-" * 1000: 2.0}
        changed[path] = entry
    home.spoil_files(changed)
    assert main(["report", home.run.address]) == 0
    printed = commands.capsys.readouterr()
    assert len(printed.out + printed.err) < 1000
    page = home.run.path("report/index.html").read_text()
    assert text not in page
    assert "&lt;/script&gt;&lt;b&gt;" in page
    home.assert_nothing_left_it("report")
