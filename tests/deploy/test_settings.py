"""The table of settings in deploy/README.md: complete for Baton's own, and nothing in it is made up."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.checkout import CHECKOUT

README = (CHECKOUT / "deploy" / "README.md").read_text(encoding="utf-8")
# Read by Google's and other libraries that Baton stands on, and by Python.
OF_OTHERS = {"NO_PROXY", "TMPDIR"}


def table() -> set[str]:
    return set(re.findall(r"^\| `([A-Z_]+)` \|", README[README.index("## Settings for a fleet") :], flags=re.MULTILINE))


@cache
def sources() -> str:
    files = [file for folder in ("flows", "tasks", "containers") for file in (CHECKOUT / folder).rglob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def settings_of_prefect() -> set[str]:
    import prefect.cli.flow_run
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    # One is read past Prefect's settings, by the command that runs a flow run in a container.
    read_by_command = re.findall(r"PREFECT_FLOW_RUN_EXECUTE_[A-Z_]+", Path(prefect.cli.flow_run.__file__).read_text())
    return set(_get_settings_fields(Settings)) | set(read_by_command)


def test_every_setting_of_batons_is_in_the_table() -> None:
    deployed = (CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8")
    read = re.findall(r"BATON_[A-Z_]*[A-Z]", sources() + deployed)
    assert len(set(read)) > 4
    assert set(read) - table() == set()


def test_every_variable_that_the_code_asks_for_by_name_is_in_the_table() -> None:
    read = set(re.findall(r"environ(?:\.get|\.setdefault)?[\[(]\"([A-Z_]+)\"", sources()))
    # Set by Baton for its own children and libraries, which nobody needs to set.
    assert read - table() == {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "PYTHONPATH", "XLA_FLAGS"}


@pytest.mark.parametrize("name", sorted(table()))
def test_every_variable_in_the_table_is_read_by_somebody(name: str) -> None:
    if name.startswith("PREFECT_"):
        assert name in settings_of_prefect()
    elif name in {"BATON_REGISTRY", "BATON_STORAGE"}:
        assert f"{{{{ ${name} }}}}" in (CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8")
    elif name not in OF_OTHERS:
        assert re.search(rf"\b{name}\b", sources())


def test_what_the_pools_set_is_in_the_table() -> None:
    for file in (CHECKOUT / "deploy" / "work-pools").glob("*.json"):
        variables = json.loads(file.read_text(encoding="utf-8"))["variables"]["properties"]
        assert set(variables["env"]["default"]) <= table()


def test_what_the_readme_names_is_there() -> None:
    for path in re.findall(r"\bdeploy/[\w./-]+\.(?:yaml|json)|containers/[\w.]+\.py", README):
        assert path.startswith("containers/") or (CHECKOUT / path).is_file(), path
    written = yaml.safe_load((CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    names = {each["name"] for each in written}
    assert set(re.findall(r"\btrain-run/([a-z-]+)", README)) <= names
