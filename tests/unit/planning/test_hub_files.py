"""Hub models are checked before anything is loaded. Only small files are read, from the hub or from the local cache."""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from understudy.assets import quickstart_model
from understudy.errors import DataError
from understudy.planning.models import hub_files

STUDENT = quickstart_model("student")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPEN_MODEL = """
import sys, time
from understudy.errors import DataError
from understudy.planning.models.hub_files import hub_folder
try:
    found = hub_folder(sys.argv[1], "student.model")
    print("found", found and (found.vocab_size, len(found.token_ids), bool(found.ends)))
except DataError as error:
    print("refused", error)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


class Hub(BaseHTTPRequestHandler):
    """A fake hub that serves the files of one model."""

    requested: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.requested.append(self.path)
        parts = self.path.strip("/").split("/")
        if parts[:3] != ["maker", "tiny", "resolve"]:
            self.send_response(200 if self.path == "/" else 404)
            if self.path != "/":
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        file = STUDENT / parts[-1]
        content = file.read_bytes() if file.is_file() else b""
        self.send_response(200 if file.is_file() else 404)
        if not file.is_file():
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    Hub.requested = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Hub.requested
    server.shutdown()


def open_in_child(model: str, home: Path, endpoint: str, **more: str) -> str:
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **more}
    env.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in more else None
    done = subprocess.run(
        [sys.executable, "-c", OPEN_MODEL, model], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_small_files_are_read_from_the_hub_and_offline_from_the_local_cache(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, requested = hub
    rows = json.loads((STUDENT / "config.json").read_text())["vocab_size"]
    assert open_in_child("maker/tiny", tmp_path, url).startswith(f"found ({rows}, ")
    assert not any("safetensors" in path for path in requested), "weights were downloaded"
    before = len(requested)
    assert open_in_child("maker/tiny", tmp_path, url, HF_HUB_OFFLINE="1").startswith(f"found ({rows}, ")
    assert len(requested) == before, "the hub was asked although HF_HUB_OFFLINE is set"
    assert "the hub has no such model" in open_in_child("maker/other", tmp_path, url)


def test_a_model_that_is_neither_a_folder_nor_cached_nor_reachable_is_refused_without_retries(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    message = open_in_child("nothere", tmp_path, "http://127.0.0.1:9")
    assert "no such folder here" in message and "cannot be asked" in message
    message = open_in_child("maker/tiny", tmp_path, "http://127.0.0.1:9")
    assert "no such model in the local hub cache" in message and "(was not reached)" in message
    assert "(HF_HUB_OFFLINE is set)" in open_in_child(
        "maker/tiny", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1"
    )
    assert time.monotonic() - began < 60, "no retries"


COMMANDS = """
import sys
from understudy.cli.main import main
for command in ("check", "train"):
    print("==", main([command, "recipe.toml"]), flush=True)
assert "torch" not in sys.modules
"""


def test_an_unreachable_hub_is_a_note_in_check_and_an_error_in_train(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "recipe.toml").write_text(
        '[student]\nmodel = "maker/tiny"\n[teachers.t]\nmodel = "maker/large"\n[data]\ntrain = "rows.jsonl"\n'
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    env.pop("HF_HUB_OFFLINE", None)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    check, train, _ = done.stdout.split("==")
    student = "student.model = 'maker/tiny': no such folder here, no such model in the local hub cache"
    assert f"note       {student}" in check and "note       teachers.t.model = 'maker/large'" in check
    assert "note       prompts were not measured" in check and "the recipe is sound" in check
    assert train.startswith(" 0\n") and f"error: {student}" in train
    assert done.stdout.endswith("== 2\n") and time.monotonic() - began < 60, "no retries"


def test_evaluate_model_refuses_a_model_of_an_unreachable_hub_before_loading_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from understudy.run.evaluate_model import evaluate_model  # imports torch, which the tests above need not

    monkeypatch.setattr(hub_files, "hub_answers", lambda endpoint: False)
    with pytest.raises(DataError, match=r"^model = 'maker/tiny': .* cannot be asked"):
        asyncio.run(evaluate_model("maker/tiny", "rows.jsonl", "m:f", None, None))
