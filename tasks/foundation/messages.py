"""Text that is safe to print and to store: messages with a headline, details and hints, and secrets masked.

Passwords and tokens reach Baton in addresses (`mlflow: {uri: https://me:password@host}`), in options, and in the errors
of libraries. They would leave it in messages, logs, attempt records, the run file in a home, reports and Prefect. So
what makes a message (`BatonError`, `Note`), what writes a home, and what prints to a terminal come through `masked`,
for text, or `masked_values`, for values such as a run file.

What is masked, rather too much than too little:

- in an address, what comes before `@`, also if the password has slashes, blanks or quotes;
- `user:password@host` without a scheme;
- parameters of a query and of a command that name a secret (`?api_key=`, `token=`, `sig=`, `X-Goog-Signature=`,
  `--password …`), and values of such keys, as in JSON and Python (`"password": "…"`, `auth=("me", "…")`);
- `Authorization`, `Cookie` and key headers, bearer tokens, and private keys in PEM.

A user's own code is stored as it is: Baton cannot tell a secret from another text in it.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MASK: Final = "***"
# Lengths are bounded, so that a text of a million characters takes no more than a linear time.
_LONGEST = 300

# Names of what is secret; `pad_token`, `oov_token` and `max_tokens` of a model are not.
_NAME = (
    r"(?:[A-Za-z0-9]{1,30}[_-]){0,4}(?:pass(?:word|wd|phrase)|pwd|secret(?:[_-]?(?:access[_-]?)?key)?|api[_-]?key"
    r"|access[_-]?key(?:[_-]?id)?|private[_-]?key|account[_-]?key|shared[_-]?access[_-]?(?:key|signature)"
    r"|client[_-]?secret|(?:db|user)[_-]?pass(?:word)?"
    r"|(?:access|auth|api|bearer|id|refresh|session|security|hf|bot)[_-]?token)"
)
_QUERY_NAME = rf"(?:{_NAME}|key|token|sig|signature|sas|jwt|auth|credential|x-(?:goog|amz)-(?:signature|credential))"
_VALUE = r"[^\s&\"'<>,;)}\]]"
_NO_PORT = r"(?!\d{1,5}(?:[/?#\s\"',;)\]]|$))"
_HEADER = r"(?:(?:proxy-)?authorization|(?:set-)?cookie|x-(?:[a-z]{1,20}-)?(?:api-key|auth-token|token))"
_SCHEME = r"\b[a-z][a-z0-9+.-]{0,20}://"
_BEFORE_NAME = r"(?<![a-z0-9_-])"
# A value of `token` that is a secret; other values are words, as of a tokenizer.
_LONG = r"(?=[\w.~+/=-]{0,100}\d)(?=[\w.~+/=-]{0,100}[A-Za-z])[\w.~+/=-]{16,300}"
# A rule is tried on texts that have its sign.
_RULES: Final = tuple(
    (sign, re.compile(pattern, re.IGNORECASE), replacement)
    for sign, pattern, replacement in (
        # user:password@ of any characters; with blanks only if it is no port, as in http://host:80 and me@host
        (
            "@",
            rf"({_SCHEME})[^\s/@:\"'<>*]{{0,100}}:{_NO_PORT}(?:(?!://)[^\n<>]){{0,{_LONGEST}}}@(?=[\w\[])",
            rf"\1{MASK}@",
        ),
        ("@", rf"({_SCHEME})[^\s/@:\"'<>]{{0,100}}:[^\s<>]{{0,{_LONGEST}}}@(?=[\w\[])", rf"\1{MASK}@"),
        ("@", rf"({_SCHEME})[^\s/\"'<>]{{0,{_LONGEST}}}@", rf"\1{MASK}@"),
        ("@", r"(?<![\w./:@+-])[\w.+-]{1,64}:(?!//)[^\s@\"'<>]{1,100}@(?!sha256:)(?=[a-z0-9])", f"{MASK}@"),
        ("=", rf"([?&;]{_QUERY_NAME}=){_VALUE}+", rf"\1{MASK}"),
        # as lists, tuples and bytes of Python, and as options of a command
        (
            "",
            rf"({_BEFORE_NAME}(?:{_NAME}|auth)[\"']?\s{{0,3}}[:=]\s{{0,3}})[\[(][^\])\n]{{0,{_LONGEST}}}[\])]",
            rf"\1{MASK}",
        ),
        ("", rf"({_BEFORE_NAME}{_NAME}[\"']?\s{{0,3}}[:=]\s{{0,3}})b([\"'])[^\n]{{0,{_LONGEST}}}?\2", rf"\1{MASK}"),
        ("--", rf"(--(?:{_NAME}|token)(?:=|\s{{1,3}}))(?!-){_VALUE}+", rf"\1{MASK}"),
        ("=", rf"({_BEFORE_NAME}(?:{_NAME}|token)\s?=\s?)([\"'])[^\n]{{0,{_LONGEST}}}?\2", rf"\1\2{MASK}\2"),
        ("=", rf"({_BEFORE_NAME}(?:{_NAME}|token)\s?=\s?){_VALUE}+", rf"\1{MASK}"),
        (":", rf"({_BEFORE_NAME}{_NAME}[\"']?\s{{0,3}}:\s{{0,3}})([\"'])[^\n]{{0,{_LONGEST}}}?\2", rf"\1\2{MASK}\2"),
        (":", rf"({_BEFORE_NAME}{_NAME}[\"']?\s{{0,3}}:\s{{1,3}}){_VALUE}+", rf"\1{MASK}"),
        (":", rf"({_BEFORE_NAME}token[\"']?\s{{0,3}}:\s{{0,3}})([\"'])[^\s\"']{{16,{_LONGEST}}}\2", rf"\1\2{MASK}\2"),
        (":", rf"({_BEFORE_NAME}token\s{{0,3}}:\s{{1,3}})(?={_LONG}\b){_VALUE}+", rf"\1{MASK}"),
        (
            "",
            rf"({_BEFORE_NAME}{_HEADER}[\"']?\s{{0,3}}[:=]\s{{0,3}}+[\"']?+)(?!\*\*\*)[^\n\"',}}]+",
            rf"\1{MASK}",
        ),
        ("", r"(\b(?:bearer|basic)\s{1,3})[a-z0-9._~+/=-]{8,}", rf"\1{MASK}"),
        ("-----BEGIN ", r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)[^-]*", rf"\1{MASK}"),
    )
)
# No rule matches a text without one of these.
_MAY_BE = re.compile(r"[@=]|key|token|auth|cookie|bearer|basic|pass|pwd|secret", re.IGNORECASE)
_SECRET_NAME = re.compile(rf"{_NAME}|{_HEADER}", re.IGNORECASE)
_LOOKS_SECRET = re.compile(_LONG)
HINT: Final = "hint: "
_SHOWN = 8
# Longer lines lose their middle, because the remedy comes last.
_LINE_CHARACTERS = 1000
# The limit for other text; long enough for any command or path.
_SHOWN_CHARACTERS = 4000
_MIN_COLUMNS, _MAX_COLUMNS = 40, 120
# Stays on one line with the first word after it, even if that is a long path.
_LABEL = re.compile(r"^([A-Za-z]{1,12}:) ")
# Control characters, line separators, direction marks and surrogates: text from a file must not control the terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_NO_BREAK = "\0"
# Stays on one line with the number before it.
_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|days?|bytes|[kMGT]B|[KMGT]iB|[a-z]{1,12}/s)\b)")


def masked(text: str) -> str:
    """Return a text with its secrets masked."""
    if not _MAY_BE.search(text):
        return text
    for sign, pattern, replacement in _RULES:
        if sign in text:
            text = pattern.sub(replacement, text)
    return text


def masked_values(value: Any, name: str = "") -> Any:
    """Return a value of JSON with its secrets masked, by their form and by the names of their keys.

    Args:
        value: mappings, lists, texts and numbers.
        name: the key that has the value.
    """
    if isinstance(value, Mapping):
        # All that a secret consists of is one.
        above = name if _SECRET_NAME.fullmatch(name) else ""
        return {_masked_key(key): masked_values(below, above or str(key)) for key, below in value.items()}
    if isinstance(value, list | tuple):
        if name.lower() == "auth":  # user and password
            return type(value)(MASK for _ in value)
        return type(value)(masked_values(below, name) for below in value)
    if names_secret(name, value):
        return MASK
    return masked(value) if isinstance(value, str) else value


def _masked_key(key: Any) -> Any:
    return masked(key) if isinstance(key, str) else key


def names_secret(name: str, value: object) -> bool:
    """Return whether a key has a secret as its value, by its name; nothing, and true and false, are none."""
    if value is None or value == "" or isinstance(value, bool):
        return False
    is_token = name.lower() == "token" and isinstance(value, str) and _LOOKS_SECRET.fullmatch(value) is not None
    return is_token or _SECRET_NAME.fullmatch(name) is not None


def message(headline: str, *, details: Sequence[str] = (), hints: Sequence[str] = ()) -> str:
    """A headline, the first few details with the number of the others, and one line per hint."""
    lines = [headline, *(f"  {detail}" for detail in details[:_SHOWN])]
    if len(details) > _SHOWN:
        lines.append(f"  and {len(details) - _SHOWN} more")
    return "\n".join([*lines, *(f"{HINT}{hint}" for hint in hints)])


def with_place(text: str, place: str) -> str:
    """A message with `(place)` at the end of its headline."""
    headline, line_end, rest = text.partition("\n")
    if headline.endswith(":"):
        return f"{headline[:-1]} ({place}):{line_end}{rest}"
    return f"{headline} ({place}){line_end}{rest}"


def listed(items: Sequence[str]) -> str:
    """The first few items, separated by commas, and the number of the others."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def time_words(time: str) -> str:
    """`2026-01-31 12:00:00`, from ISO 8601 in UTC."""
    return time[:19].replace("T", " ")


def counted(number: int, noun: str, plural: str | None = None, *, thousands: str = "") -> str:
    """`1 step`, `2 steps`; `2 entries` with its own plural; `2,000 steps` with a comma between thousands."""
    return f"{number:{thousands}} {noun if number == 1 else plural or f'{noun}s'}"


def wrapped_lines(text: str, *, columns: int | None) -> Iterator[str]:
    """The lines of a message, shortened and wrapped for the terminal.

    Args:
        text: the message.
        columns: width of the terminal; None to wrap no lines, as for a pipe.
    """
    for line in text.split("\n"):
        short = shown(line, _LINE_CHARACTERS)
        if columns is None:
            yield short
            continue
        indent = len(short) - len(short.lstrip()) + 2
        wrapped = textwrap.wrap(
            _kept_together(short),
            min(max(columns, _MIN_COLUMNS), _MAX_COLUMNS),
            subsequent_indent=" " * indent,
            break_long_words=False,  # people copy paths and commands
            break_on_hyphens=False,
        )
        yield from (part.replace(_NO_BREAK, " ") for part in wrapped or [""])


def folded(text: str, columns: int | None, *, indent: int = 0) -> list[str]:
    """One line as lines of at most `columns` characters, broken at spaces.

    Longer words stay whole, because people copy paths and commands. What two spaces
    separate, as in `loss 0.12  accuracy 0.97`, is broken there, and elsewhere only if it must.

    Args:
        text: the line.
        columns: the width; None for one line.
        indent: spaces before all lines but the first.
    """
    if columns is None:
        return [text]
    parts = _kept_together(text).split("  ")
    kept = (part.replace(" ", _NO_BREAK) if part.strip() and len(part) <= columns - indent else part for part in parts)
    lines = textwrap.wrap(
        "  ".join(kept), columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def _kept_together(line: str) -> str:
    """The line with no break after its label, and none between a number and its unit."""
    return _UNIT.sub(_NO_BREAK, _LABEL.sub(rf"\1{_NO_BREAK}", line))


def shown(line: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """One line that is safe to print: without control characters and secrets, and not too long."""
    return abridged(visible(masked(line)), characters)


def shown_lines(text: str) -> str:
    """`shown` for every line of a text."""
    return "\n".join(map(shown, masked(text).split("\n")))


def visible(text: str) -> str:
    r"""Text as one line, with escapes such as \x1b for control characters."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def abridged(line: str, characters: int = _LINE_CHARACTERS) -> str:
    """A line, without its middle if it is too long."""
    if len(line) <= characters:
        return line
    end = characters // 3
    return f"{line[: characters - end]} [...] {line[-end:]}"
