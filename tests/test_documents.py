"""The documents: links lead somewhere, the README is short, and messages are those of the code."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT

LINK = re.compile(r"\]\(([^)\s]+)\)")
MOST_WORDS = 1000
# Pages that users read.
FOR_USERS = [
    "README.md",
    "flows/README.md",
    "flows/troubleshooting.md",
    "tasks/README.md",
    "deploy/README.md",
    "deploy/containers.md",
    "deploy/google-cloud.md",
    "deploy/settings.md",
]


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


def test_readme_is_short() -> None:
    assert len((CHECKOUT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.parametrize("page", FOR_USERS)
def test_page_links_to_the_glossary(page: str) -> None:
    assert "GLOSSARY.md)" in (CHECKOUT / page).read_text(encoding="utf-8")


def test_messages_of_troubleshooting_are_in_the_code() -> None:
    text = (CHECKOUT / "flows" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        cell for row in re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE) for cell in re.findall("`(.+?)`", row)
    ]
    assert len(quoted) > 20
    parts = {part.strip(" :") for message in quoted for part in message.split("…")}
    assert not sorted(part for part in parts if part and part not in messages())
