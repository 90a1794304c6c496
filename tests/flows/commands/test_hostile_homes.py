"""Commands on homes that strangers wrote: nothing outside is touched, nothing is obeyed, nothing ends in a traceback.

Each string of every file is replaced in turn; the files are walked, so that strings that come later are covered too.
What the commands share with training (fetching a checkpoint, retiring) is called as training calls it.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from flows.commands.main import app, main
from flows.launching.stage_results import handed_on, take_answer
from tasks.foundation.checkpoint.retention import KeepLast, clear_away
from tasks.foundation.checkpoint.selection import choose
from tasks.foundation.checkpoint.verify import fetch, read_manifest
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.segment import SegmentResult
from tasks.foundation.dataset.manifest import load_manifest
from tasks.foundation.dataset.shard_verification import VerifiedShards
from tasks.foundation.errors import BatonError, FileMissing
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.telemetry.tensorboard import write_curves
from tests.support.hostile_homes import ESCAPES, LENGTH, PREPARED, SEGMENT, Case, HostileHome, traversals

MOST_PRINTED = 60_000
EXIT_CODES = {0, 2, 3, 4}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> HostileHome:
    return HostileHome(tmp_path_factory.mktemp("around"))


class Commands:
    """What is done with a home of each kind, and what is printed."""

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
            "log": [self.fetch, self.write_curves, self.clear_away],
            "manifest": [self.fetch],
            "dataset": [self.read_shards],
            "attempt": [],
            "answer": [self.commit_what_is_handed_on, lambda: take_answer(self.log.home, PREPARED, DatasetRef)],
        }
        yield from (lambda verb=verb: main(verb) for verb in verbs[kind])  # type: ignore[misc]
        yield from (lambda each=each: exit_code_of(each) for each in work[kind])  # type: ignore[misc]

    def fetch(self) -> None:
        """As a restore, init.weights and export do."""
        ref = choose(self.log.home, None, error=FileMissing)
        folder = self.scratch / "fetched"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            fetch(self.log.home, ref, read_manifest(self.log.home, ref), folder)
        finally:
            shutil.rmtree(folder)

    def write_curves(self) -> None:
        """As every commit does, for TensorBoard."""
        shutil.rmtree(self.home.run.path("tensorboard"), ignore_errors=True)
        write_curves(self.log)

    def clear_away(self) -> None:
        for _ in range(2):
            clear_away(self.log, [KeepLast(1)], attempt="keeper")

    def read_shards(self) -> None:
        root = self.home.run.root
        identity = self.log.require_head().identity
        ref = DatasetRef(
            folder=identity["data.folder"], content_digest=identity["data.content_digest"], train_examples=1,
            validation_examples=0, already_prepared=True,
        )  # fmt: skip
        manifest = load_manifest(root, ref)
        with VerifiedShards(root.at(ref.folder)) as shards:
            shards.open((*manifest.train, *manifest.validation))

    def commit_what_is_handed_on(self) -> None:
        result = handed_on(self.log.home, f"answers/{SEGMENT}.json")
        assert result.staged is not None
        read_manifest(self.log.home, result.staged)
        take_answer(self.log.home, SEGMENT, SegmentResult)

    def run_all(self, case: Case, what: str) -> None:
        """Every command on the home as it is."""
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
    # The command line is the same each time, and takes longer to make than most of what it does.
    command = typer.main.get_command(app)
    monkeypatch.setattr(typer.main, "get_command", lambda _: command)
    return Commands(home, capsys, tmp_path)


@pytest.mark.parametrize("kind", ["log", "manifest", "dataset", "attempt", "answer"])
def test_every_string_replaced_by_what_leads_out(kind: str, home: HostileHome, commands: Commands) -> None:
    for number, case in enumerate(case for case in home.cases() if case.kind == kind):
        paths = traversals(home)
        # All of them where a path is meant; elsewhere each gets its turn.
        names = {"path", "name", "paths", "data.folder", "parent", "folder"}
        meant = names.intersection(map(str, case.place))
        for path in paths if meant else (paths[number % len(paths)],):
            home.spoil(case, path)
            commands.run_all(case, path)


@pytest.mark.parametrize("kind", ["log", "manifest", "dataset", "attempt", "answer"])
def test_every_string_replaced_by_what_a_terminal_obeys(kind: str, home: HostileHome, commands: Commands) -> None:
    for case in home.cases():
        if case.kind == kind:
            home.spoil(case, ESCAPES)
            commands.run_all(case, "escapes")


@pytest.mark.parametrize("kind", ["log", "manifest", "dataset", "attempt", "answer"])
def test_every_string_replaced_by_a_long_one(kind: str, home: HostileHome, commands: Commands) -> None:
    for case in home.cases():
        if case.kind == kind:
            home.spoil(case, "A-" * (LENGTH // 2), once=True)
            commands.run_all(case, "long")


def test_times_that_no_calendar_has(home: HostileHome, commands: Commands) -> None:
    for case in (Case("attempt", ("alive",)), Case("attempt", ("began",)), Case("log", ("time",))):
        for time in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "yesterday"):
            home.spoil(case, time)
            commands.run_all(case, time)


def test_the_name_of_a_file_does_not_replace_one_of_the_users(home: HostileHome, commands: Commands) -> None:
    """The file is in the home, two folders above its checkpoint; two above where it is fetched to is the user's own."""
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


def test_retiring_deletes_nothing_outside(home: HostileHome, commands: Commands) -> None:
    newest = max(path for path in home.run.home.files("log") if path.endswith(".json"))
    entry = home.json_of(newest)
    assert entry["head"]["retired"]
    entry["head"]["retired"] = [{"path": "../../../victim", "at_commit": 0}]
    home.spoil_files({newest: entry})
    code = exit_code_of(commands.clear_away)
    home.assert_nothing_left_it("retiring")
    assert code in EXIT_CODES - {0}


def test_a_checkpoint_that_comes_from_itself(home: HostileHome, commands: Commands) -> None:
    """The way from the tip to the beginning would never end."""
    newest = max(path for path in home.run.home.files("log") if path.endswith(".json"))
    numbers = range(int(newest[4:12]) + 1)
    entries = {path: home.json_of(path) for path in (f"log/{number:08d}.json" for number in numbers)}
    for entry in entries.values():
        if "parent" in entry["body"]:
            entry["body"]["parent"] = entry["body"]["checkpoint"]["path"]
    home.spoil_files(entries)
    assert main(["status", home.run.address]) == 4
    assert "comes from itself" in commands.capsys.readouterr().err


def test_a_report_of_odd_names(home: HostileHome, commands: Commands) -> None:
    """A metric, a cause and a version that read like formulas, pages and markup; one is a megabyte long."""
    text = "</script><b>$\\frac{[/x]"
    changed = {}
    for number in range(20):
        path = f"log/{number:08d}.json"
        if not home.run.home.exists(path):
            break
        entry = home.json_of(path)
        entry["head"]["environment"]["versions"] = {text: "A-" * (LENGTH // 2)}
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
