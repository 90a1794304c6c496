"""Where the arms find their Python: checkouts of Baton, and an environment of their own for the peers."""

import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import CHECKOUT

# Orbit is a part of tf-models-official. It imports tf_keras, and uses none of its models.
_PACKAGES = ("tf-models-official==2.19.1", "tf-keras==2.19.0")
_PEERS = Path(__file__).resolve().parent / "peers"
_SERVER_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Baton:
    """A checkout of Baton that is measured.

    Attributes:
        label: "" for this checkout; shown in the names of its arms.
        checkout: its folder, with a `.venv`.
        prefect_home: of its flow runs.
    """

    label: str
    checkout: Path
    prefect_home: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        own = self.checkout / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def name(self, arm: str) -> str:
        """An arm's name in the table."""
        return f"{arm} ({self.label})" if self.label else arm

    def run(self, file: Path, *words: str) -> tuple[str, ...]:
        """The command `baton run`."""
        return (self.python, "-m", "baton.flows.commands.main", "run", str(file), *words)

    def without_prefect(self, file: Path, *words: str) -> tuple[str, ...]:
        """Training without Prefect."""
        return (self.python, "-m", "baton.flows.train", str(file), *words)

    def script(self, file: Path, *words: str) -> tuple[str, ...]:
        """A script that imports Baton's stages."""
        return (self.python, "-P", str(file), *words)

    def environment(self, api: str = "") -> dict[str, str]:
        """Variables of its processes.

        Args:
            api: address of a running Prefect server; "": the embedded one.
        """
        return {
            "PYTHONPATH": str(self.checkout),
            "PREFECT_HOME": str(self.prefect_home),
            "PREFECT_API_URL": api,
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
            "PREFECT_PROFILES_PATH": str(self.prefect_home / "profiles.toml"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }


def peer_command(python: str, script: str, settings: str, *words: str) -> tuple[str, ...]:
    """The command of a peer in `peers/`."""
    return (python, str(_PEERS / f"{script}.py"), settings, *words)


def peer_python(folder: Path = CHECKOUT / ".bench" / "peers") -> str:
    """The interpreter of the peers; their environment is made at first use.

    It sees this environment's packages, so that all arms have the same TensorFlow and Keras, and adds Orbit.
    """
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = "\n".join((*_PACKAGES, sysconfig.get_path("purelib")))
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run((sys.executable, "-m", "venv", "--clear", str(folder)), check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "baton-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.run((*install, *_PACKAGES), check=True)
    stamp.write_text(wanted)
    return str(python)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def prefect_server(baton: Baton, home: Path, port: int) -> Iterator[str]:
    """A Prefect server in another process, and the address of its API."""
    environment = {**os.environ, **baton.environment(), "PREFECT_HOME": str(home), "PREFECT_LOGGING_LEVEL": "ERROR"}
    del environment["PREFECT_API_URL"]
    home.mkdir(parents=True, exist_ok=True)
    log = (home / "server.txt").open("wb")
    command = (baton.python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    api = f"http://127.0.0.1:{port}/api"
    try:
        _wait_for(f"{api}/health", server)
        yield api
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SERVER_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=2):  # noqa: S310 - loopback
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    raise RuntimeError(f"{address}: the Prefect server does not start; its log is server.txt in its home")
