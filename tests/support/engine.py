"""A container engine for tests: podman with its own storage, a base image without a registry, Baton's images.

    engine = engine_or_skip()
    image = engine.build("checkpoint")     # localhost/baton/checkpoint:<digest of the files that make it>
    done = engine.run(image, "baton", "--version")
    with engine.serving() as address:      # DOCKER_HOST for docker-py, or for Prefect's docker worker
        ...

Slow results (Debian's base, layers with TensorFlow) are cached in `${XDG_CACHE_HOME:-~/.cache}/baton-tests`. The folder
may be deleted after `umount` of its storage/overlay. Several processes may build at once. Use the full names of images:
podman's Docker API looks for a name without "localhost/" in Docker's registry.
"""

import ast
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.checkout import CHECKOUT

REQUIRED = "BATON_TEST_CONTAINERS"  # = required: tests that find no engine fail instead of being skipped
BASE = "BATON_TEST_BASE_IMAGE"  # an image to start from, where a registry can be reached
_LONGEST_SECONDS = 3600
_SUITE = "bookworm"
_PACKAGES = "ca-certificates,python3-minimal,python3-pip,python3-venv"
_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
netns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


class NoEngine(RuntimeError):
    """The container engine or its requirements are missing."""


class EngineFailed(AssertionError):
    """A command of the engine failed; the text ends with its output."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Podman, set up for tests.

    Attributes:
        folder: the cache: configuration, storage, Debian's base.
        environment: environment variables of podman.
        base: the image that Baton's are built from.
    """

    folder: Path
    environment: dict[str, str]
    base: str

    def podman(
        self, *words: str, check: bool = True, timeout: float = _LONGEST_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run `podman WORDS`.

        Raises:
            EngineFailed: it ended with another code than 0, and `check` is set.
        """
        command = ["podman", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise EngineFailed(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return done

    def build(self, image: str, *, context: Path = CHECKOUT, revision: str | None = None) -> str:
        """Build one of Baton's images unless the same files built it before; returns its full name.

        Args:
            image: such as "train-cpu".
            context: the checkout to build from.
            revision: for the label; None: the checkout's commit at the first build.
        """
        tag = "-".join(filter(None, (_digest_of(context, self.base), revision)))
        name = f"localhost/baton/{image}:{tag}"
        with _locked(self.folder / f"{image}.lock"):
            if self.podman("image", "exists", name, check=False).returncode:
                command = [sys.executable, str(context / "containers" / "build.py"), image, "--tag", tag]
                command += ["--base", self.base, *(["--revision", revision] if revision else [])]
                _call([*command, "--", *_machine_options(self.folder)], self.environment)
        return name

    def derive(self, name: str, folder: Path) -> str:
        """Build a folder with a Dockerfile, without network; returns the full name."""
        tag = f"localhost/{name}"
        self.podman("build", "--network", "none", "--pull=never", "--tag", tag, str(folder))
        return tag

    def run(
        self, image: str, *command: str, options: Sequence[str] = (), check: bool = True, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a new container and wait for it; `options` are those of `podman run`.

        Raises:
            EngineFailed: it ended with another code than 0, and `check` is set.
        """
        return self.podman("run", "--rm", "--pull=never", *options, image, *command, check=check, timeout=timeout)

    @contextmanager
    def started(self, image: str, *command: str, options: Sequence[str] = ()) -> Iterator[str]:
        """Start a container and remove it afterwards; yields its id."""
        container = self.podman("run", "--detach", "--pull=never", *options, image, *command).stdout.strip()
        try:
            yield container
        finally:
            self.podman("rm", "--force", "--time", "0", container, check=False)

    def inspect(self, image: str) -> dict[str, Any]:
        """The output of `podman image inspect`."""
        found: list[dict[str, Any]] = json.loads(self.podman("image", "inspect", image).stdout)
        return found[0]

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve the Docker API during the block; yields a value for DOCKER_HOST.

        The caller removes containers that it starts through this API.
        """
        socket = self.folder / f"api-{os.getpid()}.sock"
        address = f"unix://{socket}"
        log = socket.with_suffix(".log")
        with log.open("wb") as written:
            command = ["podman", "system", "service", "--time=0", address]
            process = subprocess.Popen(command, env=self.environment, stdout=written, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 180
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise EngineFailed(f"podman serves no API: {log.read_text(errors='replace')}")
                time.sleep(0.05)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)
            socket.unlink(missing_ok=True)
            log.unlink(missing_ok=True)


def engine_or_skip() -> Engine:
    """The engine. Without one the test is skipped, or fails if BATON_TEST_CONTAINERS=required."""
    try:
        return find_engine()
    except NoEngine as why:
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{REQUIRED}=required, and there is no container engine: {why}")
        pytest.skip(f"no container engine: {why}")


def find_engine() -> Engine:
    """Set podman up, with its base image.

    Raises:
        NoEngine: programs or rights are missing; `.ci/engine` installs them.
    """
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if missing:
        raise NoEngine(f"{' and '.join(missing)} not found; .ci/engine installs what is needed")
    if os.geteuid() != 0:
        raise NoEngine("these tests need root, to make a base image and to run containers without a systemd session")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-tests"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "engine.lock"):
        environment = os.environ | _configuration(folder)
        base = os.environ.get(BASE) or _base_image(folder, environment)
    return Engine(folder=folder, environment=environment, base=base)


def _configuration(folder: Path) -> dict[str, str]:
    conf, storage = folder / "containers.conf", folder / "storage.conf"
    conf.write_text(_CONTAINERS_CONF, encoding="utf-8")
    lines = ["[storage]", 'driver = "overlay"', f'graphroot = "{folder}/storage"', f'runroot = "{folder}/run"']
    storage.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return {"CONTAINERS_CONF": str(conf), "CONTAINERS_STORAGE_CONF": str(storage)}


def _base_image(folder: Path, environment: dict[str, str]) -> str:
    """Debian with its Python 3.11, built once."""
    name = f"localhost/baton-base:{_SUITE}"
    exists = ["podman", "image", "exists", name]
    if subprocess.run(exists, env=environment, check=False, capture_output=True).returncode == 0:
        return name
    tarball = folder / f"{_SUITE}.tar"
    if not tarball.exists():
        if shutil.which("debootstrap") is None:
            raise NoEngine(f"debootstrap not found, and {BASE} names no base image; .ci/engine installs it")
        root, partial = folder / "debootstrap", folder / "partial.tar"
        shutil.rmtree(root, ignore_errors=True)  # from an interrupted build
        command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(root), *_mirror()]
        _call(command, environment)
        left_out = ["--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*"]
        _call(["tar", "--create", "--file", str(partial), "--directory", str(root), *left_out, "."], environment)
        partial.rename(tarball)
        shutil.rmtree(root)
    _call(["podman", "import", "--quiet", str(tarball), name], environment)
    return name


def _mirror() -> list[str]:
    """The mirror of this machine's apt sources; empty if not found, and debootstrap uses its default."""
    sources = Path("/etc/apt")
    files = [sources / "sources.list", *sorted((sources / "sources.list.d").glob("*"))]
    lines = [line for file in files if file.is_file() for line in file.read_text(encoding="utf-8").splitlines()]
    found = [
        match[0]
        for line in lines
        if not line.startswith("#")
        for match in re.findall(r"(https?://\S+/debian)(/|\s|$)", line)
    ]
    return found[:1]


def _machine_options(folder: Path) -> list[str]:
    """Options of `build` that mount this machine's certificates and pip configuration read-only."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings = {
        key.rpartition(".")[2]: str(ast.literal_eval(value))
        for key, _, value in (line.partition("=") for line in listed.splitlines())
    }
    certificates = settings.get("cert") or os.environ.get("SSL_CERT_FILE")
    if certificates:
        settings["cert"] = certificates
    conf = folder / "pip.conf"
    # Replaced atomically: another process may read it.
    partial = folder / f"pip.conf.{os.getpid()}"
    text = "".join(f"{key} = {' '.join(value.split())}\n" for key, value in settings.items())
    partial.write_text(f"[global]\n{text}", encoding="utf-8")
    partial.rename(conf)
    lent = sorted({path for value in settings.values() for word in value.split() for path in _local(word)})
    volumes = [f"{conf}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in lent)]
    return ["--network", "host", *(word for volume in volumes for word in ("--volume", volume))]


def _local(word: str) -> Iterator[str]:
    """The local file or folder that a pip setting names, if any."""
    path = Path(urlsplit(word).path if word.startswith("file:") else word)
    if path.is_absolute() and path.exists():
        # A local index links to files beside it.
        yield str(path.parent if path.name == "simple" else path)


def _digest_of(context: Path, base: str) -> str:
    """A digest of all files that images are built from."""
    digest = hashlib.sha256(f"{base}\n".encode())
    names = ("pyproject.toml", "README.md", "LICENSE", ".dockerignore", "containers/Dockerfile", "containers/build.py")
    files = [context / name for name in names]
    for folder, pattern in (("containers/locks", "*.lock"), ("flows", "*.py"), ("tasks", "*.py")):
        files += sorted((context / folder).rglob(pattern))
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(context)} {content}\n".encode())
    return digest.hexdigest()[:16]


def _call(command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise EngineFailed(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-6000:]}")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it when the process ends."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
