"""When a stream gets colors, and which."""

import io
import os

import pytest

from tasks.foundation.telemetry.formatting import columns_of, has_colors, painted, painted_label, style_of
from tests.support.terminal import COLOR_VARIABLES, terminal


@pytest.mark.parametrize(
    ("variables", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR_FORCE": "0"}, True, False),
        ({"CLICOLOR": "0"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
    ],
)
def test_colors_follow_the_usual_variables(
    variables: dict[str, str], on_terminal: bool, in_pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in COLOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with terminal(80) as (descriptor, _), os.fdopen(os.dup(descriptor), "w") as stream:
        assert has_colors(stream) is on_terminal
        assert columns_of(stream) == 80
    assert has_colors(io.StringIO()) is in_pipe
    assert columns_of(io.StringIO()) is None


def test_only_a_known_label_is_painted() -> None:
    assert painted_label("error: no", colors=True) == "\x1b[1;31merror:\x1b[0m no"
    assert painted_label("hint:", colors=True) == "\x1b[36mhint:\x1b[0m"
    for line in ("error: no", "run: x"):
        assert painted_label(line, colors=False) == line
    for line in ("run: x", "gs://bucket", "file:///tmp", ""):
        assert painted_label(line, colors=True) == line


def test_status_words_have_one_color_each() -> None:
    assert [style_of(word) for word in ("pass   ", "warn", "damaged", "origin")] == ["green", "yellow", "bold red", ""]
    assert painted("x", "", colors=True) == painted("x", "green", colors=False) == "x"
