"""The `baton` command: its verbs, and the message and exit code of each error.

This module does not import TensorFlow or Prefect, so `baton --help` is fast.
"""

import os
import sys

from flows.process.hash_seed import begin_with_fixed_hashes

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "baton":  # noqa: PTH119 - pathlib takes longer to import
    begin_with_fixed_hashes("".join(sys.argv[1:2]))

from flows.process.exit import exits_with  # isort: skip - the function that registers first is called last

import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from flows.commands.output import Output, say, say_json
from flows.commands.verbs import VerbGroup
from flows.process.library_output import mask_library_output
from flows.process.main_module import keep_main_module_from_children
from flows.process.standard_streams import provide_home_folder, tolerate_closed_readers
from flows.process.stop_signals import Terminated, sigterm_raises, stop_signal_name
from tasks.foundation.errors import BatonError, InvalidInput
from tasks.foundation.machine.stops import RESUMABLE
from tasks.foundation.masking import masked
from tasks.foundation.version import baton_version

_INTERRUPTED = 130  # 128 + SIGINT, as in shells
_UNEXPECTED = 1

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
