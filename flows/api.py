"""Baton from Python, as in a notebook: `from baton import run, Run`.

    trained = run("run.yaml", train={"steps": 2000})
    trained.evaluations().frame()
    model = trained.best_model()

Importing it imports neither TensorFlow nor Prefect. It works inside a running event loop. While a run trains, a script
prints the lines of the console to standard error, and a notebook shows the newest ones in one output that it updates. A
notebook shows rows as a table and as the report's charts. Error messages name parameters where those of the command
name options.
"""

import base64
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from baton.flows.admit import require_lasting_storage
from baton.flows.facts import RunFacts, RunStatus, best_words
from baton.flows.opened_run import (
    OpenedRun,
    RunHome,
    has_own_code,
    hint_at_other_files,
    holds_a_log,
    open_run,
    saved_run,
)
from baton.flows.supervisor import Trainer, trainer_words
from baton.tasks.evaluate.export_target import Form, form_of, require_free_target, require_runtime
from baton.tasks.foundation.checkpoint.selection import read_selected, select_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.home_files import SAVED_CODE
from baton.tasks.foundation.contracts.identity import accepted_keys
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.errors import BatonError, InvalidInput, errors_worded
from baton.tasks.foundation.keras_config import keras_config, require_keras_file
from baton.tasks.foundation.log.history import History, history_of
from baton.tasks.foundation.machine.environment import kept_environment
from baton.tasks.foundation.machine.stops import RESUMABLE
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import Sink
from baton.tasks.foundation.telemetry.formatting import number_words, step_words
from baton.tasks.foundation.text import Usage, counted, listed

if TYPE_CHECKING:
    import keras
    import pandas as pd

    from baton.tasks.evaluate.report.charts import Curves


_CALLS = {"run-file": 'Run("run.yaml")', "trust-code": "Run(home, trust_code=True)"}


def in_python_words(usage: Usage) -> str:
    """Return a command as a call of a function here, and options as its parameters."""
    words = ['"run.yaml"'] if usage.verb == "run" else []
    words += [_CALLS.get(name) or _parameter(name, value) for name, value in usage.options]
    call = f"{usage.verb}({', '.join(words)})" if usage.verb else ", ".join(words)
    return f"{usage.after}, then {call}" if usage.after else call


def _parameter(name: str, value: object) -> str:
    if name in {"", "set"}:  # a key of the run file, perhaps with its new value as YAML
        key, has_value, text = str(value).partition("=")
        return key.replace(".", "__") + has_value + (_literal(text) if has_value else "")
    name = "form" if name == "format" else name.replace("-", "_")
    words = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return name if value is None else f"{name}={words}"


def _literal(text: str) -> str:
    """A value of YAML in Python; what is abridged stays as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text if text.endswith("…") else json.dumps(text, ensure_ascii=False)
    return text if isinstance(value, str) else repr(value)


@contextmanager
def _process_kept() -> Iterator[None]:
    """Keep the caller's process as it is while the run's model is built in it; imports TensorFlow."""
    with kept_environment(partial(importlib.import_module, "keras")):
        from baton.tasks.foundation.model.build import preserved_process

        with preserved_process():
            yield


Value = float | int | str | None
_Row = tuple[int, dict[str, Value], dict[str, float]]  # the step, what else is known, the metrics
_MOST_ROWS, _MOST_CHARTS = 10, 6  # in a notebook
_NO_METRIC = frozenset({"step", "epoch", "on", "examples", "learning_rate"})


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

    def _repr_html_(self) -> str:
        """What a notebook shows: the first and the last rows, and a chart of each metric."""
        columns = list(dict.fromkeys(name for row in self for name in row))
        half = _MOST_ROWS // 2
        rows = list(map(partial(_cells, columns), self))
        if len(rows) > _MOST_ROWS:
            rows = [*rows[:half], ["…"] * len(columns), *rows[-half:]]
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{table}<p>{counted(len(self), 'row')}</p>{_pictures(self._curves(columns))}"

    def _curves(self, columns: Sequence[str]) -> "Curves":
        from baton.tasks.evaluate.report.charts import Clock, Curves, Line, metric_chart

        charts = []
        for name in columns:
            known = [row for row in self if isinstance(row.get(name), int | float) and "step" in row]
            if name not in _NO_METRIC and known:
                training, validation = (
                    [(int(row["step"] or 0), float(row[name] or 0)) for row in known if row.get("on") == on]
                    for on in (None, "validation")
                )
                charts.append(metric_chart(name, [Line(training=training, validation=validation)]))
        clock = Clock(epochs_per_step=None, segments=())
        return Curves(charts=tuple(chart for chart in charts if chart.curves), clocks=(clock,))


def _cells(columns: Sequence[str], row: Mapping[str, Value]) -> list[str]:
    values = (row.get(name) for name in columns)
    return ["" if each is None else each if isinstance(each, str) else number_words(each) for each in values]


def _pictures(curves: "Curves") -> str:
    """Charts of the report as HTML. Each is an image, so that its style does not reach the notebook's page."""
    from baton.tasks.evaluate.report.charts import pictures_of

    images = []
    for caption, svg in islice(pictures_of(curves), _MOST_CHARTS):
        data = base64.b64encode(svg.encode()).decode()
        images.append(f'<img alt="{escape(caption)}" width="420" src="data:image/svg+xml;base64,{data}">')
    return "".join(images)


class Run:
    """A run that has begun, by its home. Everything but `export` only reads.

    Models are built with the run file and the code that the home has, which the run was trained with, so what was
    edited since does not matter. That code runs unasked only from a home on a local disk that you own. For any other,
    the code of the run file is used, if the run was opened by it; otherwise loading a model is refused, unless
    `trust_code` is true.
    """

    @errors_worded(in_python_words)
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
        with suppress(BatonError):
            facts = self._facts()
            return f"Run({self.home!r}, step={facts.step}, target={facts.target})"
        return f"Run({self.home!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows: how far the run is, and the charts of its report."""
        from baton.tasks.evaluate.report.charts import curves_of

        facts, history = self._facts(), self._history()
        words = "" if facts.head.best is None else f"; best {best_words(facts.head.best)}"
        return (
            f"<p><b>{escape(self.name)}</b>: {step_words(facts.step, facts.target, facts.epoch)}{escape(words)}<br>"
            f"<code>{escape(self.home)}</code></p>{_pictures(curves_of(history, (), None))}"
        )

    @property
    def name(self) -> str:
        """The run's name."""
        return self._opened.name

    @property
    def home(self) -> str:
        """The folder or URI of its home."""
        return self._opened.home.uri

    @property
    @errors_worded(in_python_words)
    def target(self) -> int | None:
        """The step to train to, by the newest commit; by the run file if no commit says it; None if neither does."""
        return self._facts().target

    @errors_worded(in_python_words)
    def status(self) -> dict[str, Any]:
        """Return the state of the run: the keys of `baton status --json`."""
        return RunStatus.read(self._opened).json()

    @errors_worded(in_python_words)
    def history(self) -> Rows:
        """Return the rows of the log: step, epoch, learning_rate, what callbacks logged, and the training metrics.

        As in Keras's TensorBoard callback, learning_rate is what the optimizer uses for the step after the row's.
        """
        history = self._history()
        logged = {each.step: each.values for each in history.logged if each.on == "row"}
        return self._rows(
            [
                (row.step, {"learning_rate": row.learning_rate, **logged.get(row.step, {})}, row.metrics)
                for row in history.rows
            ]
        )

    @errors_worded(in_python_words)
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

    @errors_worded(in_python_words)
    def model(self, step: int | Literal["best"] | None = None) -> "keras.Model":
        """Build the model and restore a checkpoint into it, with the averages of `use_ema`, as evaluation uses them.

        All global state of this process stays as it is: random generators, Keras's and TensorFlow's settings,
        environment variables, warnings, loggers, the import path. The layers keep the dtype policy of the run. If its
        floatx, epsilon or image_data_format are others than here, a warning says how to set them.

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
        with _process_kept(), hint_at_other_files(run_file.path):
            from baton.tasks.evaluate.export import one_replica_as_it_is, restored_model  # imports TensorFlow

            def read(ref: CheckpointRef) -> "keras.Model":
                device = one_replica_as_it_is(head.environment)
                opened = self._opened
                return restored_model(run_file, head, ref, root=opened.root, home=opened.home, accelerator=device)

            model = read_selected(self._opened.home, step, read, error=InvalidInput)
            wanted = keras_config()  # with what the run's code has set
        here = keras_config().model_dump()
        if other := {key: value for key, value in wanted.model_dump().items() if value != here[key]}:
            calls = [f"keras.config.set_{key}({value!r})" for key, value in other.items()]
            warnings.warn(f"the model was trained with another configuration; call {listed(calls)}", stacklevel=3)
        return model

    @errors_worded(in_python_words)
    def export(
        self,
        to: str | os.PathLike[str],
        *,
        form: Form | None = None,
        step: int | Literal["best"] | None = None,
        tolerance: float | None = None,
    ) -> Path:
        """Write a checkpoint for plain Keras or TensorFlow, as `baton export` does; for this process see `model`.

        Args:
            to: the file or folder to write; must not exist.
            form: keras, weights, saved_model, checkpoint, litert, onnx or openvino; None: by the ending of `to`.
            step: as for `model`.
            tolerance: the largest difference to the model's predictions, relative to the largest one or to 1; None:
                0.001, or 0.03 for keras and saved_model of a model that computes in 16 bits.

        Returns:
            What to load: the file, the folder of a SavedModel, or the prefix of a checkpoint's files.

        Raises:
            InvalidInput: the target cannot be used; or see `model`.
        """
        target = Path(to)
        written = form_of(target) if form is None else form
        require_free_target(written, target)
        require_runtime(written, tolerance)
        head, run_file = self._with_code(step)
        with _process_kept(), hint_at_other_files(run_file.path):
            from baton.tasks.evaluate.export import export, one_replica_as_it_is  # imports TensorFlow

            def write(ref: CheckpointRef) -> Path:
                root, home, device = self._opened.root, self._opened.home, one_replica_as_it_is(head.environment)
                done = export(
                    run_file,
                    head,
                    ref,
                    root=root,
                    home=home,
                    form=written,
                    target=target,
                    tolerance=tolerance,
                    accelerator=device,
                )
                return done.path

            return read_selected(self._opened.home, step, write, error=InvalidInput)

    def _facts(self) -> RunFacts:
        return RunFacts.of(self._opened, self._opened.log.newest() or self._opened.require_newest())

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
        head = self._opened.require_head()
        saved = head.identity.get(SAVED_CODE)
        opened = self._opened
        uses_home = saved is not None and (self._trust_code or has_own_code(opened, head))
        if isinstance(opened, OpenedRun) and opened.file is not None and not uses_home:
            return head, opened.run_file
        if self._code is None or self._code[0] != saved:
            self._code = (str(saved), saved_run(opened, head, trust_code=self._trust_code))
        return head, self._code[1].run_file


@errors_worded(in_python_words)
def run(
    file: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    max_segments: int | None = None,
    max_seconds: float | None = None,
    accept: str = "",
    try_again: bool = False,
    take_over: bool = False,
    progress: bool = True,
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
        progress: show how far it is: a notebook in one output that it updates, a script on standard error.
        overrides: changes of the run file: train__steps=5000 sets train.steps, as do train={"steps": 5000}, which
            leaves the other keys of train as they are, and **{"train.steps": 5000}.

    Returns:
        The run; its `status()` says how far it went.

    Raises:
        InvalidInput: the run file, an override, the code or the data cannot be used.
        BatonError: the training failed; the class says how.
    """
    changes = [change for key, value in overrides.items() for change in _changes(key.replace("__", "."), value)]
    accepted = accepted_keys(accept)
    run_file = load_run_file(Path(file), changes)
    opened = OpenedRun.open(run_file)
    require_lasting_storage(opened)
    words = trainer_words(
        run_file.path,
        changes,
        until_step=until_step,
        max_segments=max_segments,
        max_seconds=max_seconds,
        accept=accepted,
        try_again=try_again,
        take_over=take_over,
    )
    in_notebook = _is_notebook()
    readers: list[Sink] = [_NotebookProgress() if in_notebook else Console(sys.stderr)] if progress else []
    trainer = Trainer(words, readers, output=subprocess.PIPE if in_notebook else None)
    outcome = trainer.wait(signal.SIGINT)
    if outcome.ended is not None and outcome.ended.stopped == "sigint":
        raise KeyboardInterrupt
    if outcome.returncode not in {0, RESUMABLE}:
        raise outcome.error(f"the training {opened.name}")
    if not holds_a_log(opened.home):
        raise BatonError(f"{run_file.path}: stopped before the run had a checkpoint; call run again to start it")
    return Run._of(opened)


_KEY = re.compile(r"[\w-]+")
_OF_STEPS = ("commit", "evaluation", "training")
_LONG_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")


def _changes(key: str, value: object) -> Iterator[str]:
    """The overrides that merge a value into the run file: one for each key of a mapping.

    A mapping with a key that an override cannot name, as one with dots, is set as a whole.
    """
    if isinstance(value, Mapping) and value and all(_KEY.fullmatch(str(name)) for name in value):
        for name, below in value.items():
            yield from _changes(f"{key}.{name}", below)
    else:
        yield f"{key}={json.dumps(value, default=partial(_plain, key))}"


def _plain(key: str, value: object) -> object:
    """A value that JSON does not know: a path as text, a number of NumPy as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(item := getattr(value, "item", None)):
        return item()
    raise InvalidInput(
        f"{key.replace('.', '__')} has a {type(value).__name__}, which a run file cannot have; "
        "give text, a number, True, False, None, a list or a mapping"
    )


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(None if ipython is None else ipython.get_ipython(), "kernel")


class _NotebookProgress(Console):
    """One output of a cell: all warnings, and the newest line of training, of commits, of evaluations and of others."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self._display = importlib.import_module("IPython.display").display
        self._warnings: list[str] = []
        self._newest: dict[str, str] = {}
        self._handle: Any = None

    def line(self, text: str, *, of: str = "") -> None:
        """Show a line of the console."""
        text = _LONG_ID.sub(r"\1", text)
        if of == "warning":
            self._warnings.append(text)
        else:
            self._newest[of if of in _OF_STEPS else ""] = text
        lines = [*self._warnings, *(self._newest[of] for of in ("", *_OF_STEPS) if of in self._newest)]
        shown = {"text/plain": "\n".join(lines)}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
