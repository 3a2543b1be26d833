"""Secrets are hidden and control characters are escaped before text is shown or logged."""

import json
import logging
from pathlib import Path

import pytest

from understudy.observability.logs import log_to
from understudy.observability.redact import HIDDEN, hidden_values, printable, redact, redact_text, restore


@pytest.mark.parametrize(
    "text",
    [
        "https://S3CRET@host/x", "http://:S3CRET@h", "http://me:S3CRET@h", "http://h/?apikey=S3CRET", "http://h/?a=1&auth=S3CRET",
        "http://h/?hf_token=S3CRET&b=2", "http://h/?password=S3CRET", "Authorization: Bearer S3CRET", "--api-key=S3CRET", "--hf-token=S3CRET",
    ],
)  # fmt: skip
def test_redact_text_hides_secrets_in_urls_headers_and_options(text: str) -> None:
    assert "S3CRET" not in redact_text(text) and HIDDEN in redact_text(text)


@pytest.mark.parametrize(
    "name", ["api-key", "AWS_SECRET_ACCESS_KEY", "auth", "tokens", "token", "apikey", "db_password"]
)
def test_redact_hides_values_under_keys_that_name_a_secret(name: str) -> None:
    assert "S3CRET" not in str(redact({"a": [{name: "S3CRET"}]}))
    assert "S3CRET" not in str(redact({name: ["S3CRET", "S3CRET"]}))


def test_redact_hides_secrets_among_program_arguments_and_restore_brings_them_back() -> None:
    given = [
        "--port",
        "80",
        "--api-key",
        "S3CRET",
        "--hf-token=S3CRET",
        "--max-num-batched-tokens=8192",
        "--hf-token",
        "--x",
    ]
    shown = ["--port", "80", "--api-key", HIDDEN, f"--hf-token={HIDDEN}", *given[5:]]
    assert redact({"engine_args": given}) == {"engine_args": shown}
    back = {"engine_args": shown}
    restore(back, hidden_values({"engine_args": given}))
    assert back == {"engine_args": given}


def test_restore_fills_only_the_places_that_are_still_hidden() -> None:
    table = {"a": {"token": "x"}, "b": ["http://me:pw@h/", "plain"], "c": {"token": "y"}, "d": {"token": "z"}}
    stored = json.loads(json.dumps(redact(table)))
    stored["c"]["token"] = "another by now"
    del stored["d"]
    restore(stored, json.loads(json.dumps(hidden_values(table))))
    assert stored == {"a": {"token": "x"}, "b": table["b"], "c": {"token": "another by now"}}


def test_redact_leaves_values_that_are_not_secrets_unchanged() -> None:
    plain = {"max_new_tokens": 8, "key": "add", "url": "http://host:8000/v1", "mail": "a@b.c", "author": "me"}
    assert redact(plain) == plain


def test_printable_escapes_terminal_control_sequences_and_keeps_other_characters() -> None:
    text = "nope\x1b]0;PWNED\x07\x1b[2J \u202e \x9b1m\r"
    assert printable(text) == "nope\\x1b]0;PWNED\\x07\\x1b[2J \\x202e \\x9b1m\\x0d"
    assert printable("two lines\n\tand ünïcödé 漢字 😀") == "two lines\n\tand ünïcödé 漢字 😀"


def test_a_newline_in_logged_data_cannot_forge_a_log_line(tmp_path: Path) -> None:
    handler = log_to(tmp_path / "log")
    try:
        forged = "2026-11-16 10:00:00,000 INFO understudy.trainers: all is well"
        logging.getLogger("understudy.test").warning("row x failed: %s", f"\x1b[2J\n{forged}")
    finally:
        logging.getLogger("understudy").removeHandler(handler)
        handler.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2 and "\\x1b[2J" in lines[0] and lines[1] == f"    {forged}"
