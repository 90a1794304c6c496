"""`baton report`: writes curves, times and checkpoints of a run as one HTML page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from baton.flows.commands.options import RUN_FILE, Address, AsJson, Overrides
from baton.flows.commands.output import say, say_json
from baton.flows.opened_run import open_run
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.storage.local import LocalStorage


def report(
    address: Address = RUN_FILE,
    overrides: Overrides = None,
    *,
    in_browser: Annotated[bool, typer.Option("--open", help="show the page in the web browser")] = False,
    places: Annotated[
        bool, typer.Option("--places", help="also name hosts, and the folders of home and storage, in the page")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's report into its home."""
    from baton.tasks.evaluate.report.page import write_report

    opened = open_run(address, overrides)
    if in_browser and not isinstance(opened.home, LocalStorage):
        raise InvalidInput(f"--open: {opened.home.uri} is not on this machine; leave --open out, and copy the page")
    opened.require_head()  # if the log is damaged, its error names the lost entry
    page = write_report(opened.log, title=opened.name, places=places)
    if as_json:
        say_json({"run": opened.name, "home": opened.home.uri, "report": page})
    else:
        say(page)
    if in_browser and not webbrowser.open(Path(page).resolve().as_uri()):
        say("no web browser was found; open the page by hand", aside=True)
