"""deploy/slurm.sh under stand-ins for Slurm's commands: what it starts, and which ends queue the job again."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton.tasks.foundation.machine.cluster import Cluster, cluster_of
from tests.support.checkout import CHECKOUT
from tests.support.homes import head_of
from tests.support.shipped_runs import SHORT, run_file
from tests.support.worker_processes import THREADS, free_addresses

SCRIPT = CHECKOUT / "deploy" / "slurm.sh"
NODES = 2
# Starts the command once for each node, as srun does, and ends with the highest exit code.
SRUN = f"""
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
step = {{"SLURM_STEP_NODELIST": "n[08-09]", "SLURM_STEP_NUM_TASKS": "{NODES}"}}
tasks = [
    subprocess.Popen(words, env=os.environ | step | {{"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}})
    for node in range({NODES})
]
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = "import sys; print('scontrol', *sys.argv[1:])"
BATON = "import sys; from baton.flows.commands.main import main; sys.exit(main())"
WITHOUT_PREFECT = "import sys; from baton.flows.train import main; sys.exit(main(sys.argv[2:]))"

Batch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Runs the script as Slurm does."""

    def run(*words: str, baton: str = BATON, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        bin_ = tmp_path / "bin"
        bin_.mkdir(exist_ok=True)
        for name, code in (("srun", SRUN), ("scontrol", SCONTROL), ("baton", baton)):
            (bin_ / name).write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
            (bin_ / name).chmod(0o755)
        own = {
            "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "n[08-09]",
        }
        command = ["bash", str(SCRIPT), *words]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **own, **(env or {})}, capture_output=True, text=True, check=False
        )

    return run


def options() -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(lines)


def test_job_is_one_process_a_node_that_is_told_before_its_end() -> None:
    found = options()
    assert found["ntasks-per-node"] == "1"
    assert found["signal"] == "TERM@60"  # "B:" would tell only the script
    assert {"exclusive", "requeue"} <= found.keys()
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]  # sbatch stops reading at a command


def test_every_node_gets_its_place_and_the_words_of_the_job(batch: Batch) -> None:
    # One write, which the other node's cannot tear.
    said = r"sys.stdout.write(' '.join(sys.argv[1:]) + '\n'); sys.stdout.flush()"
    code = f"import sys; from baton.flows.commands.main import main; {said}; sys.exit(main(['hosts']))"
    done = batch("my run.yaml", "--set", "train.steps=5", baton=code)
    assert done.returncode == 0, done.stderr
    words = "run my run.yaml --set train.steps=5 --set accelerator.kind=multi_worker"
    configs = [line for line in done.stdout.splitlines() if line != words]
    assert len(done.stdout.splitlines()) - len(configs) == NODES
    addresses = ("n08:2222", "n09:2222")
    places = sorted((cluster_of({"TF_CONFIG": config}) for config in configs), key=lambda cluster: cluster.host)
    assert places == [Cluster(addresses, host) for host in range(NODES)]


@pytest.mark.parametrize(
    ("codes", "code", "again"),
    [
        ((0, 0), 0, False),
        ((1, 1), 1, False),
        ((2, 2), 2, False),
        ((3, 3), 3, True),
        ((3, 4), 4, False),
        ((3, -9), 137, True),  # of a process that was killed, the others leave with 3
    ],
)
def test_work_that_is_left_is_queued_again(batch: Batch, codes: Sequence[int], code: int, again: bool) -> None:
    ends = f"import os, sys\ncode = {list(codes)}[int(os.environ['SLURM_NODEID'])]\n"
    done = batch(baton=f"{ends}os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)")
    assert done.returncode == code
    assert ("scontrol requeue 4711\n" in done.stdout) == again


@pytest.mark.slow
def test_digits_that_a_time_limit_cuts_are_queued_again(batch: Batch, tmp_path: Path) -> None:
    """Two nodes train one segment, and their exit code is of work that is left."""
    settings = [*SHORT["digits"], *THREADS, "train.segment_steps=30", "run=digits", f"storage={tmp_path / 'runs'}"]
    settings.append("evaluate.every_steps=60")  # a segment ends at an evaluation
    words = [str(run_file("digits")), "--max-segments=1", *(f"--set={setting}" for setting in settings)]
    # Two nodes of one machine need two ports.
    here = {"BATON_HOSTS": ",".join(free_addresses(NODES))}
    done = batch(*words, baton=WITHOUT_PREFECT, env=here)
    assert done.returncode == 3, done.stderr
    assert "scontrol requeue 4711" in done.stdout
    head = head_of(tmp_path / "runs" / "digits")
    assert head is not None
    assert head.tip is not None
    assert (head.tip.step, head.environment.hosts) == (30, NODES)
