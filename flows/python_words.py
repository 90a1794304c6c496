"""Messages in the words of Python: for who calls `flows.api`, options of the command are parameters."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.foundation.errors import BatonError

_Words = str | Callable[[re.Match[str]], str]
_VALUE = r"[\w.,]*[\w]"
_WORDS: tuple[tuple[str, _Words], ...] = (
    (r"--set ([\w.]+)=", lambda found: f"{found[1].replace('.', '__')}="),
    (r"--(until-step|max-segments|max-seconds)\b", lambda found: found[1].replace("-", "_")),
    (r"--(take-over|try-again|trust-code)\b", lambda found: f"{found[1].replace('-', '_')}=True"),
    (rf"--accept ({_VALUE})", r'accept="\1"'),
    (rf"--format ({_VALUE})", r'form="\1"'),
    (r"--to ", "to="),
    (r"--step ", "step="),
    (r"--run-file FILE", "Run('run.yaml')"),
    # A whole command, whose options are parameters by now.
    (r"baton run (\S+)((?: \w+=[^\s;]+)+)", lambda found: f"run({', '.join([found[1], *found[2].split()])})"),
)


def in_python_words(text: str) -> str:
    """Return a message with the parameters of `flows.api` in place of the options of the command."""
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


@contextmanager
def errors_in_python_words() -> Iterator[None]:
    """Change the messages of errors that are raised inside; also a decorator."""
    try:
        yield
    except BatonError as fault:
        fault.args = tuple(in_python_words(each) if isinstance(each, str) else each for each in fault.args)
        raise
