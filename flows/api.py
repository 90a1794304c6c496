"""Baton from Python, as in a notebook: `from flows.api import run, Run`.

    trained = run("run.yaml", train__steps=2000)
    trained.evaluations().frame()
    model = trained.best_model()

Importing it imports neither TensorFlow nor Prefect. It works inside a running event loop, and prints nothing. Its error
messages name parameters where those of the command name options.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.admit import require_lasting_storage
from flows.bare_process import read_process_report, start_bare_process
from flows.facts import RunStatus
from flows.opened_run import OF_API, RunHome, has_own_code, hint_at_other_files, holds_a_log, open_run, saved_run
from flows.opened_run import Run as OpenedRun
from tasks.evaluate.export_target import Form, require_free_target
from tasks.foundation.checkpoint.selection import read_selected, select_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.home_files import SAVED_CODE
from tasks.foundation.contracts.identity import accepted_keys
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import BatonError, InvalidInput
from tasks.foundation.log.history import History, history_of
from tasks.foundation.machine.environment import quiet_tensorflow
from tasks.foundation.messages import message
from tasks.foundation.storage.local_files import temporary_folder
from tasks.foundation.user_code import require_keras_file

if TYPE_CHECKING:
    import keras
    import pandas as pd


_Words = str | Callable[[re.Match[str]], str]
_VALUE = r"[\w.,]*[\w]"
_WORDS: tuple[tuple[str, _Words], ...] = (
    (r"--set ([\w.]+)=", lambda found: f"{found[1].replace('.', '__')}="),
    (r"--(until-step|max-segments|max-seconds)\b", lambda found: found[1].replace("-", "_")),
    (r"--(take-over|try-again|trust-code)\b", lambda found: f"{found[1].replace('-', '_')}=True"),
    (rf"--accept ({_VALUE})", r'accept="\1"'),
    (rf"--format ({_VALUE})", r'form="\1"'),
    (r"--to ", "to="),
    (r"--step ", "step="),
    (r"--run-file FILE", "Run('run.yaml')"),
    # A whole command, whose options are parameters by now.
    (r"baton run (\S+)((?: \w+=[^\s;]+)+)", lambda found: f"run({', '.join([found[1], *found[2].split()])})"),
)


def in_python_words(text: str) -> str:
    """Return a message with the parameters of `flows.api` in place of the options of the command."""
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


@contextmanager
def errors_in_python_words() -> Iterator[None]:
    """Change the messages of errors that are raised inside; also a decorator."""
    try:
        yield
    except BatonError as fault:
        fault.args = tuple(in_python_words(each) if isinstance(each, str) else each for each in fault.args)
        raise


_LINES_SHOWN = 15

Value = float | int | str | None
_Row = tuple[int, dict[str, Value], dict[str, float]]  # the step, what else is known, the metrics


class Rows(list[dict[str, Value]]):
    """Rows of a table, each a dict from column to value; a list in every other respect."""

    def frame(self) -> "pd.DataFrame":
        """Return the rows as a pandas DataFrame, whose index is the step.

        Raises:
            InvalidInput: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as fault:
            raise InvalidInput(
                "pandas is not installed, which a frame needs; install pandas, or use the rows"
            ) from fault
        return pd.DataFrame(list(self)).set_index("step") if self else pd.DataFrame()


class Run:
    """A run that has begun, by its home. Everything but `export` only reads.

    Models are built with the run file and the code that the home has, which the run was trained with, so what was
    edited since does not matter. That code runs unasked only from a home on a local disk that you own. For any other,
    the code of the run file is used, if the run was opened by it; otherwise loading a model is refused, unless
    `trust_code` is true.
    """

    @errors_in_python_words()
    def __init__(self, home: str | os.PathLike[str], *, trust_code: bool = False) -> None:
        """Open a run.

        Args:
            home: the folder or URI of a run's home, <storage>/<run>, or its run file.
            trust_code: run the code that the home has to build models, whoever can have written it.

        Raises:
            NoSuchRun: no run is there.
            InvalidInput: the address or the run file cannot be used.
        """
        self._opened: RunHome = open_run(os.fspath(home))
        self._trust_code = trust_code
        self._code: tuple[str, OpenedRun] | None = None

    @classmethod
    def _of(cls, opened: RunHome) -> "Run":
        run = cls.__new__(cls)
        run._opened, run._trust_code, run._code = opened, False, None
        return run

    def __repr__(self) -> str:
        return f"Run({self.home!r})"

    @property
    def name(self) -> str:
        """The run's name."""
        return self._opened.name

    @property
    def home(self) -> str:
        """The folder or URI of its home."""
        return self._opened.home.uri

    @errors_in_python_words()
    def status(self) -> dict[str, Any]:
        """Return the state of the run: the keys of `baton status --json`."""
        return RunStatus.read(self._opened).json()

    @errors_in_python_words()
    def history(self) -> Rows:
        """Return the rows of the log: step, epoch, learning_rate, what callbacks logged, and the training metrics."""
        history = self._history()
        logged = {each.step: each.values for each in history.logged if each.on == "row"}
        return self._rows(
            [
                (row.step, {"learning_rate": row.learning_rate, **logged.get(row.step, {})}, row.metrics)
                for row in history.rows
            ]
        )

    @errors_in_python_words()
    def evaluations(self) -> Rows:
        """Return the evaluations by step: on (validation or test), examples, what callbacks logged, and the metrics."""
        history = self._history()
        logged = {each.step: each.values for each in history.logged if each.on == "evaluation"}
        validation: list[_Row] = [
            (step, {"on": "validation", "examples": each.examples, **logged.get(step, {})}, each.metrics)
            for each in history.evaluations
            for step in [each.checkpoint.step]
        ]
        test: list[_Row] = [
            (each.checkpoint.step, {"on": "test", "examples": each.examples}, each.metrics) for each in history.tests
        ]
        return self._rows(sorted([*validation, *test], key=lambda row: row[0]))

    def best_model(self) -> "keras.Model":
        """Return the model of the best checkpoint (`checkpoint.keep_best`), see `model`."""
        return self.model("best")

    @errors_in_python_words()
    def model(self, step: int | Literal["best"] | None = None) -> "keras.Model":
        """Build the model and restore a checkpoint into it, with the averages of `use_ema`, as evaluation uses them.

        TensorFlow's devices and settings in this process stay as they are.

        Args:
            step: an absolute step, "best", or None for the newest.

        Returns:
            A compiled model, with the state of its optimizer.

        Raises:
            InvalidInput: the run does not retain such a checkpoint; or its code is not known, or not trusted, or builds
                another model.
            DamagedCheckpoint: the checkpoint differs from its manifest.
        """
        head, run_file = self._with_code(step)
        from tasks.evaluate.export import one_replica_as_it_is, restored_model  # imports TensorFlow

        def read(ref: CheckpointRef) -> "keras.Model":
            device = one_replica_as_it_is(head.environment)
            opened = self._opened
            return restored_model(run_file, head, ref, root=opened.root, home=opened.home, accelerator=device)

        with hint_at_other_files(run_file.path):
            return read_selected(self._opened.home, step, read, error=InvalidInput)

    @errors_in_python_words()
    def export(
        self, to: str | os.PathLike[str], *, form: Form = "keras", step: int | Literal["best"] | None = None
    ) -> Path:
        """Write a checkpoint for plain Keras or TensorFlow, as `baton export` does.

        Args:
            to: the file or folder to write; must not exist.
            form: keras, weights, saved_model or checkpoint.
            step: as for `model`.

        Returns:
            What to load: the file, the folder of a SavedModel, or the prefix of a checkpoint's files.

        Raises:
            InvalidInput: the target cannot be used; or see `model`.
        """
        target = Path(to)
        require_free_target(form, target)
        head, run_file = self._with_code(step)
        from tasks.evaluate.export import (
            export,  # imports TensorFlow
            one_replica_as_it_is,
        )

        def write(ref: CheckpointRef) -> Path:
            root, home, device = self._opened.root, self._opened.home, one_replica_as_it_is(head.environment)
            done = export(run_file, head, ref, root=root, home=home, form=form, target=target, accelerator=device)
            return done.path

        with hint_at_other_files(run_file.path):
            return read_selected(self._opened.home, step, write, error=InvalidInput)

    def _history(self) -> History:
        self._opened.require_head()  # its error names a lost entry
        return history_of(self._opened.log.entries(blocks="read"))

    def _rows(self, rows: list[_Row]) -> Rows:
        epoch = self._opened.log.totals(self._opened.require_newest()).epoch
        return Rows(
            {"step": step, "epoch": None if epoch is None else epoch.after(step), **more, **metrics}
            for step, more, metrics in rows
        )

    def _with_code(self, step: int | Literal["best"] | None) -> tuple[Head, RunFile]:
        """The newest head, and the run file that builds its model."""
        select_checkpoint(self._opened.home, step, error=InvalidInput)  # before TensorFlow is imported
        require_keras_file()
        quiet_tensorflow()
        head = self._opened.require_head()
        saved = head.identity.get(SAVED_CODE)
        opened = self._opened
        uses_home = saved is not None and (self._trust_code or has_own_code(opened, head))
        if isinstance(opened, OpenedRun) and opened.file is not None and not uses_home:
            return head, opened.run_file
        if self._code is None or self._code[0] != saved:
            self._code = (str(saved), saved_run(opened, head, trust_code=self._trust_code, remedies=OF_API))
        return head, self._code[1].run_file


@errors_in_python_words()
def run(
    file: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    max_segments: int | None = None,
    max_seconds: float | None = None,
    accept: str = "",
    try_again: bool = False,
    take_over: bool = False,
    **overrides: object,
) -> Run:
    """Train a run file to its target, or continue it, in a process of its own. Returns when it has ended.

    It does what `baton run` does, without Prefect. An interrupt of the notebook's kernel is a Ctrl-C for the training:
    it commits, and this function raises `KeyboardInterrupt`; called again, it continues.

    Args:
        file: the run file.
        until_step: go to this step, counted from initialization.
        max_segments: stop after this many segments.
        max_seconds: stop after this many seconds, with a last commit.
        accept: accept changes of these identity keys, as "optimizer,data".
        try_again: after a repair: forget the attempts without progress.
        take_over: start even if another process trains the run.
        overrides: changes of the run file: train__steps=5000 sets train.steps, as does **{"train.steps": 5000}.

    Returns:
        The run; its `status()` says how far it went.

    Raises:
        InvalidInput: the run file, an override, the code or the data cannot be used.
        BatonError: the training failed; the class says how.
    """
    changes = tuple(f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items())
    accepted = accepted_keys(accept)
    run_file = load_run_file(Path(file), changes)
    opened = OpenedRun.open(run_file)
    require_lasting_storage(opened)
    options = {"--until-step": until_step, "--max-segments": max_segments, "--max-seconds": max_seconds}
    words = [word for change in changes for word in ("--set", change)]
    words += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words += ["--accept", ",".join(accepted)] if accepted else []
    words += [word for word, given in (("--try-again", try_again), ("--take-over", take_over)) if given]
    _train([os.fspath(run_file.path), *words])
    if not holds_a_log(opened.home):
        raise BatonError(f"{run_file.path}: stopped before the run had a checkpoint; call run again to start it")
    return Run._of(opened)


def _train(words: list[str]) -> None:
    """Run `flows.without_prefect` to its end.

    Raises:
        BatonError: what ended it.
        KeyboardInterrupt: this process was interrupted; the training has committed and ended.
    """
    with temporary_folder("baton-notebook-") as folder:
        report, output = folder / "report.json", folder / "output"
        with output.open("wb") as file:
            # In a group of its own: an interrupt of the terminal reaches it once, from here.
            process = start_bare_process(words, report=report, stdout=file, stderr=file)
            interrupted = _wait(process)
        error = read_process_report(report).error
        if interrupted:
            raise KeyboardInterrupt
        if error is not None:
            raise error.to_error()
        if process.returncode not in {0, 3}:
            tail = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:]
            raise BatonError(message(f"the training ended with exit code {process.returncode}", details=tail))


def _wait(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for the end of a process; pass each interrupt of this process on to it. Returns whether there was one."""
    interrupted = False
    while True:
        try:
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        else:
            return interrupted
