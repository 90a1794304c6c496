"""The locks, the Dockerfile and the build command, without building an image."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.checkout import CHECKOUT

LOCKS = CHECKOUT / "containers" / "locks"
TENSORFLOW = {
    "prepare-data": {"tensorflow-cpu"},
    "train-cpu": {"tensorflow-cpu"},
    "train-gpu": {"tensorflow"},
    "train-tpu": {"tensorflow-tpu"},
    "checkpoint": set(),
    "evaluate": {"tensorflow-cpu"},
    "orchestrator": set(),
}
PIN = re.compile(r"([a-z0-9-]+)==([0-9a-z.+!]+)((?: --hash=sha256:[0-9a-f]{64})*)")
HASHED = ["requirements-hashed.lock", *(f"containers/locks/{image}.lock" for image in ("build", *TENSORFLOW))]
BUILD: dict[str, Any] = runpy.run_path(str(CHECKOUT / "containers" / "build.py"))


def pins(lock: Path) -> dict[str, str]:
    text = re.sub(r" \\\n +", " ", lock.read_text())
    found = [PIN.fullmatch(line) for line in text.splitlines()]
    # Every line is a pin: no options and no URLs. All pins of a file have hashes, or none has.
    assert all(found), lock
    hashed = str(lock.relative_to(CHECKOUT)) in HASHED
    assert {bool(match[3]) for match in found if match} == {hashed}
    return {match[1]: match[2] for match in found if match}


def requirements_of(image: str) -> list[Requirement]:
    """The requirements of an image's file and of the files that it includes."""
    result = []
    for line in (LOCKS / f"{image}.in").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            result += requirements_of(text.removeprefix("-r ").removesuffix(".in"))
        elif text:
            result.append(Requirement(text))
    return result


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined, comments left out."""
    lines = [line for line in (CHECKOUT / "containers/Dockerfile").read_text().splitlines() if "#" not in line[:5]]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def installations() -> list[str]:
    """Every command that installs from a lock: of the Makefile, and of the Dockerfile with the name of the lock."""
    command = ["make", "--dry-run", "--always-make", "install"]
    made = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    found = [line for line in made.replace("\\\n", " ").splitlines() if "--requirement" in line]
    copied = ""
    for word, rest in instructions():
        copied = rest if word == "COPY" else copied
        found += [f"{copied} {rest}"] if word == "RUN" and "--requirement" in rest else []
    return found


def test_images_and_locks_match() -> None:
    assert {file.stem for file in LOCKS.glob("*.lock")} == {*TENSORFLOW, "build"}
    assert set(TENSORFLOW) == set(BUILD["TARGETS"])


def test_hashes_are_of_the_locked_versions() -> None:
    assert pins(CHECKOUT / "requirements-hashed.lock") == pins(CHECKOUT / "requirements.lock")


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """Every installation of a lock demands hashes, and takes no source archive, whose build would download more."""
    found = installations()
    assert all({"--require-hashes", "--only-binary", "--no-deps"} <= set(rest.split()) for rest in found)
    for lock in HASHED:
        assert any(Path(lock).name in rest or "${IMAGE}" in rest for rest in found), lock
        assert pins(CHECKOUT / lock)  # each with its hashes
    name, version = next(iter(pins(CHECKOUT / lock).items()))
    dist = tmp_path / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    dist.write_bytes(b"another file")
    command = [sys.executable, "-m", "pip", "download", "--isolated", "--no-index", "--find-links", str(tmp_path)]
    command += ["--require-hashes", "--no-deps", "--requirement", str(CHECKOUT / lock), "--dest", str(tmp_path / "to")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize("image", TENSORFLOW)
def test_image_has_the_tested_versions(image: str) -> None:
    tested = pins(CHECKOUT / "requirements.lock")
    locked = pins(LOCKS / f"{image}.lock")
    assert {
        name: (version, tested[name]) for name, version in locked.items() if tested.get(name, version) != version
    } == {}
    assert len(locked.keys() & tested.keys()) > 50


@pytest.mark.parametrize("image", TENSORFLOW)
def test_lock_is_compiled_from_its_requirements(image: str) -> None:
    locked = pins(LOCKS / f"{image}.lock")
    requirements = requirements_of(image)
    assert {"prefect", "gcsfs"} <= {requirement.name for requirement in requirements}
    for requirement in requirements:
        assert requirement.specifier.contains(locked[requirement.name]), requirement


@pytest.mark.parametrize(("image", "distributions"), TENSORFLOW.items())
def test_lock_has_one_tensorflow_distribution(image: str, distributions: set[str]) -> None:
    locked = pins(LOCKS / f"{image}.lock")
    known = {"tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-tpu", "tf-nightly", "tensorflow-intel"}
    assert locked.keys() & known == distributions
    assert "tf-keras" not in locked
    if not distributions:
        assert not locked.keys() & {"keras", "tensorboard", "h5py"}
    # The versions that pyproject.toml allows for an installation without an image.
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kind = image.removeprefix("train-") if image.startswith("train-") else "cpu"
    for requirement in map(Requirement, extras[kind] if distributions else []):
        assert requirement.specifier.contains(locked[requirement.name])


@pytest.mark.parametrize("lock", ["requirements.lock", *(f"containers/locks/{image}.lock" for image in TENSORFLOW)])
def test_tensorboard_can_import_setuptools(lock: str) -> None:
    locked = pins(CHECKOUT / lock)
    assert ("tensorboard" in locked) == ("keras" in locked)
    if "tensorboard" in locked:
        assert int(locked["setuptools"].partition(".")[0]) < 82


def test_images_without_tensorflow_stay_small() -> None:
    assert not pins(LOCKS / "checkpoint.lock").keys() & {"numpy", "scikit-learn", "scipy"}
    with_learning = {image for image in TENSORFLOW if "scikit-learn" in pins(LOCKS / f"{image}.lock")}
    assert with_learning == {"prepare-data"}


def test_dockerfile_takes_any_base_and_removes_tools() -> None:
    found = instructions()
    assert found[0] == ("ARG", "BASE_IMAGE=python:3.11-slim-bookworm")
    stages = [rest.partition(" AS ")[::2] for word, rest in found if word == "FROM"]
    names = [name for _, name in stages]
    assert {name: base for base, name in stages}["image"] == "${BASE_IMAGE}"
    assert {base for base, _ in stages} <= {"${BASE_IMAGE}", *names}
    assert set(BUILD["TARGETS"].values()) <= set(names)
    final = found[found.index(("FROM", "${BASE_IMAGE} AS image")) :]
    # The final stage only creates the user and installs wheels. It compiles nothing.
    user, install = [rest for word, rest in final if word == "RUN"]
    assert user.startswith("useradd --uid 10001 ")
    assert {"--no-cache-dir", "--without-pip"} <= set(install.split())
    assert json.loads(next(rest for word, rest in final if word == "ENTRYPOINT"))[0] == "/usr/bin/tini"
    assert [rest for word, rest in final if word == "COPY"][-1] == "--from=code /opt/baton /opt/baton"
    assert [rest for word, rest in final if word == "USER"] == ["10001", "root"]


def test_build_backend_is_the_tested_one() -> None:
    assert pins(LOCKS / "build.lock") == {"setuptools": pins(CHECKOUT / "requirements.lock")["setuptools"]}


def test_build_command_is_a_list_of_arguments() -> None:
    command = BUILD["build_command"](["podman"], "train-tpu", base="a b; c", tag="t", revision="r", options=["--quiet"])
    assert command[:2] == ["podman", "build"]
    assert command[command.index("--target") + 1] == "image-tpu"
    assert command[command.index("--tag") + 1] == "baton/train-tpu:t"
    assert {"BASE_IMAGE=a b; c", "IMAGE=train-tpu", "REVISION=r", "VERSION=1.0.0rc1"} <= set(command)
    assert command[-2:] == ["--quiet", str(CHECKOUT)]
    assert not any(word.startswith("BASE_IMAGE") for word in BUILD["build_command"](["docker"], "checkpoint"))


def test_build_without_engine_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, str(CHECKOUT / "containers/build.py"), "checkpoint"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "apt-get install podman" in done.stderr


def test_unknown_image_is_refused() -> None:
    command = [sys.executable, str(CHECKOUT / "containers/build.py"), "train-gpus"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "train-gpus" in done.stderr
    assert "train-gpu," in done.stderr
