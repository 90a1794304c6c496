"""The `baton` command: its verbs, and the message and exit code of each error.

This module does not import TensorFlow or Prefect, and a verb's module is imported when the verb is used, so that help
and completion are fast.
"""

import os
import sys

from baton.flows.process_start import begin_with_fixed_hashes

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "baton":  # noqa: PTH119 - pathlib takes longer to import
    begin_with_fixed_hashes("".join(sys.argv[1:2]))

from baton.flows.process import exits_with  # isort: skip - the function that registers first is called last

import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info

from baton.flows.commands.output import Output, say, say_json
from baton.flows.process import (
    keep_main_module_from_children,
    mask_library_output,
    provide_home_folder,
    sigterm_raises,
    stop_signal_name,
    tolerate_closed_readers,
)
from baton.tasks.foundation.contracts.base import baton_version
from baton.tasks.foundation.errors import BatonError, InvalidInput
from baton.tasks.foundation.machine.stops import RESUMABLE, Terminated
from baton.tasks.foundation.masking import masked

_INTERRUPTED = 130  # 128 + SIGINT, as in shells
_UNEXPECTED = 1


class Verb(NamedTuple):
    """A verb.

    Attributes:
        function: module below `baton.flows.commands`, and function in it.
        summary: its line in the list of verbs, the first one of the function's docstring; a test compares them.
        examples: command lines.
    """

    function: str
    summary: str
    examples: tuple[str, ...]


VERBS: Final = {
    "init": Verb(
        "init:init",
        "Write a run file, a model and data that train in seconds.",
        ("baton init spirals && cd spirals && baton run", "baton init pets --data photos/pets"),
    ),
    "run": Verb(
        "run:run",
        "Train a run file to its target, or continue it.",
        ("baton run", "baton run run.yaml --set train.steps=5000", "baton run run.yaml --accept optimizer"),
    ),
    "status": Verb(
        "status:status",
        "Show the state of a run.",
        ("baton status", "baton status gs://bucket/runs/digits --json"),
    ),
    "list": Verb(
        "list_runs:list_runs",
        "List the runs of a storage folder, by name.",
        (
            "baton list runs",
            "baton list runs --sort -accuracy --where state=failed",
            "baton list runs --html runs.html",
        ),
    ),
    "delete": Verb(
        "list_runs:delete",
        "Delete a run: its home with the log and all checkpoints.",
        ("baton delete runs/digits", "baton delete runs/digits --yes"),
    ),
    "log": Verb(
        "log:log",
        "Print the entries of a run's log, newest last.",
        ("baton log run.yaml", "baton log runs/digits --json"),
    ),
    "verify": Verb("verify:verify", "Read every committed byte again; write nothing.", ("baton verify run.yaml",)),
    "compare": Verb(
        "compare:compare",
        "Compare the settings, metrics and curves of several runs.",
        ("baton compare a.yaml b.yaml", "baton compare runs/a runs/b --html compared.html"),
    ),
    "fork": Verb(
        "fork:fork",
        "Start a new run from a checkpoint of another run.",
        ("baton fork runs/digits --at-step 800 --as digits-wide",),
    ),
    "evaluate": Verb(
        "evaluate:evaluate",
        "Evaluate a committed checkpoint, and compare with the log.",
        ("baton evaluate run.yaml --step best", "baton evaluate run.yaml --on test"),
    ),
    "export": Verb(
        "export:export",
        "Write a committed checkpoint for plain Keras or TensorFlow.",
        ("baton export run.yaml --to model.keras", "baton export run.yaml --format saved_model --to model"),
    ),
    "report": Verb("report:report", "Write a run's report into its home.", ("baton report run.yaml --open",)),
    "profile": Verb(
        "profile:profile",
        "Trace the next steps of the process at work, for TensorBoard.",
        ("baton profile run.yaml --steps 20",),
    ),
    "prove": Verb(
        "prove:prove",
        "Train straight, and again cut and killed; compare every bit.",
        ("baton prove run.yaml", "baton prove run.yaml --steps 100"),
    ),
    "audit": Verb(
        "audit:audit",
        "Execute committed steps again; compare every bit with the log.",
        ("baton audit run.yaml --last",),
    ),
    "hosts": Verb(
        "hosts:hosts",
        "Print the TF_CONFIG of this host, as baton run reads it here.",
        ("baton hosts", "srun --ntasks-per-node=1 baton hosts"),
    ),
    "slice-server": Verb(
        "hosts:slice_server",
        "Run the TensorFlow server of one host of a TPU slice, until it is ended.",
        ("baton slice-server",),
    ),
    "doctor": Verb(
        "doctor:doctor",
        "Check a run file, its code, data and store; start nothing.",
        ("baton doctor run.yaml", "baton doctor run.yaml --for v5litepod-8"),
    ),
}


class VerbGroup(TyperGroup):
    """The command `baton`."""

    def __init__(self, **settings: Any) -> None:
        """Know the names of the verbs, and import none."""
        super().__init__(**settings)
        self.commands = _Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - Typer's signature
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


class _Commands(dict[str, Any]):
    """Typer's commands by verb, each made when it is asked for."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(VERBS))

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is None:
            found = self[name] = _command_of(name, VERBS[name])
        return found

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def _command_of(name: str, verb: Verb) -> Any:
    module, _, function = verb.function.partition(":")
    maker = typer.Typer()
    # Typer keeps the lines after \\b as they are.
    epilog = "\n".join(["\b", "Examples:", *(f"  {example}" for example in verb.examples)])
    maker.command(name, epilog=epilog)(getattr(import_module(f"baton.flows.commands.{module}"), function))
    return get_command_from_info(maker.registered_commands[0], pretty_exceptions_short=True, rich_markup_mode=None)


app = typer.Typer(
    name="baton",
    cls=VerbGroup,
    help="Train TensorFlow/Keras models as a relay of resumable segments.",
    epilog=(
        "Exit codes: 0 success, 2 input refused, 3 stopped with work left that can be resumed, 4 damage found, "
        "1 anything else."
    ),
    # Options of all verbs too.
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(requested: bool) -> None:
    if requested:
        say(f"baton {baton_version() or 'of unknown version'}")
        raise typer.Exit


@app.callback()
def options(
    _version_requested: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Train TensorFlow/Keras models as a relay of resumable segments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after `baton`; None: those of the process, which then exits with the returned code.

    Returns:
        The exit code.
    """
    mask_library_output()
    with tolerate_closed_readers():
        if arguments is not None:
            return _run(list(arguments))
        keep_main_module_from_children()
        return exits_with(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:  # noqa: PLR0911 - one return per kind of ending
    as_json = "--json" in arguments
    if not arguments:
        _run(["--help"])
        return InvalidInput.exit_code
    try:
        # In standalone mode, typer would print usage errors itself and show other errors as tracebacks.
        with sigterm_raises():
            provide_home_folder()
            result = typer.main.get_command(app).main(args=arguments, prog_name="baton", standalone_mode=False)
    except Terminated as fault:
        return _fail(
            fault, f"stopped by {stop_signal_name()}; run the same command to continue", RESUMABLE, as_json=as_json
        )
    except BatonError as fault:
        return _fail(fault, str(fault), fault.exit_code, as_json=as_json)
    except typer.TyperException as fault:
        return _fail(fault, _usage(fault), fault.exit_code, as_json=as_json)
    except SystemExit as fault:  # a library or the user's code called sys.exit, so the command is incomplete
        return _fail(
            fault,
            f"something called sys.exit({fault.code!r}) before the command ended",
            _UNEXPECTED,
            as_json=as_json,
        )
    except Exception as fault:  # noqa: BLE001 - the outermost handler: it prints a message, not a traceback
        text = f"{type(fault).__name__}: {fault}\nhint: this is unexpected; set BATON_DEBUG=1 for the traceback"
        return _fail(fault, text, _UNEXPECTED, as_json=as_json)
    if result == _INTERRUPTED:  # typer returns this after a KeyboardInterrupt
        return _fail(
            KeyboardInterrupt(), "interrupted; run the same command to continue", _INTERRUPTED, as_json=as_json
        )
    return result if isinstance(result, int) else 0


def _fail(fault: BaseException, text: str, exit_code: int, *, as_json: bool) -> int:
    text = masked(text)
    if os.environ.get("BATON_DEBUG"):
        typer.echo(masked("".join(traceback.format_exception(fault))), err=True)
    Output.to(sys.stderr).message(f"error: {text}")
    if as_json:
        say_json({"error": type(fault).__name__, "message": text, "exit_code": exit_code})
    return exit_code


def _usage(fault: typer.TyperException) -> str:
    context: Any = getattr(fault, "ctx", None)
    command = context.command_path if context is not None else "baton"
    text = fault.format_message().strip()
    return f"{text if text.endswith(('.', '?', '!')) else f'{text}.'}\nhint: see {command} --help"


if __name__ == "__main__":
    sys.exit(main())
