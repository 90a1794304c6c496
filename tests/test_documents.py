"""The documents: links lead somewhere, the README is short, messages are those of the code, and commands are tested."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT

MISTAKES = CHECKOUT / "tests" / "flows" / "commands" / "mistakes.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Words of all pages together, and of README.md. What a test or a script makes is not counted: between two comments in a
# page, or as the page that it is: results below tests/; messages and changes are looked up, not read.
MOST_WORDS, MOST_WORDS_OF_README = 16_900, 900
GENERATED = re.compile(r"^<!-- generated.*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL)
LOOKED_UP = ("CHANGELOG.md", "flows/troubleshooting.md")
# Pages that users read.
FOR_USERS = [
    "README.md",
    "GUIDE.md",
    "deploy/runs/README.md",
    "flows/README.md",
    "flows/homes.md",
    "flows/troubleshooting.md",
    "tasks/README.md",
    "tasks/prepare_data/README.md",
    "deploy/README.md",
    "deploy/containers.md",
    "deploy/google-cloud.md",
    "deploy/hosts.md",
    "deploy/settings.md",
]
# How each block of a page begins, with its language. Tests type those with commands, whole: README.md's in
# end_to_end/test_shipped_runs.py and test_own_model.py, GUIDE.md's in end_to_end/test_guide.py; the others in
# deploy/test_readme.py and test_deploying.py.
BLOCKS = {
    "README.md": [
        ("", "git clone"),
        ("", "Done:"),
        ("python", "# model.py"),
        ("python", "# data.py"),
        ("yaml", "# run.yaml"),
        ("", "baton run"),
    ],
    "GUIDE.md": [
        ("python", "# data.py"),
        ("python", "# model.py"),
        ("python", "# fit.py"),
        ("console", "$ python fit.py"),
        ("yaml", "# run.yaml"),
        ("console", "$ baton run"),
        ("console", "$ baton run"),
        ("python", "# same.py"),
        ("console", "$ python same.py"),
        ("console", "$ baton status"),
        ("console", "$ baton evaluate"),
        ("console", "$ baton run"),
        ("console", "$ baton fork"),
        ("console", "$ prefect --no-prompt"),
    ],
    "deploy/README.md": [
        ("sh terminal", "export PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"),
        ("sh", ".venv/bin/prefect work-pool create"),
        ("sh terminal", ".venv/bin/prefect worker"),
        ("sh", ".venv/bin/prefect deployment schedule create"),
        ("sh", ".venv/bin/prefect flow-run ls"),
        ("sh", ".venv/bin/prefect --no-prompt deploy --name train-run/nightly"),
        ("sh own", ".venv/bin/prefect --no-prompt deploy flows/with_prefect/run_flows.py:train_run"),
        ("sh", ".venv/bin/prefect --no-prompt deploy --name train-run/process"),
        ("sh alerts", "BLOCK="),
    ],
}
# Commands within sentences, and the tests that type them.
WITHIN_SENTENCES = {
    "README.md": {
        "make run": "test_shipped_runs.py",
        "baton init FOLDER": "test_init.py",
        "pip install --constraint requirements.lock '.[cpu]'": "test_shipped_runs.py",
    },
    "GUIDE.md": {
        "baton run": "test_guide.py",
        "baton prove": "test_own_model.py",
    },
    "deploy/README.md": {
        "make install": "test_shipped_runs.py",
        "prefect deployment schedule resume train-run/nightly SCHEDULE_ID": "test_readme.py",
        "prefect deployment schedule ls train-run/nightly": "test_readme.py",
        "prefect deploy --all": "test_deploying.py",
    },
}


@cache
def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],  # noqa: S607 - git is where it is
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"this checkout is no git repository: {listed.stderr}")
    return [CHECKOUT / name for name in listed.stdout.splitlines() if (CHECKOUT / name).is_file()]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@cache
def messages() -> str:
    """The string literals of the sources, joined where they continue on the next line."""
    files = [file for folder in ("flows", "tasks") for file in sorted((CHECKOUT / folder).rglob("*.py"))]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


def test_links_lead_to_files_and_headings() -> None:
    wrong = []
    for page in pages():
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if "://" in path:
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                wrong.append(f"{page.relative_to(CHECKOUT)}: {target}")
    assert not wrong


def words_of(page: Path) -> int:
    return len(GENERATED.sub("", page.read_text(encoding="utf-8")).split())


def test_readme_is_short() -> None:
    assert words_of(CHECKOUT / "README.md") <= MOST_WORDS_OF_README


def test_all_pages_together_are_short() -> None:
    words = {str(page.relative_to(CHECKOUT)): words_of(page) for page in pages()}
    read = {page: count for page, count in words.items() if page not in LOOKED_UP and not page.startswith("tests/")}
    assert sum(read.values()) <= MOST_WORDS, dict(sorted(read.items(), key=lambda each: -each[1]))


@pytest.mark.parametrize("page", FOR_USERS)
def test_page_links_to_the_glossary(page: str) -> None:
    assert "GLOSSARY.md)" in (CHECKOUT / page).read_text(encoding="utf-8")


def messages_of_troubleshooting() -> list[str]:
    text = (CHECKOUT / "flows" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)
    return [quoted for first_cell in rows for quoted in re.findall("`(.+?)`", first_cell)]


def test_messages_of_troubleshooting_are_in_the_code() -> None:
    quoted = messages_of_troubleshooting()
    assert len(quoted) > 50
    parts = {part.strip(" :") for message in quoted for part in message.split("…")}
    printed = messages() + MISTAKES.read_text(encoding="utf-8")
    assert not sorted(part for part in parts if part and part not in printed)


def test_troubleshooting_has_every_message_of_a_mistake() -> None:
    """mistakes.md, which a test makes, has what commands print."""
    patterns = [".*".join(map(re.escape, message.split("…"))) for message in messages_of_troubleshooting()]
    errors = re.findall(r"^error: (.*?)^```$", MISTAKES.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(errors) > 30
    assert not [error for error in errors if not any(re.search(each, error, re.DOTALL) for each in patterns)]


@pytest.mark.parametrize("page", BLOCKS)
def test_tests_type_every_command_of_the_page(page: str) -> None:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    block = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    found = block.findall(text)
    known = BLOCKS[page]
    assert [language for language, _ in found] == [language for language, _ in known], "a new block needs a test"
    assert all(typed.startswith(first) for (_, typed), (_, first) in zip(found, known, strict=True))
    spans = re.findall(r"`((?:\.venv/bin/)?(?:baton|git|make|pip|prefect|python) [^`]*)`", block.sub("", text))
    assert {" ".join(span.split()) for span in spans} == WITHIN_SENTENCES[page].keys(), "a new command needs a test"
    names = {file.name for file in (CHECKOUT / "tests").rglob("test_*.py")}
    assert set(WITHIN_SENTENCES[page].values()) <= names


def test_first_frame_of_the_recording_is_its_end() -> None:
    """A viewer that shows no motion shows every line."""
    picture = (CHECKOUT / "deploy" / "pictures" / "recording.svg").read_text(encoding="utf-8")
    moments = re.findall(r"^@keyframes l\d+\{0%,([\d.]+)%\{opacity:1\}", picture, flags=re.MULTILINE)
    assert len(moments) == picture.count("<text ") > 20
    assert set(moments) == {moments[0]} != {"0.00"}


def test_changelog_has_the_version() -> None:
    text = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}( |$)", text, flags=re.MULTILINE)
