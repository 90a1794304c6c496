"""Numbers as people read them; when a stream gets colors, and which."""

import io
import math
import os

import pytest

from baton.tasks.foundation.telemetry.formatting import (
    ago_words,
    columns_of,
    duration_words,
    has_colors,
    metric_words,
    number_words,
    painted,
    painted_label,
    short_path,
    size_words,
    style_of,
)
from tests.support.terminal import COLOR_VARIABLES, terminal


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.123456, "0.1235"), (3.0, "3"), (1e-7, "1e-07"), (123456.0, "123456"), (1e30, "1e+30"), (0.0, "0")],
)
def test_numbers_have_four_significant_digits(value: float, words: str) -> None:
    assert number_words(value) == words


def test_infinite_and_nan_are_named() -> None:
    assert metric_words({"a": math.nan, "b": math.inf, "c": -math.inf}) == "a nan  b inf  c -inf"


def test_many_numbers_of_one_metric_are_a_range() -> None:
    few = {f"f1/{index}": 0.5 for index in range(3)}
    assert metric_words({"loss": 1.0, **few, "a/b": 2}) == "loss 1  f1/0 0.5  f1/1 0.5  f1/2 0.5  a/b 2"
    many = {f"f1/{index}": index / 64 for index in range(64)}
    assert metric_words({"loss": 1.0, **many, "mae": 2}) == "loss 1  f1/0..63 0..0.9844  mae 2"


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5e9, "5.0 GB"), (2e15, "2000.0 TB")],
)
def test_sizes_have_decimal_units(size: float, words: str) -> None:
    assert size_words(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (42.4, "42 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (math.nan, "?"),
    ],
)
def test_durations_have_two_units(seconds: float, words: str) -> None:
    assert duration_words(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (3600, "1 h ago"),
        (2 * 86400 - 1, "47 h ago"),
        (2 * 86400, "2 days ago"),
    ],
)
def test_ages_are_rounded_down(seconds: float, words: str) -> None:
    assert ago_words(seconds) == words


def test_attempt_in_a_path_is_shortened() -> None:
    assert short_path("checkpoints/00000500-00000003-0123456789abcdef") == "checkpoints/00000500-00000003-01234567"
    assert short_path("foreign") == "foreign"


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
