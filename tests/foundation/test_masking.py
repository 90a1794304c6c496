"""Secrets in text and values are masked, and what looks like them is not."""

from typing import Any

import pytest

from tasks.foundation.contracts.stage_calls import ErrorReport
from tasks.foundation.errors import BatonError, StorageError
from tasks.foundation.messages import masked, masked_values, shown, shown_lines
from tasks.foundation.telemetry.events import Note

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
    "password [optional] --password-file p author=(x, y) token: word",
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
        (("x", 1.5, True), ("x", 1.5, True)),
    ],
)  # fmt: skip
def test_values_are_masked_by_form_and_by_the_names_of_their_keys(value: Any, safe: Any) -> None:
    assert masked_values(value) == safe
