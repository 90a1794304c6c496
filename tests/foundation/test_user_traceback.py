"""Messages for errors of user code begin with the user's line, and leave out what libraries repeat."""

from pathlib import Path

import pytest

from baton.tasks.foundation.text import with_place
from baton.tasks.foundation.user_functions import load_function
from baton.tasks.foundation.user_traceback import describe, describe_with_place, function_error, user_error

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def raised(folder: Path, text: str) -> Exception:
    (folder / "erring.py").write_text(text)
    function = load_function("erring.py:build", folder)
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def test_message_begins_with_the_users_line(tmp_path: Path) -> None:
    fault = raised(tmp_path, "def inner(width):\n    return 1 / width\n\ndef build():\n    return inner(0)\n")
    text = user_error("erring.py:build raised", fault, end="; mend it", hints=["look there"])
    headline, *rest = text.splitlines()
    assert headline == "erring.py, line 2, in inner:"
    assert rest[:3] == [
        "    return 1 / width",
        "  erring.py:build raised ZeroDivisionError: division by zero; mend it",
        "  called from erring.py, line 5, in build: return inner(0)",
    ]
    assert rest[-1] == "hint: look there"
    assert "test_user_errors" not in describe(fault)
    assert describe_with_place(fault).endswith("(erring.py, line 2, in inner)")


def test_place_of_another_process_stays_in_the_headline(tmp_path: Path) -> None:
    fault = raised(tmp_path, "def build(): raise ValueError('no')")
    text = with_place(user_error("it raised", fault), "in flow run 7")
    assert text.startswith("erring.py, line 1, in build (in flow run 7):\n")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (ValueError(f"{BOLD}one{PLAIN}\n\n  two"), "ValueError: one two"),
        (
            ValueError(
                f"Exception encountered when calling A.call().\n\n{BOLD}Could not automatically infer the output shape "
                f"/ dtype of 'a'. Either … method. Error encountered:\n\nno q{PLAIN}\n\nArguments received by A.call():"
                "\n  • x=1"
            ),
            "ValueError: no q (in A.call())",
        ),
        (
            ValueError(
                "Dimensions must be equal, but are 6 and 5 for '{{node a/MatMul}} = MatMul[T=DT_FLOAT](x, y)' "
                "with input shapes: [?,6], [5,4]."
            ),
            "ValueError: Dimensions must be equal, but are 6 and 5 for node a/MatMul with input shapes: [?,6], [5,4].",
        ),
        (ValueError("{{function_node __wrapped__Sub}} no shapes [Op:Sub] name: "), "ValueError: no shapes"),
        (
            ValueError(
                "Graph execution error:\n\nDetected at node while/Max defined at (most recent call last):\n"
                '  File "/a/b.py", line 3, in call\n\nlog of x: has NaN\n\t [[{{node while/Max}}]] [Op:__inference_1]'
            ),
            "ValueError: log of x: has NaN",
        ),
        (
            ValueError("{{function_node f}} KeyError: 'scale'\nTraceback (most recent call last):\n\n  more"),
            "KeyError: 'scale'",
        ),
        (ValueError('no kernel\nThe op is created at:\n  File "/a.py", line 2, in f'), "ValueError: no kernel"),
        (KeyError("width"), "KeyError: 'width'"),
        (
            ModuleNotFoundError("No module named '_baton_user_0a1b.nope'"),
            "ModuleNotFoundError: No module named '.nope'",
        ),
    ],
)
def test_text_is_shortened_where_libraries_repeat_themselves(fault: Exception, text: str) -> None:
    assert describe(fault) == text


def test_very_long_text_is_cut() -> None:
    assert len(describe(ValueError("x" * 5000))) < 800


def test_nondeterministic_operation_gets_its_remedy() -> None:
    assert describe(ValueError("determinism is enabled")).endswith("or set train.deterministic: false")


def test_function_that_does_wrong_is_shown_by_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("\n\ndef build():\n    return None\n")
    text = function_error(load_function("silent.py:build", tmp_path), "build returned None")
    assert text == "silent.py, line 3, in build:\n    def build():\n  build returned None"
    assert function_error(len, "len returned 3") == "len returned 3"
