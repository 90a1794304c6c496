"""Arguments and options that several verbs share."""

from typing import Annotated

import typer

Address = Annotated[str, typer.Argument(metavar="RUN", help="a run file, or the folder or URI of a run's home")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change a key of the run file, as train.steps=5000; repeatable"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object, as the last line of stdout")]
