"""Messages with a headline, details and hints, and text that is safe to print."""

from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.tasks.foundation.contracts.identity import require_same_identity
from baton.tasks.foundation.errors import IdentityChanged
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.text import (
    Usage,
    abridged,
    counted,
    folded,
    listed,
    message,
    option,
    parts_of,
    shown,
    with_place,
    wrapped_lines,
)


def test_message_has_headline_details_and_hints() -> None:
    assert message("no", details=["a", "b"], hints=["do x", "or y"]).splitlines() == [
        "no",
        "  a",
        "  b",
        "hint: do x",
        "hint: or y",
    ]
    assert message("no") == "no"
    assert message("no", details=list("abcdefghij")).splitlines()[-2:] == ["  h", "  and 2 more"]
    assert listed(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"
    assert listed(["a"]) == "a"


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [counted(number, "step", thousands=",") for number in (1, 2000)] == ["1 step", "2,000 steps"]
    assert [counted(number, "log entry", "log entries") for number in (1, 2)] == ["1 log entry", "2 log entries"]


def test_place_is_added_to_the_headline() -> None:
    assert with_place("no", "in prepare-data") == "no (in prepare-data)"
    text = message("no", details=["a"], hints=["do x"])
    assert with_place(text, "in prepare-data") == "no (in prepare-data)\n  a\nhint: do x"


def test_lines_wrap_on_a_terminal_and_words_stay_whole() -> None:
    path = "/a/very/long/path/" + "x" * 60
    text = message(f"error: {path} is not there", details=["left of it: " + "word " * 20], hints=["make " + path])
    assert list(wrapped_lines(text, columns=None)) == text.splitlines()
    lines = list(wrapped_lines(text, columns=60))
    assert lines[:3] == [
        f"error: {path}",
        "  is not there",
        "  left of it: word word word word word word word word word",
    ]
    assert lines[-2:] == ["hint: make", f"  {path}"]
    assert all(len(line) <= 60 or path in line for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


@given(some.text(alphabet="ab \n", max_size=4000), some.none() | some.integers(-1, 500))
def test_every_word_is_printed_unless_a_line_is_too_long(text: str, columns: int | None) -> None:
    lines = list(wrapped_lines(text, columns=columns))
    assert lines
    assert all(len(line) <= 1010 for line in lines)
    if all(len(line) <= 1000 for line in text.splitlines()):
        assert " ".join(lines).split() == text.split()


def test_what_two_spaces_separate_is_broken_there() -> None:
    assert folded("step 5  loss 0.1234  accuracy 0.97", 30) == ["step 5  loss 0.1234", "accuracy 0.97"]
    assert folded("step 5  loss 0.1234", 25, indent=2) == ["step 5  loss 0.1234"]
    assert folded("one two three  four", 8, indent=2) == ["one two", "  three", "  four"]
    assert folded("hint: /a/long/path is gone", 8, indent=2) == ["hint: /a/long/path", "  is", "  gone"]
    assert folded("it took 3 min 05 s, at 1.2 MB", 11) == ["it took", "3 min 05 s,", "at 1.2 MB"]
    assert folded("", 8) == [""]
    assert folded("one two", None) == ["one two"]


def test_long_line_keeps_its_end() -> None:
    line = f"what happened: {'x' * 5000}; what to do"
    assert abridged(line).startswith("what happened: xxx")
    assert abridged(line).endswith("xxx; what to do")
    assert len(abridged(line)) < 1010
    assert abridged("short") == "short"


def test_changed_identity_is_a_list_of_differences() -> None:
    before = {"model.config": {f"layers[{number}]": {"units": number} for number in range(50)}, "train.seed": 0}
    after = {"model.config": {f"layers[{number}]": {"units": -1} for number in range(50)}, "train.seed": 1}
    with pytest.raises(IdentityChanged) as caught:
        require_same_identity(before, after, home="/runs/iris")
    lines = str(caught.value).splitlines()
    assert lines[0] == "/runs/iris was started with other settings, data or code"
    assert lines[1] == "  train.seed: 0 -> 1"
    assert lines[9] == "  and 43 more"
    keys = "--accept seed,model.config"
    assert lines[10:] == [
        "hint: restore train.seed: 0 in the run file, or for this command: baton run FILE --set train.seed=0",
        f"hint: or continue with the change from the newest checkpoint: baton run FILE {keys}",
        (
            "hint: or try the change in a copy of the run: baton fork /runs/iris --as NEW, then baton run FILE "
            f"--set run=NEW {keys}"
        ),
        (
            "hint: or start a new run: baton run FILE --set run=NEW (with the weights of this one: add "
            "--set init.weights=/runs/iris)"
        ),
    ]


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("PREFECT_API_URL = http://me:secret@host:4200/api: no", "PREFECT_API_URL = http://***@host:4200/api: no"),
        ("https://me:s@cr@t@host/api and wss://me:secret@[::1]/x", "https://***@host/api and wss://***@[::1]/x"),
        ("ConnectError('http://:secret@host')", "ConnectError('http://***@host')"),
        ("https://key@api.prefect.cloud/api", "https://***@api.prefect.cloud/api"),
        ("https://host/a@b", "https://host/a@b"),
        ("gs://bucket/prefix, me@host, a: b@c", "gs://bucket/prefix, me@host, a: b@c"),
    ],
)
def test_passwords_in_urls_are_hidden(text: str, safe: str) -> None:
    assert masked(text) == safe
    assert shown(text) == safe
    assert list(wrapped_lines(text, columns=None)) == [safe]


def test_control_characters_are_escaped() -> None:
    assert shown("\x1b[31mred\x07\r\tx\u202eabc\x9b2J\u2028\nnext") == (
        r"\x1b[31mred\x07\r\tx\u202eabc\x9b2J\u2028\nnext"
    )
    assert shown("größe 日本 [bold]f1[macro][/x] :tm:") == "größe 日本 [bold]f1[macro][/x] :tm:"
    assert len(shown("x" * 1_000_000)) < 5000
    assert list(wrapped_lines("error: a\x1b[2J\nhint: b", columns=80)) == [r"error: a\x1b[2J", "hint: b"]


def test_long_text_is_searched_in_linear_time() -> None:
    parts = ("a-", "a://", "@", "password='", "password=\\", "a:b@", "%2540", "token: ", "--token ", "\t")
    for text in ("x://" + "a" * 100_000, *(part * (100_000 // len(part)) for part in parts)):
        assert len(shown(text)) < 5000


def test_text_between_values_is_one_part() -> None:
    words = message("name it:", details=["source: data.py:load"], hints=["or", "add " + option("accept", "data")])
    assert words.partition("it:\n")[2].partition("\nhint: ") == ("  source: data.py:load", "\nhint: ", ANY)
    assert [type(part) for part in parts_of(words)] == [str, Usage]
    assert words.endswith("add --accept data")
