"""Built images: their content, signals, rebuilding, and ways to add user code.

The tests build the images `checkpoint` and `train-cpu`. With BATON_TEST_IMAGES=all they check the content of all
images, which takes about 10 GB of disk space.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.support.checkout import CHECKOUT
from tests.support.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROBE = Path(__file__).with_name("probe.py")
ROOMS = [f"baton.tasks.{room}.stage" for room in ("init_or_restore", "train_segment", "evaluate")]
FLOWS = (*ROOMS, "baton.flows.with_prefect.run_flows")
TENSORFLOW = {"tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-tpu", "tf-nightly"}
BATON_USER = 10001


@dataclass(frozen=True, kw_only=True)
class Content:
    """The expected content of an image.

    Attributes:
        imports: modules that can be imported.
        lacks: distributions that must not be installed.
        tensorflow: the installed TensorFlow distribution, if any.
        uid: the user that runs the image.
    """

    imports: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    tensorflow: str | None = None
    uid: int = BATON_USER


EXPECTED = {
    "checkpoint": Content(
        imports=(
            "baton.tasks.checkpoint_to_gcs.stage",
            "baton.flows.stage_process",
            "baton.flows.train",
            "baton.flows.with_prefect.stage_flows",
            "gcsfs",
            "baton.flows.commands.main",
        ),
        lacks=("keras", "numpy", "h5py", "scikit-learn", "tensorboard"),
    ),
    "train-cpu": Content(imports=FLOWS, lacks=("scikit-learn",), tensorflow="tensorflow-cpu"),
    "train-gpu": Content(imports=FLOWS, lacks=("scikit-learn",), tensorflow="tensorflow"),
    "train-tpu": Content(imports=FLOWS, lacks=("scikit-learn",), tensorflow="tensorflow-tpu", uid=0),
    "prepare-data": Content(
        imports=("baton.tasks.prepare_data.stage", "sklearn.datasets", "tensorflow"),
        tensorflow="tensorflow-cpu",
    ),
    "evaluate": Content(
        imports=("baton.tasks.evaluate.stage", "baton.tasks.evaluate.report.page"),
        lacks=("scikit-learn",),
        tensorflow="tensorflow-cpu",
    ),
    "orchestrator": Content(
        imports=("baton.tasks.evaluate.report.page", "baton.flows.with_prefect.run_flows", "gcsfs"),
        lacks=("keras", "h5py", "scikit-learn", "tensorboard"),
    ),
}
OTHERS = pytest.mark.skipif(os.environ.get("BATON_TEST_IMAGES") != "all", reason="BATON_TEST_IMAGES is not all")


def probed(engine: Engine, image: str, *imports: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the output of probe.py in an image."""
    mounted = ["--volume", f"{PROBE}:/probe.py:ro", "--network", "none", *options]
    done = engine.run(image, "python", "/probe.py", *imports, options=mounted)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "image", [name if name in {"checkpoint", "train-cpu"} else pytest.param(name, marks=OTHERS) for name in EXPECTED]
)
def test_image_holds_only_what_its_stage_needs(engine: Engine, image: str) -> None:
    expected = EXPECTED[image]
    built = engine.build(image)
    # Without a TPU, libtpu would wait for the metadata server of a TPU VM.
    options = ["--env", "PJRT_DEVICE=CPU", "--env", "TPU_SKIP_MDS_QUERY=1"] if image == "train-tpu" else []
    found = probed(engine, built, *expected.imports, options=options)

    assert found["imports"] == dict.fromkeys(expected.imports, "")
    held = set(found["distributions"])
    assert {"baton-relay", "prefect", "gcsfs"} <= held
    assert held & TENSORFLOW == ({expected.tensorflow} if expected.tensorflow else set())
    assert not held & {"pip", "pytest", *expected.lacks}
    assert found["programs"]["baton"] == "/opt/baton/bin/baton"
    assert found["programs"]["prefect"] == "/opt/venv/bin/prefect"
    assert not any(found["programs"][name] for name in ("gcc", "cc", "make", "git"))
    assert probed(engine, built, options=["--user", "root"])["leftovers"] == []
    assert found["bytecode"]
    assert found["prefix"] == "/opt/venv"
    assert found["folder"] == "/opt/baton"
    assert found["uid"] == expected.uid
    if expected.uid:
        assert found["writable"] == ["/code", "/home/baton"]


@OTHERS
def test_tpu_image_names_its_libtpu(engine: Engine) -> None:
    built = engine.build("train-tpu")
    found = probed(engine, built)
    assert found["libtpu"] == found["environment"]["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"]
    assert found["environment"]["PJRT_DEVICE"] == "TPU"
    assert found["environment"]["NEXT_PLUGGABLE_DEVICE_USE_C_API"] == "true"
    engine.run(built, "test", "-s", found["libtpu"])


def test_code_change_rebuilds_one_layer_and_the_label(engine: Engine, tmp_path: Path) -> None:
    before = engine.inspect(engine.build("checkpoint"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".dockerignore"):
        shutil.copy(CHECKOUT / name, tmp_path)
    for name in ("containers", "flows", "tasks"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "flows" / "relay.py").open("a", encoding="utf-8") as code:
        code.write("\nCHANGED = True\n")

    changed = engine.build("checkpoint", context=tmp_path, revision="0123abc")
    after = engine.inspect(changed)
    assert after["RootFS"]["Layers"][:-1] == before["RootFS"]["Layers"][:-1]
    assert after["RootFS"]["Layers"][-1] != before["RootFS"]["Layers"][-1]
    labels = after["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == "0123abc"
    assert labels["org.opencontainers.image.version"] == "1.0.0rc1"
    assert labels["org.opencontainers.image.title"] == "baton/checkpoint"
    done = engine.run(
        changed, "grep", "-c", "CHANGED", "/opt/baton/baton/flows/relay.py", options=["--network", "none"]
    )
    assert done.stdout.strip() == "1"


def test_baton_command_works_in_an_image(engine: Engine) -> None:
    image = engine.build("checkpoint")
    options = ["--network", "none"]
    assert "Commands:" in engine.run(image, options=options).stdout  # the default command of the image
    refused = engine.run(image, "baton", "status", "/code/run.yaml", options=options, check=False)
    assert refused.returncode == 2, refused.stderr


def test_docker_api_runs_an_image(engine: Engine) -> None:
    image = engine.build("checkpoint")
    with engine.serving() as address:
        client = docker.DockerClient(base_url=address)
        try:
            output = client.containers.run(image, ["baton", "--version"], network_mode="host", remove=True)
        finally:
            client.close()
    assert output == b"baton 1.0.0rc1\n"


WITH_HANDLER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("stopping", flush=True), sys.exit(7)))
print("ready", flush=True)
time.sleep(3600)
"""
WITHOUT_HANDLER = "import time; print('ready', flush=True); time.sleep(3600)"


@pytest.mark.parametrize(
    ("program", "code", "last_line"),
    [
        pytest.param(WITH_HANDLER, 7, "stopping", id="handler"),
        # As process 1 it would ignore the signal. Tini is process 1, so a program that still imports stops too.
        pytest.param(WITHOUT_HANDLER, 128 + 15, "ready", id="no handler"),
    ],
)
def test_sigterm_reaches_the_program(engine: Engine, program: str, code: int, last_line: str) -> None:
    image = engine.build("checkpoint")
    with engine.started(image, "python", "-c", program, options=["--network", "none"]) as container:
        wait_for(engine, container, "ready")
        engine.podman("kill", "--signal", "TERM", container)
        assert int(engine.podman("wait", container, timeout=300).stdout) == code
        assert engine.podman("logs", container).stdout.splitlines()[-1] == last_line


def wait_for(engine: Engine, container: str, word: str) -> None:
    deadline = time.monotonic() + 300
    while word not in engine.podman("logs", container).stdout:
        assert time.monotonic() < deadline, f"the container never printed {word}"
        time.sleep(0.2)


MODEL = """
import keras


def build_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
DATA = """
def load():
    for number in range(60):
        yield [number / 60] * 4, number % 3
"""
RUN = """
run: own
storage: /home/baton/runs
data: {source: data.py:load}
model: model.py:build_model
train: {steps: 400, global_batch_size: 10, log_every_steps: 1}
accelerator: {kind: cpu}
"""
BUILDS = """
from pathlib import Path
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.user_functions import load_function
run = load_run_file(Path("/code/run.yaml"), [])
print(run.spec.run, load_function("model.py:build_model", Path("/code"))().count_params())
"""


@pytest.fixture
def user_code(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("run.yaml", RUN)):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def mounted(engine: Engine, image: str, folder: Path, *command: str) -> Any:
    return engine.run(image, *command, options=["--network", "none", "--volume", f"{folder}:/code:ro"])


def copied(engine: Engine, image: str, folder: Path, *command: str) -> Any:
    container = engine.podman("create", "--pull=never", "--network", "none", image, *command).stdout.strip()
    try:
        engine.podman("cp", f"{folder}/.", f"{container}:/code")
        return engine.podman("start", "--attach", container)
    finally:
        engine.podman("rm", "--force", container)


def built_in(engine: Engine, image: str, folder: Path, *command: str) -> Any:
    (folder / "Dockerfile").write_text(f"FROM {image}\nCOPY . /code\n", encoding="utf-8")
    mine = engine.derive("baton-tests/mine:latest", folder)
    try:
        return engine.run(mine, *command, options=["--network", "none"])
    finally:
        engine.podman("rmi", mine)


@pytest.mark.nightly
def test_mounted_user_code_trains(engine: Engine, user_code: Path) -> None:
    image = engine.build("train-cpu")
    train = ["python", "-m", "baton.flows.train", "/code/run.yaml", "--set", "train.steps=2"]
    result = json.loads(mounted(engine, image, user_code, *train).stdout.splitlines()[-1])
    assert result["run"] == "own"
    assert result["step"] == 2
    assert len(result["state_digest"]) > 10


@pytest.mark.parametrize("add_code", [pytest.param(copied, marks=pytest.mark.nightly), built_in])
def test_copied_user_code_is_loaded(engine: Engine, user_code: Path, add_code: Callable[..., Any]) -> None:
    image = engine.build("train-cpu")
    assert add_code(engine, image, user_code, "python", "-c", BUILDS).stdout.splitlines()[-1] == "own 15"
