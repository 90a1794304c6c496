"""The report shows the run file and the code of the home, and what accepted changes did to them."""

import os
import subprocess
from pathlib import Path
from typing import Any

from baton.tasks.evaluate.report.page import write_report
from baton.tasks.foundation.contracts.home_files import LayerSummary, ModelSummary
from baton.tasks.foundation.contracts.log_entry import Change, Origin
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.model.saved_code import save_code
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.small_logs import ENVIRONMENT


def git(folder: Path, *words: str) -> str:
    """Run Git without the settings of this machine."""
    empty = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *named, "-C", str(folder), *words],  # noqa: S607 - git is where it is
        env=os.environ | empty,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def spec_of_model(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "a",
            "storage": "b",
            "data": {"source": "digits"},
            "model": {"build": "model.py:build_model"},
            "train": {"steps": 123, "global_batch_size": 8},
            **changes,
        }
    )


def test_run_file_and_code_of_the_home_are_shown(tmp_path: Path) -> None:
    home, log = LocalStorage(tmp_path / "home"), RunLog(LocalStorage(tmp_path / "home"))
    (tmp_path / "model.py").write_text("def build_model():\n    return '</pre><b>'\n")
    identity = save_code(home, spec_of_model(), tmp_path)
    log.append(lambda _: Origin(identity=identity, environment=ENVIRONMENT), attempt="a" * 32)
    write_report(log, title="x")
    page = home.read("report/index.html").decode()
    assert (
        "<summary>model.py</summary><pre>def build_model():\n    return &#39;&lt;/pre&gt;&lt;b&gt;&#39;\n</pre>" in page
    )
    assert "steps: 123" in page
    assert "Run file and code" in page
    assert "Git revision" not in page
    assert "<h2>Model</h2>" not in page
    assert "What accepted changes changed" not in page


def test_git_revision_and_accepted_changes_of_code_are_shown(tmp_path: Path) -> None:
    home, log = LocalStorage(tmp_path / "home"), RunLog(LocalStorage(tmp_path / "home"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "model.py").write_text("def build_model():\n    return 1\n")
    git(code, "init", "--quiet")
    git(code, "add", "model.py")
    git(code, "commit", "--quiet", "--message", "first")
    commit_hash = git(code, "rev-parse", "HEAD")
    (code / "notes.txt").write_text("no part of the code")
    first = save_code(home, spec_of_model(), code)
    log.append(lambda _: Origin(identity=first, environment=ENVIRONMENT), attempt="a" * 32)
    write_report(log, title="x")
    assert f"Git revision {commit_hash[:12]}." in home.read("report/index.html").decode()
    (code / "model.py").write_text("def build_model():\n    return '<i>'\n")
    changed = save_code(home, spec_of_model(train={"steps": 123, "global_batch_size": 16}), code)
    body = Change(environment=ENVIRONMENT, identity=changed, accepted=("model.code",))
    log.append(lambda _: body, attempt="a" * 32)
    write_report(log, title="x")
    page = home.read("report/index.html").decode()
    assert f"Git revision {commit_hash[:12]}, with changes that are not committed." in page
    assert "<summary>entry 1, from step 0 on: model.py</summary>" in page
    assert "-    return 1\n+    return &#39;&lt;i&gt;&#39;" in page
    assert "<summary>entry 1, from step 0 on: run file, all keys</summary>" in page
    assert "-  global_batch_size: 8\n+  global_batch_size: 16" in page


def test_model_is_shown_and_escaped(tmp_path: Path) -> None:
    home, log = LocalStorage(tmp_path / "home"), RunLog(LocalStorage(tmp_path / "home"))
    layer = LayerSummary(name="<img>", kind="Dense", output_shape="(None, 4)", parameters=1234)
    model = ModelSummary(layers=(layer,) * 502, trainable=1230, frozen=4, optimizer=2470)
    (tmp_path / "model.py").write_text("")
    identity = save_code(home, spec_of_model(), tmp_path, model)
    log.append(lambda _: Origin(identity=identity, environment=ENVIRONMENT), attempt="a" * 32)
    write_report(log, title="x")
    page = home.read("report/index.html").decode()
    assert "<h2>Model</h2>" in page
    assert page.count("&lt;img&gt;") == 500
    assert "<img>" not in page
    assert (
        "2 more layers. 1,234 parameters, 1,230 of them trainable; the optimizer has 2,470 numbers of its own." in page
    )
