"""`baton report`: curves, times and checkpoints of a run as one HTML page."""

from flows.commands.address import Address, Overrides, open_run
from flows.commands.output import AsJson, say, say_json


def report(address: Address, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Write the report of a run into its home."""
    from tasks.evaluate.report.report import write_report  # brings NumPy and matplotlib

    opened = open_run(address, overrides)
    opened.head()  # says which entry is lost, if the log is damaged
    page = write_report(opened.home, title=opened.name)
    if as_json:
        say_json({"run": opened.name, "home": opened.home.uri, "report": page})
    else:
        say(page)
