"""`baton verify`: compares every committed byte with its manifest and the log; writes nothing."""

import sys
from dataclasses import asdict

import typer

from baton.flows.commands.options import RUN_FILE, Address, AsJson, Overrides, Verbose
from baton.flows.commands.output import Output, Painted, say_json
from baton.flows.opened_run import RunHome, open_run
from baton.flows.verification import Findings, verify_home
from baton.tasks.foundation.errors import DamagedCheckpoint
from baton.tasks.foundation.telemetry.formatting import BAD, GOOD
from baton.tasks.foundation.text import counted


def verify(
    address: Address = RUN_FILE, overrides: Overrides = None, *, verbose: Verbose = False, as_json: AsJson = False
) -> None:
    """Read every committed byte again; write nothing.

    Exits 4 on damage and names each damaged file.
    """
    opened = open_run(address, overrides)
    aside = Output.to(sys.stderr, verbose=verbose)
    findings = verify_home(opened, aside.line, path_words=aside.path)
    if as_json:
        say_json({"run": opened.name, "home": opened.home.uri, "ok": not findings.damages, **asdict(findings)})
    else:
        _say(opened, findings)
    if findings.damages:
        raise typer.Exit(DamagedCheckpoint.exit_code)


def _say(opened: RunHome, findings: Findings) -> None:
    out = Output.to(sys.stdout)
    for damage in findings.damages:
        headline, *hints = damage.what.split("\n")
        for line in (f"damaged: {headline}", *hints):
            out.line(line)
    out.line(findings.words(opened.home.uri))
    if findings.not_read:
        out.line(
            f"not read: {counted(findings.not_read, 'shard')} in files outside of the storage; "
            "baton verify FILE reads those that the run file names"
        )
    if not findings.damages:
        out.line(Painted("all bytes agree with their manifests and the log", GOOD))
        return
    out.line(Painted(f"{len(findings.damages)} damaged", BAD))
    if any(damage.file.startswith("checkpoints/") for damage in findings.damages):
        out.line("hint: `baton run` quarantines a damaged tip and goes back to the checkpoint before")
