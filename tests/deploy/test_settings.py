"""The table in deploy/settings.md has all of Baton's settings, and only existing ones."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.checkout import CHECKOUT

PAGES = {page.name: page.read_text(encoding="utf-8") for page in (CHECKOUT / "deploy").glob("*.md")}
# Read by Python and by libraries.
OF_OTHERS = {"NO_PROXY", "TMPDIR"}


def table() -> set[str]:
    page = PAGES["settings.md"]
    return set(re.findall(r"^\| `([A-Z_]+)` \|", page[page.index("## All settings") :], flags=re.MULTILINE))


@cache
def sources() -> str:
    files = [file for folder in ("flows", "tasks", "containers") for file in (CHECKOUT / folder).rglob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def settings_of_prefect() -> set[str]:
    import prefect.cli.flow_run
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    # The command that runs a flow run in a container reads one setting directly.
    read_by_command = re.findall(r"PREFECT_FLOW_RUN_EXECUTE_[A-Z_]+", Path(prefect.cli.flow_run.__file__).read_text())
    return set(_get_settings_fields(Settings)) | set(read_by_command)


def test_every_baton_setting_is_in_the_table() -> None:
    deployed = (CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8")
    read = re.findall(r"BATON_[A-Z_]*[A-Z]", sources() + deployed)
    assert len(set(read)) > 4
    assert set(read) - table() == set()


def test_every_variable_read_by_the_code_is_in_the_table() -> None:
    read = set(re.findall(r"environ(?:\.get|\.setdefault)?[\[(]\"([A-Z_]+)\"", sources()))
    # Baton sets these for its child processes and libraries; users need not.
    assert read - table() == {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "HOME", "XDG_CACHE_HOME", "XLA_FLAGS"}


@pytest.mark.parametrize("name", sorted(table()))
def test_every_variable_in_the_table_is_read(name: str) -> None:
    if name.startswith("PREFECT_"):
        assert name in settings_of_prefect()
    elif name in {"BATON_REGISTRY", "BATON_STORAGE"}:
        assert f"{{{{ ${name} }}}}" in (CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8")
    elif name not in OF_OTHERS:
        assert re.search(rf"\b{name}\b", sources())


def test_variables_of_work_pools_are_in_the_table() -> None:
    for file in (CHECKOUT / "deploy" / "work-pools").glob("*.json"):
        variables = json.loads(file.read_text(encoding="utf-8"))["variables"]["properties"]
        assert set(variables["env"]["default"]) <= table()


def test_files_named_in_the_pages_exist() -> None:
    text = "\n".join(PAGES.values())
    for path in re.findall(r"\bdeploy/[\w./-]+\.(?:yaml|json)|containers/[\w.]+\.py", text):
        assert path.startswith("containers/") or (CHECKOUT / path).is_file(), path
    written = yaml.safe_load((CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    names = {each["name"] for each in written}
    assert set(re.findall(r"\btrain-run/([a-z-]+)", text)) <= names
