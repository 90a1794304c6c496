"""Numbers as people read them."""

import math

import pytest

from tasks.foundation.telemetry.formatting import (
    ago_words,
    duration_words,
    metric_words,
    number_words,
    short_path,
    size_words,
)


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
