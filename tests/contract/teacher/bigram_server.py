"""A stand-in for vLLM's server over a model that can be enumerated: p(y | x) is proportional to `weight(x, y)`.

It needs only the standard library, so it starts at once.

`VLLM_PLAN` names a file with the behaviour of each start of a server; the last entry holds for all later starts. An
entry is `serves`, `dies at once`, or a number of answers after which the server is killed. The command lines of all
starts are kept beside the file, one per line.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import itertools
import json
import math
import os
import signal
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any

LAST_WORDS = "ValueError: No available memory for the cache blocks."


def weight(x: int, y: int) -> int:
    return 1 + (7 * x + 13 * y + x * y) % 29


@functools.cache
def logprobs(x: int, vocabulary: int) -> list[float]:
    weights = [weight(x, y) for y in range(vocabulary)]
    return [math.log(one / sum(weights)) for one in weights]


def stand_in(folder: Path, plan: str = "serves") -> dict[str, str]:
    """Writes a package `vllm` that is this server; returns the environment in which it is found."""
    package = folder / "stand-in" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, *package.parents[:2]):
        (part / "__init__.py").touch()
    (package / "api_server.py").write_text("import bigram_server\nbigram_server.main()\n")
    (folder / "plan").write_text(plan)
    paths = [str(folder / "stand-in"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_PLAN": str(folder / "plan")}


def lives(folder: Path) -> list[list[str]]:
    """The command lines of all servers started so far."""
    return [json.loads(line) for line in (folder / "plan.lives").read_text().splitlines()]


def _prompt_logprobs(tokens: list[int], k: int, vocabulary: int) -> list[dict[str, Any] | None]:
    listed: list[dict[str, Any] | None] = [None]
    for before, own in itertools.pairwise(tokens):
        row = logprobs(before, vocabulary)
        best = sorted(range(vocabulary), key=lambda y: (-row[y], y))
        ids = dict.fromkeys([own, *best[:k]])
        listed.append({str(y): {"logprob": row[y], "rank": best.index(y) + 1} for y in ids})
    return listed


def main() -> None:
    plan = Path(os.environ["VLLM_PLAN"])
    with plan.with_suffix(".lives").open("a+") as kept:
        kept.seek(0)
        life = len(kept.readlines())
        kept.write(json.dumps(sys.argv[1:]) + "\n")
    actions = plan.read_text().split(",")
    does = actions[min(life, len(actions) - 1)]
    if does == "dies at once":
        sys.exit(LAST_WORDS)
    left = int(does) if does.isdigit() else None
    parser = argparse.ArgumentParser()
    for option in ("--uds", "--model", "--served-model-name"):
        parser.add_argument(option, required=True)
    for option in ("--max-model-len", "--max-logprobs"):
        parser.add_argument(option, type=int)
    known, _ = parser.parse_known_args()
    config = json.loads((Path(known.model) / "config.json").read_text())
    vocabulary, longest = config["vocab_size"], known.max_model_len or config["max_position_embeddings"]
    counting = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, body: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            served = {"id": known.served_model_name, "root": known.model, "max_model_len": longest}
            self.reply({"data": [served]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            nonlocal left
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/inference/v1/generate":
                self.reply({"detail": "Not Found"}, 404)
                return
            k = asked["sampling_params"]["prompt_logprobs"]
            if k > known.max_logprobs:
                message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {known.max_logprobs}"
                self.reply({"error": {"message": message}}, 400)
                return
            with counting:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left = None if left is None else left - 1
            listed = _prompt_logprobs(asked["token_ids"], k, vocabulary)
            self.reply({"request_id": "x", "choices": [{"index": 0}], "prompt_logprobs": listed})

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True
        request_queue_size = 64

    Server(known.uds, Handler).serve_forever()
