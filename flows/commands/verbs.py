"""The verbs of `baton`. A verb's module is imported when the verb is used, so that help and completion are fast."""

from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info


class Verb(NamedTuple):
    """A verb.

    Attributes:
        function: module below `flows.commands`, and function in it.
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
        ("baton init spirals && cd spirals && baton run",),
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
        ("baton list runs", "baton list gs://bucket/runs --limit 20"),
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
        ("baton export run.yaml --format keras --to model.keras",),
    ),
    "report": Verb("report:report", "Write a run's report into its home.", ("baton report run.yaml --open",)),
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
    maker.command(name, epilog=epilog)(getattr(import_module(f"flows.commands.{module}"), function))
    return get_command_from_info(maker.registered_commands[0], pretty_exceptions_short=True, rich_markup_mode=None)
