"""Everything that deploy/prefect.yaml and the automations refer to exists."""

import ast
import asyncio
import json
import re
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml
from prefect.server.schemas.schedules import CronSchedule

from baton.tasks.foundation.contracts.run_file import load_run_file
from tests.support.checkout import CHECKOUT

DEPLOY = CHECKOUT / "deploy"
# Images that containers/ builds, and their flows.
IMAGES = {
    "baton/orchestrator": {"train-run", "evaluate-best"},
    "baton/prepare-data": {"prepare-data"},
    "baton/train-cpu": {"init-or-restore", "train-segment"},
    "baton/train-gpu": {"init-or-restore", "train-segment"},
    "baton/train-tpu": {"init-or-restore", "train-segment"},
    "baton/checkpoint": {"checkpoint-to-gcs"},
    "baton/evaluate": {"evaluate"},
}
# What trains on GPUs of a cluster; the other stages run there as those of the TPU run do.
ON_GPU = {"train-run/gpu", "init-or-restore/gpu", "train-segment/gpu"}
FLOWS = {"train-run", "prepare-data", "init-or-restore", "train-segment", "checkpoint-to-gcs", "evaluate"}


def deployments() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    return found


def flow_of(entrypoint: str) -> str:
    """Return the flow name in the decorator of an entrypoint."""
    file, _, function = entrypoint.partition(":")
    for node in ast.parse((CHECKOUT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            called = [each for each in node.decorator_list if isinstance(each, ast.Call)]
            names = [word.value for each in called for word in each.keywords if word.arg == "name"]
            return str(ast.literal_eval(names[0]))
    raise AssertionError(f"{entrypoint} does not exist")


def name_of(deployment: dict[str, Any]) -> str:
    return f"{flow_of(deployment['entrypoint'])}/{deployment['name']}"


def test_every_flow_has_every_kind_of_deployment() -> None:
    names = [name_of(deployment) for deployment in deployments()]
    assert len(names) == len(set(names))
    kinds = {f"{flow}/{kind}" for flow in FLOWS for kind in ("process", "docker", "kubernetes")}
    assert set(names) == kinds | ON_GPU | {
        "train-run/nightly",
        "train-run/nightly-kubernetes",
        "evaluate-best/weekly",
        "evaluate-best/weekly-kubernetes",
        "audit/weekly",
        "verify/weekly",
    }


def test_work_pools_have_templates() -> None:
    pools = {name_of(deployment): deployment["work_pool"]["name"] for deployment in deployments()}
    assert set(pools.values()) == {f"baton-{file.stem}" for file in (DEPLOY / "work-pools").glob("*.json")}
    # The stage that trains on TPU, and the stage that uses the same devices.
    on_tpu = {"train-segment/kubernetes", "init-or-restore/kubernetes"}
    assert {name for name, pool in pools.items() if pool == "baton-tpu"} == on_tpu
    for deployment in deployments():
        values = deployment["work_pool"].get("job_variables", {})
        file = DEPLOY / "work-pools" / f"{deployment['work_pool']['name'].removeprefix('baton-')}.json"
        template = json.loads(file.read_text(encoding="utf-8"))
        assert set(values) <= set(template["variables"]["properties"])
        assert set(template["variables"].get("required", [])) <= set(values)


def test_images_match_flows_and_contain_code() -> None:
    found = {}
    for deployment in deployments():
        image = deployment["work_pool"].get("job_variables", {}).get("image")
        steps = deployment.get("pull", [])
        assert (image is None) == (steps == []), name_of(deployment)
        if image is not None:
            found.setdefault(image.removeprefix("{{ $BATON_REGISTRY }}"), set()).add(flow_of(deployment["entrypoint"]))
            assert [step["prefect.deployments.steps.set_working_directory"] for step in steps] == [
                {"directory": "/opt/baton/baton"}
            ]
    assert found == IMAGES


def test_named_images_are_built() -> None:
    builder = CHECKOUT / "containers" / "build.py"
    if not builder.is_file():
        pytest.skip("containers/build.py does not exist")
    code = ast.parse(builder.read_text(encoding="utf-8"))
    tables = [node for node in code.body if isinstance(node, ast.Assign) and "TARGETS" in ast.unparse(node.targets[0])]
    built = set(ast.literal_eval(tables[0].value))
    assert {image.removeprefix("baton/") for image in IMAGES} <= built


def test_supervisors_run_one_at_a_time_and_are_inactive() -> None:
    scheduled = {name_of(each): each for each in deployments() if "schedules" in each}
    assert set(scheduled) == {
        "train-run/nightly",
        "train-run/nightly-kubernetes",
        "evaluate-best/weekly",
        "evaluate-best/weekly-kubernetes",
        "audit/weekly",
        "verify/weekly",
    }
    for deployment in scheduled.values():
        assert deployment["concurrency_limit"]["limit"] == 1
        assert deployment["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"
        assert [each["active"] for each in deployment["schedules"]] == [False]
    for name in ("train-run/nightly", "train-run/nightly-kubernetes"):
        assert scheduled[name]["parameters"]["max_seconds"] > 0


@pytest.mark.parametrize("day", [date(2026, 3, 29), date(2026, 10, 25)])
def test_change_of_summer_time_skips_and_repeats_no_run(day: date) -> None:
    """In a timezone of the user's: the first of these days has no 02:30, the other one has it twice."""
    zone = ZoneInfo("Europe/Berlin")
    first = datetime.combine(day - timedelta(days=3), time(), zone)
    for cron in {each["cron"] for every in deployments() for each in every.get("schedules", [])} | {"30 2 * * *"}:
        schedule = CronSchedule(cron=cron, timezone=zone.key)
        found = asyncio.run(schedule.get_dates(1000, first, first + timedelta(days=7, minutes=-1)))
        local = [each.astimezone(zone).replace(tzinfo=None) for each in found]
        days = {each.date() for each in local}
        assert len(local) == len(set(local)), cron
        assert len(days) == (7 if cron.endswith(" *") else 1), cron
        assert cron.startswith("*/") or len(local) == len(days), cron


def test_run_files_and_overrides_are_valid() -> None:
    for deployment in deployments():
        values = deployment.get("parameters")
        if values is None:
            continue
        path = Path(re.sub("^/code/", "deploy/runs/", values["run_file"]))
        overrides = [each.replace("{{ $BATON_STORAGE }}", "gs://bucket/runs") for each in values.get("overrides", [])]
        spec = load_run_file(CHECKOUT / path, overrides).spec
        kind = re.sub("^(nightly|weekly)-", "", deployment["name"])
        named = {stage.deployment for stage in spec.stages.remote().values()}
        expected = {f"{flow}/{kind}" for flow in FLOWS - {"train-run"}} if overrides else set()
        if kind == "gpu":
            expected = {name.replace("/gpu", "/kubernetes") for name in expected - ON_GPU} | (expected & ON_GPU)
        assert named == expected, name_of(deployment)
        # A cluster never uses `auto`, and a commit must fit into the notice of a spot node.
        found = (spec.accelerator.kind, spec.stages.evaluate.accelerator is not None, spec.stop.grace_seconds < 15)
        on_cluster = {"kubernetes": "tpu", "gpu": "gpu"}.get(kind)
        assert found == ((on_cluster, True, True) if on_cluster else ("auto", False, False)), name_of(deployment)


def test_mounted_folders_exist() -> None:
    for deployment in deployments():
        pool = deployment["work_pool"]
        for volume in pool["job_variables"].get("volumes", []) if pool["name"] == "baton-docker" else []:
            here, there, mode = volume.split(":")
            assert (CHECKOUT / here / "digits" / "run.yaml").is_file()
            assert (there, mode) == ("/code", "ro")


def test_automation_waits_for_several_heartbeats() -> None:
    automation = yaml.safe_load((DEPLOY / "automations" / "zombies.yaml").read_text(encoding="utf-8"))
    trigger = automation["trigger"]
    assert trigger["posture"] == "Proactive"
    # States with Baton's names, such as Stopped or StaleWriter, are ends too.
    assert trigger["expect"] == ["prefect.flow-run.*"]
    for file in (DEPLOY / "work-pools").glob("*.json"):
        template = json.loads(file.read_text(encoding="utf-8"))
        frequency = int(template["variables"]["properties"]["env"]["default"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert frequency >= 30
        assert trigger["within"] >= 3 * frequency
    assert [action["state"] for action in automation["actions"]] == ["CRASHED"]


def test_pending_runs_are_marked_before_leases_expire() -> None:
    # Prefect frees a slot once more when a flow run ends whose lease has expired: by then another one may hold it.
    automations = yaml.safe_load((DEPLOY / "automations" / "pending.yaml").read_text(encoding="utf-8"))["automations"]
    within: dict[str, int] = {}
    for automation in automations:
        assert [action["state"] for action in automation["actions"]] == ["CRASHED"]
        trigger = automation["trigger"]
        # Any event is a sign of life; a flow run may have started although the server missed the event that says so.
        assert (trigger["posture"], trigger["expect"]) == ("Proactive", ["prefect.flow-run.*"])
        pool, tag = trigger["match_related"]
        assert tag == {"prefect.resource.id": "prefect.tag.baton"}
        within[pool["prefect.work-pool.type"]] = trigger["within"]
    supervisors = [each for each in deployments() if "concurrency_limit" in each]
    for deployment in supervisors:
        kind = deployment["work_pool"]["name"].removeprefix("baton-")
        assert within[kind] <= deployment["concurrency_limit"].get("grace_period_seconds", 300) - 60, name_of(
            deployment
        )
        assert "baton" in deployment["tags"]
    assert len(supervisors) == 6
