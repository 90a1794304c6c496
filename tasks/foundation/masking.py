"""Secrets are masked in all that Baton prints and stores.

Passwords and tokens reach Baton in addresses (`mlflow: {uri: https://me:password@host}`), in options, and in the errors
of libraries. They would leave it in messages, logs, attempt records, the run file in a home, reports and Prefect. So
what makes a message (`BatonError`, `Note`), what writes a home, and what prints to a terminal come through `masked`,
for text, or `masked_values`, for values such as a run file.

What is masked, rather too much than too little:

- in an address, what comes before `@`, also if the password has slashes, blanks or quotes;
- `user:password@host` without a scheme;
- parameters of a query and of a command that name a secret (`?api_key=`, `token=`, `sig=`, `X-Goog-Signature=`,
  `--password …`), and values of such keys, as in JSON, YAML and Python (`"password": "…"`, `auth=("me", "…")`) and in
  words (`password is …`), also within quoted or percent-encoded text, and in names of the environment (`PGPASSWORD`,
  `GITHUB_TOKEN`);
- `Authorization`, `Cookie` and key headers, bearer tokens, and private keys in PEM;
- what has a well-known form (`ghp_…`, `hf_…`, `sk-…`, `AKIA…`, `ya29.…`, JWT), and addresses of webhooks.

A user's own code is stored as it is: Baton cannot tell a secret from another text in it.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

MASK: Final = "***"
# Lengths are bounded, so that a text of a million characters takes no more than a linear time.
_LONGEST = 300
_LONGEST_QUOTED = 4000
# Names of what is secret; `pad_token`, `oov_token` and `max_tokens` of a model are not.
_NAME = (
    # GOOGLE_APPLICATION_CREDENTIALS is the path of a file.
    r"(?:(?:[A-Za-z0-9]{1,30}[_-]){0,4}(?:pass|pwd|secret(?:[_-]?(?:access[_-]?)?key)?|(?<!application[_-])credentials?"
    r"|account[_-]?key|shared[_-]?access[_-]?(?:key|signature)|(?:db|user)[_-]?pass)"
    # and with a prefix that nothing separates, as in PGPASSWORD and dbPassword
    r"|(?:[A-Za-z0-9]{1,30}[_-]){0,4}[A-Za-z0-9]{0,20}(?:pass(?:word|wd|phrase)|api[_-]?key|access[_-]?key(?:[_-]?id)?"
    r"|private[_-]?key|client[_-]?secret|(?:access|auth|api|bearer|id|refresh|session|security|hf|bot)[_-]?token)"
    # and names of the environment, with any beginning and end
    r"|(?-i:[A-Z0-9_]{0,40}(?:PASSWORD|PASSWD|SECRET|_TOKEN(?!S|IZ))[A-Z0-9_]{0,20}))"
)
_QUERY_NAME = rf"(?:{_NAME}|key|token|sig|signature|sas|jwt|auth|x-(?:goog|amz)-(?:signature|credential))"
_VALUE = r"[^\s&\"'<>,;)}\]]"
_NO_PORT = r"(?!\d{1,5}(?:[/?#\s\"',;)\]]|$))"
_HEADER = (
    r"(?:(?:proxy-)?authorization|(?:set-)?cookie|(?:private|deploy|job)-token"
    r"|x-(?:[a-z]{1,20}-)?(?:api-key|auth-token|token))"
)
_SCHEME = r"\b[a-z][a-z0-9+.-]{0,20}://"
_BEFORE_NAME = r"(?<![a-z0-9_-])"
# As it stands, within text that is quoted once more or many times, in HTML, and percent-encoded.
_QUOTE = r"(?:\\{0,15}[\"']|&quot;|%(?:25){0,3}22)"
_PERCENT = r"%(?:25){0,3}"
_SEPARATOR = rf"(?:\s{{0,3}}(?:[=:\uff1a]|->|{_PERCENT}3[ad])\s{{0,3}}|\t)"
_BEFORE_WORDS = rf"(?:\s{{0,3}}(?::\s|\uff1a|->|{_PERCENT}3[ad])\s{{0,3}}|\t)"
# Up to the quote that ends the value: a quote with more backslashes before it is part of the value.
_QUOTED = rf"({_QUOTE})(?!\*\*\*)[^\n]{{0,{_LONGEST_QUOTED}}}?(?:(?<!\\)\2|$)"
# A value of `token` that is a secret; other values are words, as of a tokenizer.
_LONG = r"(?=[\w.~+/=-]{0,100}\d)(?=[\w.~+/=-]{0,100}[A-Za-z])[\w.~+/=-]{16,300}"
# `password is X`, unless X says how it is; a `pass` that is something is no secret.
_IS = r"(?<!pass)\s{1,3}(?:is|was):?\s{1,3}"
_STATE = (
    r"(?:a|already|also|an|empty|expired|false|given|hidden|in|incorrect|invalid|kept|known|longer|masked|missing|needed"
    r"|never|no|none|not|null|of|ok|only|optional|read|required|rejected|set|shorter|stored|taken|the|too|true|unknown"
    r"|unset|used|valid|visible|weak|wrong)"
)
# Forms that need no name: GitHub, GitLab, Hugging Face, OpenAI, Slack, npm, PyPI, Google, AWS, and a JWT.
_KNOWN_FORMS = (
    r"(?-i:\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|npm_|pypi-|AIza|ya29\.)"
    r"(?=[\w.-]{0,100}\d)[\w.-]{16,}|\b(?:AKIA|ASIA)[A-Za-z0-9]{16}\b|\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*)"
)
# A rule is tried on texts that have its sign.
_RULES: Final = tuple(
    (sign, re.compile(pattern, re.IGNORECASE | re.MULTILINE), replacement)
    for sign, pattern, replacement in (
        # user:password@ of any characters; with blanks only if it is no port, as in http://host:80 and me@host
        (
            "@",
            rf"({_SCHEME})[^\s/@:\"'<>*]{{0,100}}:{_NO_PORT}(?:(?!://)[^\n<>]){{0,{_LONGEST}}}@(?=[\w\[])",
            rf"\1{MASK}@",
        ),
        ("@", rf"({_SCHEME})[^\s/@:\"'<>]{{0,100}}:[^\s<>]{{0,{_LONGEST}}}@(?=[\w\[])", rf"\1{MASK}@"),
        # the same, cut by a line end
        (
            "@",
            rf"({_SCHEME})[^\s/@:\"'<>*]{{0,100}}:{_NO_PORT}[^\s@\"'<>]{{0,100}}\n\s{{0,9}}[^\s@\"'<>:]{{0,100}}@(?=\w)",
            rf"\1{MASK}@",
        ),
        ("@", rf"({_SCHEME})[^\s/\"'<>]{{0,{_LONGEST}}}@", rf"\1{MASK}@"),
        ("@", r"(?<![\w./:@+-])[\w.+-]{1,64}:(?!//)[^\s@\"'<>]{1,100}@(?!sha256:)(?=[a-z0-9])", f"{MASK}@"),
        ("%", rf"({_SCHEME}|3a(?:{_PERCENT}2f){{2}})[^\s/@\"'<>]{{1,{_LONGEST}}}{_PERCENT}40", rf"\1{MASK}%40"),
        # addresses that are secrets themselves
        ("hook", r"(//[\w.-]{1,60}/(?:api/webhooks|services|workflows|triggers|webhookb2)/)[^\s\"'<>*]+", rf"\1{MASK}"),
        ("=", rf"([?&;]{_QUERY_NAME}=){_VALUE}+", rf"\1{MASK}"),
        ("%", rf"({_PERCENT}(?:3f|26|3b|23){_QUERY_NAME}{_PERCENT}3d)[^\s%&\"'<>]+", rf"\1{MASK}"),
        # a block of YAML, lists, tuples and bytes of Python, and options of a command
        (
            ":",
            rf"({_BEFORE_NAME}{_NAME}:[ \t]{{0,3}})[|>][+-]?\d?[ \t]*(?:\n[ \t]+[^\n]{{0,{_LONGEST_QUOTED}}}){{1,100}}",
            rf"\1{MASK}",
        ),
        (
            "",
            rf"({_BEFORE_NAME}(?:{_NAME}|auth)[\"']?\s{{0,3}}[:=]\s{{0,3}})[\[(][^\])\n]{{0,{_LONGEST}}}[\])]",
            rf"\1{MASK}",
        ),
        ("", rf"({_BEFORE_NAME}{_NAME}[\"']?\s{{0,3}}[:=]\s{{0,3}})b{_QUOTED}", rf"\1{MASK}"),
        ("--", rf"(--(?:{_NAME}|token){_QUOTE},?\s{{1,3}}){_QUOTED}", rf"\1\2{MASK}\2"),
        ("-", rf"((?<![\w-])--?(?:{_NAME}|token)(?:=|\s{{1,3}}))(?![-\[]){_VALUE}+", rf"\1{MASK}"),
        # the same in lists of YAML
        ("--", rf"(\[[^\]\n]{{0,200}}?--(?:{_NAME}|token),\s{{1,3}})(?![-\[]){_VALUE}+", rf"\1{MASK}"),
        (
            "--",
            rf"(-\s{{1,3}}--(?:{_NAME}|token)[ \t]{{0,3}}\n[ \t]{{0,40}}-[ \t]{{1,3}})(?![-\[])[^\n]+",
            rf"\1{MASK}",
        ),
        ("-u", rf"(\s(?:-u|--user)(?:=|\s{{1,3}})[\w.@-]{{1,64}}:)(?!\*\*\*){_VALUE}+", rf"\1{MASK}"),
        # a header of many parts, then a value by its name: quoted, then a word, or the words of a line
        (
            "",
            rf"({_BEFORE_NAME}{_HEADER}{_QUOTE}?\s{{0,3}}[:=]\s{{0,3}}+)(?:digest|oauth|aws4-\S+)\s[^\n]+",
            rf"\1{MASK}",
        ),
        ("", rf"({_BEFORE_NAME}{_NAME}{_QUOTE}?{_SEPARATOR}){_QUOTED}", rf"\1\2{MASK}\2"),
        ("=", rf"({_BEFORE_NAME}token\s{{0,3}}=\s{{0,3}}){_QUOTED}", rf"\1\2{MASK}\2"),
        ("=", rf"({_BEFORE_NAME}(?:{_NAME}|token)\s{{0,3}}=\s{{0,3}}){_VALUE}+", rf"\1{MASK}"),
        (
            "",
            rf"({_BEFORE_NAME}{_NAME}{_QUOTE}?{_BEFORE_WORDS})(?![\[({{\s]|{_QUOTE})[^\n\"'<>,;)}}\]&]+",
            rf"\1{MASK}",
        ),
        ("s", rf"({_BEFORE_NAME}{_NAME}{_IS}){_QUOTED}", rf"\1\2{MASK}\2"),
        ("s", rf"({_BEFORE_NAME}{_NAME}{_IS})(?!{_STATE}\b|{_QUOTE}|[\[(*]){_VALUE}+", rf"\1{MASK}"),
        ("<", rf"(<{_NAME}>)[^<\n]{{1,{_LONGEST_QUOTED}}}(?=</)", rf"\1{MASK}"),
        (":", rf"({_BEFORE_NAME}token[\"']?\s{{0,3}}:\s{{0,3}})([\"'])[^\s\"']{{16,{_LONGEST}}}\2", rf"\1\2{MASK}\2"),
        (
            "",
            rf"({_BEFORE_NAME}(?:[a-z0-9]{{1,30}}[_-]){{0,4}}token{_QUOTE}?\s{{0,3}}[:=]\s{{0,3}}{_QUOTE}?)(?={_LONG}\b){_VALUE}+",
            rf"\1{MASK}",
        ),
        (
            "",
            rf"({_BEFORE_NAME}{_HEADER}{_QUOTE}?\s{{0,3}}[:=]\s{{0,3}}+{_QUOTE}?+)(?!\*\*\*)[^\n\"',}}\\]+",
            rf"\1{MASK}",
        ),
        ("", r"(\b(?:bearer|basic)\s{1,3})[a-z0-9._~+/=-]{8,}", rf"\1{MASK}"),
        (
            "",
            rf"(\b(?:api[ _-]?key(?::|\s{{1,3}}is|)|token\s{{1,3}}is)\s{{1,3}})(?={_LONG}\b)[\w.~+/=-]+",
            rf"\1{MASK}",
        ),
        (
            "",
            _KNOWN_FORMS,
            MASK,
        ),
        ("-----BEGIN ", r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)[^-]*", rf"\1{MASK}"),
    )
)
# No rule matches a text without one of these.
_MAY_BE = re.compile(
    r"[@=]|key|token|auth|cookie|bearer|basic|pass|pwd|secret|credential|hook|%|-u|eyJ|AKIA|ASIA|AIza|ya29|gh[pousr]_|glpat|hf_|sk-"
    r"|xox|npm_|pypi-|github_pat",
    re.IGNORECASE,
)
# Letters that show nothing: within a name or a value they hide what it is.
_ZERO_WIDTH = re.compile(r"[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
_SECRET_NAME = re.compile(rf"{_NAME}|{_HEADER}", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"(?:^|[_-])token$", re.IGNORECASE)
_LOOKS_SECRET = re.compile(_LONG)


def masked(text: str) -> str:
    """Return a text with its secrets masked; letters of no width stay, unless they hide a secret."""
    safe = _masked(text)
    if not safe.isascii() and (plain := _ZERO_WIDTH.sub("", safe)) != safe and (more := _masked(plain)) != plain:
        return more
    return safe


def _masked(text: str) -> str:
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
        above = name if names_secret(name, value) else ""
        return {_masked_key(key): masked_values(below, above or str(key)) for key, below in value.items()}
    if isinstance(value, list | tuple):
        if name.lower() == "auth":  # user and password
            return type(value)(MASK for _ in value)
        # What follows an option of a command is its value, as in ["--password", "..."].
        options = ["", *(below.lstrip("-") if below.startswith("-") else "" for below in map(str, value))]
        return type(value)(masked_values(below, option or name) for below, option in zip(value, options, strict=False))
    if names_secret(name, value):
        return MASK
    return masked(value) if isinstance(value, str) else value


def _masked_key(key: Any) -> Any:
    return masked(key) if isinstance(key, str) else key


def names_secret(name: str, value: object) -> bool:
    """Return whether a key has a secret as its value, by its name; nothing, and true and false, are none."""
    if value is None or value == "" or isinstance(value, bool):
        return False
    name = _ZERO_WIDTH.sub("", name)
    is_token = _TOKEN_NAME.search(name) and isinstance(value, str) and _LOOKS_SECRET.fullmatch(value) is not None
    return bool(is_token) or _SECRET_NAME.fullmatch(name) is not None
