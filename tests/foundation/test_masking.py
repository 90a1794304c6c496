"""Secrets in text and values are masked, and what looks like them is not."""

from typing import Any

import pytest

from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import BatonError, StorageError
from baton.tasks.foundation.masking import masked, masked_values
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.foundation.text import shown, shown_lines

SECRET = [
    ("https://me:secret@host:5000/x", "https://***@host:5000/x"),
    ("https://me:se/cret@host/x", "https://***@host/x"),
    ("https://me:se cret@host/x failed", "https://***@host/x failed"),
    ("uri: https://me:s@c/r et@host:5000, experiment: x", "uri: https://***@host:5000, experiment: x"),
    ("https://me:s\"ecr'et@host", "https://***@host"),
    ("http://me:1234/secret@host/x", "http://***@host/x"),
    ("http://:secret@host", "http://***@host"),
    ("https://secret@host", "https://***@host"),
    ("postgresql+psycopg2://me:secret%40@host/db", "postgresql+psycopg2://***@host/db"),
    ("https://a:secret@host and wss://b:secret@[::1]/x", "https://***@host and wss://***@[::1]/x"),
    ("cannot reach me:secret@db.internal:5432/x", "cannot reach ***@db.internal:5432/x"),
    ("https://host/x?api_key=secret&page=1", "https://host/x?api_key=***&page=1"),
    ("https://host/x?a=1&token=secret", "https://host/x?a=1&token=***"),
    ("https://host/x?sig=secret%2B&se=2026", "https://host/x?sig=***&se=2026"),
    ("https://host/x?X-Goog-Signature=5ec2e7&X-Goog-Date=2", "https://host/x?X-Goog-Signature=***&X-Goog-Date=2"),
    ("https://host/x?X-Amz-Credential=secret", "https://host/x?X-Amz-Credential=***"),
    ("https://host/x?key=secret", "https://host/x?key=***"),
    ("MLFLOW_TRACKING_PASSWORD=secret WANDB_API_KEY=secret", "MLFLOW_TRACKING_PASSWORD=*** WANDB_API_KEY=***"),
    ("connect(host='h', password='se cret', n=1)", "connect(host='h', password='***', n=1)"),
    ("--set data.options.token=secret", "--set data.options.token=***"),
    ('{"password": "secret", "n": 1}', '{"password": "***", "n": 1}'),
    ("data.options.api_key: 'secret': unknown", "data.options.api_key: '***': unknown"),
    ("data: {password: secret, n: 1}", "data: {password: ***, n: 1}"),
    ("Authorization: Bearer secret", "Authorization: ***"),
    ("{'Authorization': 'Basic c2VjcmV0OnNlY3JldA=='}", "{'Authorization': '***'}"),
    ("sent Bearer secret.secret-secret", "sent Bearer ***"),
    ("X-Api-Key: secret", "X-Api-Key: ***"),
    ("Set-Cookie: session=secret; Path=/", "Set-Cookie: ***"),
    ("'password': ['secret', 'b'], 'n': 1", "'password': ***, 'n': 1"),
    ("{'api_key': b'secret'}", "{'api_key': ***}"),
    ("post(url, auth=('me', 'secret'))", "post(url, auth=***)"),
    ("tool --password secret --api-key=secret -v", "tool --password *** --api-key=*** -v"),
    ("DB_PASS=secret clientSecret=secret", "DB_PASS=*** clientSecret=***"),
    ("AccountKey=secret;EndpointSuffix=x", "AccountKey=***;EndpointSuffix=x"),
    ("token: hf_secret0123456789", "token: ***"),
    ("https://host/x?sas=secret&jwt=secret", "https://host/x?sas=***&jwt=***"),
    (r'{"detail": "{\"password\": \"secret\", \"n\": 1}"}', r'{"detail": "{\"password\": \"***\", \"n\": 1}"}'),
    (r'"\"{\\\"api_key\\\": \\\"secret\\\"}\""', r'"\"{\\\"api_key\\\": \\\"***\\\"}\""'),
    ("GET https%3A%2F%2Fme%3Asecret%40host%2Fx", "GET https%3A%2F%2F***%40host%2Fx"),
    ("https%253A%252F%252Fme%253Asecret%2540host", "https%253A%252F%252F***%40host"),
    ("https%3A%2F%2Fhost%3Ftoken%3Dsecret%26a%3D1", "https%3A%2F%2Fhost%3Ftoken%3D***%26a%3D1"),
    ("https://me:secret%40host/x", "https://***%40host/x"),
    ("PRIVATE-TOKEN: secretsecret1234", "PRIVATE-TOKEN: ***"),
    ("MLFLOW_TRACKING_TOKEN=secret GITHUB_TOKEN=secret", "MLFLOW_TRACKING_TOKEN=*** GITHUB_TOKEN=***"),
    ("PGPASSWORD=secret MYSQL_PWD=secret PASSWORD_2=secret", "PGPASSWORD=*** MYSQL_PWD=*** PASSWORD_2=***"),
    ("pass=secret, dbPassword=secret awsSecretAccessKey=secret", "pass=***, dbPassword=*** awsSecretAccessKey=***"),
    ("credentials: secret", "credentials: ***"),
    ('Authorization: Digest username="u", response="secret"', "Authorization: ***"),
    ('password: a secret Authorization: Digest n="u", response="secret"', "password: ***"),
    (r"login(password='a\'secret', n=1)", "login(password='***', n=1)"),
    ("password: two secret words", "password: ***"),
    ("password = secret, password -> secret", "password = ***, password -> ***"),
    ("password: |\n  secret\n  secret\nn: 1", "password: ***\nn: 1"),
    ("password: >-\n  secret", "password: ***"),
    ("['tool', '--password', 'secret', '-v']", "['tool', '--password', '***', '-v']"),
    ("curl -u me:secret https://host", "curl -u me:*** https://host"),
    ("<password>secret</password>", "<password>***</password>"),
    ("password=&quot;secret&quot;", "password=&quot;***&quot;"),
    ("key ghp_secret0123456789 and hf_secret0123456789", "key *** and ***"),
    ("invalid sk-secret0123456789, AKIAsecret0123456789", "invalid ***, ***"),
    ("ya29.secret0123456789 eyJhbGciOi.secret0.secret", "*** ***"),
    ("ERROR API key secret0123456789", "ERROR API key ***"),
    ("https://hooks.slack.com/services/T0/secret", "https://hooks.slack.com/services/***"),
    ("https://discord.com/api/webhooks/1/secret", "https://discord.com/api/webhooks/***"),
    ("password='secret" + 3000 * "x" + "' n", "password='***' n"),
    ("the password is secret, it says", "the password is ***, it says"),
    ("db_password was: 'se cret'", "db_password was: '***'"),
    ("the token is secret0123456789", "the token is ***"),
    ("pass\u200bword=secret, n=1", "password=***, n=1"),
    ("p\u00adassword: secret", "password: ***"),
    ("hf_\u2060secret0123\u200d456789", "***"),
    ("my\u200bpass=secret, pass\u200bword=secret", "mypass=***, password=***"),
    ("args: [tool, --password, secret, -v]", "args: [tool, --password, ***, -v]"),
    ("- --password\n- secret\n- -v", "- --password\n- ***\n- -v"),
    ("java -password secret -v", "java -password *** -v"),
    ("https://me:sec\nsecret@host/x", "https://***@host/x"),
    ("https://me:secret\n  @host/x", "https://***@host/x"),
    ("http://host:5000/x\nmail me@host", "http://host:5000/x\nmail me@host"),
    ("http://host:5000\nme@host", "http://host:5000\nme@host"),
    (
        "-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----***-----END PRIVATE KEY-----",
    ),
]
PLAIN = [
    "gs://bucket/prefix is fine, mail a@b.com",
    "http://127.0.0.1:5000/api and mail a@b.com",
    "https://host/a@b",
    "https://[::1]:80/",
    "sqlite:////home/me/mlflow.db",
    "model.options.oov_token: '[UNK]' -> '<unk>'",
    "model.options.token: 'word' -> 'char'",
    "max_tokens=512, pad_token='x', key=value, signature=(x, y)",
    "registry/baton:1.0@sha256:abcd",
    "model.py:build_model, line 3: x @ y",
    "12:30:01 x@y.z",
    "bypass=1, compass: north, TOKENIZERS_PARALLELISM=false, MAX_TOKENS=512",
    "start_token: 'begin', task-runner-1234567890, hf_model_without_a_number",
    "100% of key frames, a%40b, tokens: 12, passes: 3",
    "password [optional] --password-file p author=(x, y) token: word",
    "the password is wrong, the api_key is not set, a forward pass is slow, the token is a word",
    "give --password, or a file",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 key=value, a joined \u200d letter",
]


@pytest.mark.parametrize(("text", "safe"), SECRET)
def test_secrets_are_masked_in_everything_that_is_said(text: str, safe: str) -> None:
    assert masked(text) == safe
    assert masked(safe) == safe
    assert shown_lines(text) == safe
    assert Note(text=text).text == safe
    assert str(StorageError(text)) == safe
    report = ErrorReport.of(raised(BatonError(f"it failed: {text}")))
    assert "secret" not in report.to_json().decode()
    assert "secret" not in repr(report.to_error())


def raised(error: BatonError) -> BatonError:
    """The error with a cause that names the secret, as libraries' errors do."""
    try:
        try:
            raise OSError(str(error))  # noqa: TRY301 - its traceback is what counts
        except OSError as cause:
            raise error from cause
    except BatonError as fault:
        return fault


@pytest.mark.parametrize("text", PLAIN)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert masked(text) == text
    assert shown(text) == text


@pytest.mark.parametrize(
    ("value", "safe"),
    [
        ({"mlflow": {"uri": "https://me:secret@host"}}, {"mlflow": {"uri": "https://***@host"}}),
        ({"password": "secret", "n": 1, "none": None}, {"password": "***", "n": 1, "none": None}),
        ({"a": [{"secret_key": "secret"}, "https://me:secret@host"]}, {"a": [{"secret_key": "***"}, "https://***@host"]}),
        ({"token": "hf_secret0123456789"}, {"token": "***"}),
        ({"token": "word", "oov_token": "[UNK]", "tokens": 5}, {"token": "word", "oov_token": "[UNK]", "tokens": 5}),
        ({"password": 1234, "pwd": ["a", 5]}, {"password": "***", "pwd": ["***", "***"]}),
        ({"password": "", "secret": None, "api_key": True}, {"password": "", "secret": None, "api_key": True}),
        ({"headers": {"Authorization": "Bearer secret"}}, {"headers": {"Authorization": "***"}}),
        ({"api_key": {"id": "secret", "n": None}}, {"api_key": {"id": "***", "n": None}}),
        ({"auth": ["me", "secret"], "clientSecret": "secret"}, {"auth": ["***", "***"], "clientSecret": "***"}),
        ({"https://me:secret@host": 1}, {"https://***@host": 1}),
        ({"PGPASSWORD": "secret", "HF_TOKEN": "secret"}, {"PGPASSWORD": "***", "HF_TOKEN": "***"}),
        ({"credentials": {"user": "me"}, "pass": 5}, {"credentials": {"user": "***"}, "pass": "***"}),
        ({"headers": {"PRIVATE-TOKEN": "secret"}}, {"headers": {"PRIVATE-TOKEN": "***"}}),
        ({"args": ["--password", "secret", "--n", "3"]}, {"args": ["--password", "***", "--n", "3"]}),
        ({"args": ["-password", "secret", "3"]}, {"args": ["-password", "***", "3"]}),
        ({"pass\u200bword": "secret", "n": 1}, {"pass\u200bword": "***", "n": 1}),
        (("x", 1.5, True), ("x", 1.5, True)),
    ],
)  # fmt: skip
def test_values_are_masked_by_form_and_by_the_names_of_their_keys(value: Any, safe: Any) -> None:
    assert masked_values(value) == safe
