"""Records a run that is killed and goes on, as an animated picture for the README.

    python deploy/pictures/record.py            writes deploy/pictures/recording.svg

The lines are what `baton run` printed, at the seconds at which it printed them; only the scratch folder's path is
shown as ~. The first command is killed with SIGKILL after its second commit. Needs the environment of `make install`,
and about a minute.
"""

import contextlib
import html
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("recording.svg")
COLUMNS = 110
KILLED_AFTER_COMMITS = 2
# Fewer rows of metrics than in the shipped run file, so that the whole fits into a picture.
OPTIONS = ("--set", "train.log_every_steps=200")
TYPED = f"baton run run.yaml {' '.join(OPTIONS)}"

_CHARACTER, _LINE, _MARGIN = 7.2, 17, 16
_LASTS_AFTER_THE_END = 6.0
# The first frame is the end: a viewer that shows no motion shows the result, and so do all others for a moment.
_SHOWN_AT_FIRST = 2.0
_PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="what">
<title id="what">baton run is killed after its second commit; the same command goes on from there to the end</title>
<style>
rect {{ fill: #0d1117 }}
text {{ font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; fill: #d1d7e0 }}
.typed {{ fill: #4ac26b; font-weight: 600 }}
.killed {{ fill: #ff7b72; font-weight: 600 }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none !important }} }}
{moments}
</style>
<rect width="{width}" height="{height}" rx="8"/>
{rows}
</svg>
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the recording, and the second at which it appeared."""

    second: float
    text: str
    kind: str  # typed, printed or killed


def record() -> list[Line]:
    """Run the digits, kill the process, run them again.

    Raises:
        RuntimeError: a command did not end as it should.
    """
    with tempfile.TemporaryDirectory(prefix="baton-recording-") as name:
        home = Path(name)
        folder = home / "digits"
        shutil.copytree(CHECKOUT / "deploy" / "runs" / "digits", folder, ignore=shutil.ignore_patterns("runs", "*.pyc"))
        began = time.monotonic()
        lines: list[Line] = []
        commits = 0

        def printed(text: str, pause: float = 0.0) -> Line:
            return Line(time.monotonic() - began + pause, text.rstrip().replace(str(home), "~"), "printed")

        with _running(folder, home) as process:
            lines.append(Line(0.0, f"$ {TYPED}", "typed"))
            for text in process.stdout or ():
                lines.append(printed(text))
                commits += "  committed  " in text
                if commits == KILLED_AFTER_COMMITS:
                    _kill_with_trainer(process.pid)
                    break
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the first command ended with {process.returncode}")
        lines.append(Line(time.monotonic() - began, "Killed", "killed"))
        lines.append(Line(time.monotonic() - began + 1.0, f"$ {TYPED}", "typed"))
        with _running(folder, home) as process:
            lines += [printed(text, pause=1.0) for text in process.stdout or ()]
        if process.returncode != 0:
            raise RuntimeError(f"the second command ended with {process.returncode}")
        return lines


@contextlib.contextmanager
def _running(folder: Path, home: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {
        "COLUMNS": str(COLUMNS),
        "PREFECT_HOME": str(home / ".prefect"),
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "baton.flows.commands.main", "run", "run.yaml", *OPTIONS]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _kill_with_trainer(command: int) -> None:
    """Kill the command and the processes that it has started, as a lost machine does."""
    children = Path(f"/proc/{command}/task/{command}/children").read_text().split()
    for pid in (command, *map(int, children)):
        os.kill(pid, signal.SIGKILL)


def drawn(lines: list[Line]) -> str:
    """Draw lines as an SVG that shows all of them, then each one at its second; it begins again at the end."""
    shown = [(line, text) for line in lines for text in _folded(line.text)]
    height = _MARGIN * 2 + _LINE * len(shown) + 8
    width = round(_MARGIN * 2 + _CHARACTER * COLUMNS)
    lasts = _SHOWN_AT_FIRST + lines[-1].second + _LASTS_AFTER_THE_END
    hidden = 100 * _SHOWN_AT_FIRST / lasts
    rows, moments = [], []
    for number, (line, text) in enumerate(shown):
        seen = hidden + 0.1 + 100 * line.second / lasts
        at_first, unseen = f"0%,{hidden:.2f}%{{opacity:1}}", f"{hidden + 0.05:.2f}%,{seen:.2f}%{{opacity:0}}"
        moments.append(f"@keyframes l{number}{{{at_first}{unseen}{seen + 0.05:.2f}%,100%{{opacity:1}}}}")
        rows.append(
            f'<text class="{line.kind}" x="{_MARGIN}" y="{_MARGIN + _LINE * (number + 1)}" '
            f'style="animation:l{number} {lasts:.1f}s linear infinite">{html.escape(text)}</text>'
        )
    return _PICTURE.format(width=width, height=height, moments="\n".join(moments), rows="\n".join(rows))


def _folded(text: str) -> list[str]:
    """Cut a line at the picture's width, as a terminal does."""
    return [text[begin : begin + COLUMNS] for begin in range(0, len(text), COLUMNS)] or [""]


if __name__ == "__main__":
    PICTURE.write_text(drawn(record()), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}\n")
