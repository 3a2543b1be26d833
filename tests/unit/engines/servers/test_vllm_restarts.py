"""vLLM servers that die: restarted a bounded number of times, then given up with their own error message.

The servers are real processes, behind the real launcher and the real `vllm_host`; a small HTTP server stands in for
vLLM. `plan` says what each start of a server does: `serves`, `dies at once`, `dies when asked`, `answers once`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from understudy.cluster.local import LocalProcesses
from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.servers.vllm import VLLMEngine, VLLMSettings, start_vllm
from understudy.errors import EngineError
from understudy.serving.supervisor import Restarts

pytestmark = pytest.mark.timeout(120)

SERVER = """
import http.server, json, os, socketserver, sys
from pathlib import Path

here = Path(os.environ["VLLM_PLAN"])
lives = len(here.with_suffix(".lives").read_text()) if here.with_suffix(".lives").exists() else 0
here.with_suffix(".lives").write_text("x" * (lives + 1))
plan = here.read_text().split(",")
does = plan[min(lives, len(plan) - 1)]
if does == "dies at once":
    sys.exit("ValueError: no room for the KV cache")
answered = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def address_string(self):
        return "unix"
    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.reply({})
    def do_POST(self):
        global answered
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if "token_ids" not in asked:
            self.reply({"success": True})
            return
        if does == "dies when asked" or (does == "answers once" and answered):
            print("torch.AcceleratorError: illegal memory access", file=sys.stderr, flush=True)
            os._exit(3)
        answered += 1
        ids = [5] * asked["sampling_params"]["max_tokens"]
        content = [{"token_id": i, "logprob": -1.0, "rank": 1, "top_logprobs": []} for i in ids]
        choice = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": ids,
                  "weight_versions": [{"version": "", "start": 0, "end": len(ids)}], "logprobs": {"content": content}}
        self.reply({"request_id": "x", "model": "student", "choices": [choice]})

class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

Server(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()
"""


def request_for(key: str) -> GenerateRequest:
    return GenerateRequest(key, np.array([3, 4], np.int32), Sampling(2, ()), seed=1)


def with_server(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan: str,
    most: int,
    body: Callable[[VLLMEngine, list[str]], Awaitable[None]],
) -> int:
    """Runs `body` with an engine over one such server and the engine's notes; returns how often the server was
    started."""
    package = folder / "fake" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, *package.parents[:2]):
        (part / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    (folder / "plan").write_text(plan)
    paths = [str(folder / "fake"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    env = {"VLLM_PLAN": str(folder / "plan")}
    settings = VLLMSettings(sys.executable, str(folder), 64, 16, "float32", env=(env,))

    async def inner() -> None:
        processes, notes = LocalProcesses(folder / "logs", start_timeout=60), list[str]()
        try:
            limits = Restarts(most, first_wait_s=0.05, longest_wait_s=0.2)
            engine = await start_vllm(
                settings, processes, restarts=limits, notify=notes.append, version=0, timeout_s=60
            )
            try:
                await body(engine, notes)
            finally:
                await engine.close()
        finally:
            await processes.close()

    asyncio.run(asyncio.wait_for(inner(), 100))
    return len((folder / "plan.lives").read_text())


def test_a_server_that_dies_at_every_restart_is_given_up_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: VLLMEngine, notes: list[str]) -> None:
        assert (await engine.generate([request_for("a")]))[0].tokens.tolist() == [5, 5]
        os.kill(engine.children["replica-0"].ready["server"], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineError, match="no vLLM server is left") as caught:
            await engine.generate([request_for("b")])
        assert time.monotonic() - began < 50, "raised when the last restart failed, not when the timeout ends"
        message = str(caught.value)
        assert "ValueError: no room for the KV cache" in message
        assert "given up after 2 restarts" in message and "cluster.restarts.rollout" in message
        assert [("(1 of 2)" in one, "(2 of 2)" in one) for one in notes] == [
            (True, False), (False, True), (False, False),
        ]  # fmt: skip
        assert "no room for the KV cache" in notes[1] and "given up" in notes[2]
        await engine.update_weights(1, [])  # no server is left to update

    assert with_server(tmp_path, monkeypatch, "serves,dies at once", 2, body) == 3


@pytest.mark.slow
def test_a_server_that_restarts_but_dies_at_its_first_request_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successful start does not reset the count of restarts; only an answer does."""

    async def body(engine: VLLMEngine, notes: list[str]) -> None:
        with pytest.raises(EngineError, match=r"torch\.AcceleratorError: illegal memory access"):
            await engine.generate([request_for("a")])
        assert sum("is back" in one for one in notes) == 2

    assert with_server(tmp_path, monkeypatch, "dies when asked", 2, body) == 3


@pytest.mark.slow
def test_an_answer_between_two_deaths_resets_the_count_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: VLLMEngine, notes: list[str]) -> None:
        for row in "abc":
            assert (await engine.generate([request_for(row)]))[0].tokens.tolist() == [5, 5]
        assert all("(1 of 1)" in one for one in notes if "started again" in one)

    assert with_server(tmp_path, monkeypatch, "answers once", 1, body) == 3


def test_a_server_that_cannot_start_leaves_no_temporary_folder(tmp_path: Path) -> None:
    """This interpreter has no vLLM."""
    command = ["-m", "understudy.engines.servers.vllm_process", "--python", sys.executable, "--model", "none"]
    ended = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode and "has no vLLM" in ended.stderr
    assert not list(tmp_path.glob("understudy-vllm-*"))
