"""`baton profile`: a run that is at work is traced and goes on as if it was not; a run that rests is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from baton.flows.commands.main import main
from baton.flows.opened_run import open_run
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun
from tests.support.lab import Lab, lab_of, spec_of

LIMIT_SECONDS = 300.0
MODEL = """
def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


def training(lab: Lab, run: str, *words: str) -> "subprocess.Popen[bytes]":
    spec = spec_of("build", run=run, train__steps=10_000_000, train__segment_steps=500, train__log_every_steps=100)
    file = lab.code / f"{run}.yaml"
    values = spec.model_dump(mode="json", exclude_defaults=True) | {"storage": str(lab.root / "storage")}
    file.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "baton.flows.train", str(file), *words]
    return forked.Popen(
        command, cwd=CHECKOUT, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_profiled_run_has_the_digest_of_one_that_was_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = lab_of(tmp_path, MODEL)
    home, began = lab.storage.at("profiled"), time.monotonic()
    with training(lab, "profiled") as process:
        while not home.exists("log/00000002.json") and time.monotonic() - began < LIMIT_SECONDS:
            time.sleep(0.1)
        code = main(["profile", home.uri, "--steps", "5", "--json"])
        process.send_signal(signal.SIGINT)
    printed = capsys.readouterr()
    assert code == 0, printed
    answer = json.loads(printed.out.splitlines()[-1])
    assert answer["last_step"] == answer["first_step"] + 4
    [trace] = home.files("tensorboard/plugins/profile")
    assert f"{home.uri}/{trace}".startswith(f"{answer['trace']}/")
    tip = open_run(home.uri).require_head().tip
    assert tip is not None
    assert tip.step > answer["last_step"]
    with training(lab, "straight", "--until-step", str(tip.step)) as process:
        assert process.wait() == 0
    straight = open_run(lab.storage.at("straight").uri).require_head().tip
    assert straight is not None
    assert (straight.step, straight.state_digest) == (tip.step, tip.state_digest)


def test_run_without_a_process_at_work_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeRun(tmp_path).train(100)
    assert main(["profile", fake.address]) == 2
    assert "no process is at work, so no step can be traced" in capsys.readouterr().err
    assert not fake.home.exists("profile.json")
