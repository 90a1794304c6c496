"""`baton report`: writes curves, times and checkpoints of a run as one HTML page."""

from flows.commands.options import RUN_FILE, Address, AsJson, Overrides
from flows.commands.output import say, say_json
from flows.run import open_run


def report(address: Address = RUN_FILE, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Write a run's report into its home."""
    from tasks.evaluate.report.report import write_report  # imports NumPy and matplotlib

    opened = open_run(address, overrides)
    opened.require_head()  # if the log is damaged, its error names the lost entry
    page = write_report(opened.log, title=opened.name)
    if as_json:
        say_json({"run": opened.name, "home": opened.home.uri, "report": page})
    else:
        say(page)
