"""What the Python API raises names its own parameters, wherever the message was written."""

import inspect
import re

import pytest

from flows.api import Run, in_python_words, run
from tests.support.checkout import CHECKOUT

OPTION = re.compile(r"--([a-z][a-z-]+)")


@pytest.mark.parametrize(
    ("of_command", "of_python"),
    [
        ("with the code beside it: --run-file FILE", "with the code beside it: Run('run.yaml')"),
        ("run it as yourself with --trust-code", "run it as yourself with trust_code=True"),
        ("go on with --accept compile,callbacks", 'go on with accept="compile,callbacks"'),
        ("or: baton run FILE --accept model.contents", 'or: run(FILE, accept="model.contents")'),
        ("then baton run FILE --set run=NEW --accept data", 'then run(FILE, run=NEW, accept="data")'),
        ("baton run FILE --try-again", "run(FILE, try_again=True)"),
        ("as with --set train.steps=2000", "as with train__steps=2000"),
        ("--until-step = 9 lies beyond", "until_step = 9 lies beyond"),
        ("--to a b.keras already exists", "to=a b.keras already exists"),
        ("use --format keras or weights", 'use form="keras" or weights'),
        ("run baton fork HOME --as NEW", "run baton fork HOME --as NEW"),
    ],
)
def test_options_become_parameters(of_command: str, of_python: str) -> None:
    assert in_python_words(of_command) == of_python


def test_every_option_with_a_parameter_is_known() -> None:
    names = {name for each in (run, Run.__init__, Run.export) for name in inspect.signature(each).parameters}
    options = {
        found
        for path in CHECKOUT.glob("*/**/*.py")
        if path.relative_to(CHECKOUT).parts[0] in {"flows", "tasks"}
        for found in OPTION.findall(path.read_text(encoding="utf-8"))
    }
    known = {option for option in options if option.replace("-", "_") in names}
    assert {"accept", "take-over", "trust-code", "to"} <= known
    assert {option for option in known if "--" in in_python_words(f"with --{option} x")} == set()
