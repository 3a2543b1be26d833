"""Helpers of teacher tests: tiny models on disk, real replica processes, and a launcher for them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from understudy.cluster import fork_server
from understudy.serving.endpoint import Endpoint
from understudy.types.scores import ScoreItem, Signal

transformers_logging.disable_progress_bar()

VOCAB = 61
TOKEN = "test-token"


def write_tokenizer(folder: Path, vocab: dict[str, int], special: dict[str, str]) -> None:
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        "added_tokens": [],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


EXPERTS: dict[str, dict[str, object]] = {
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""Models with experts, beside the shape that all models have."""


def write_model(
    folder: Path, kind: str = "qwen3", seed: int = 0, vocab: int = VOCAB, **changes: object
) -> Path:
    """A random model of a real architecture with large enough weights that its scores are far from uniform."""
    shape = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        **changes,
    }
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if kind in EXPERTS:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**EXPERTS[kind], **shape}))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    names = {f"t{i}": i for i in range(vocab)}
    write_tokenizer(folder, names, {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0"})
    return folder


def random_items(
    count: int,
    seed: int = 0,
    signal: Signal = Signal.SAMPLED,
    k: int = 0,
    vocab: int = VOCAB,
    lengths: tuple[int, int] = (3, 30),
) -> list[ScoreItem]:
    rng = np.random.default_rng(seed)
    items = []
    for i in range(count):
        length = int(rng.integers(*lengths))
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        wanted = np.flatnonzero(rng.random(length - 1) < 0.6) + 1
        positions = (wanted if len(wanted) else np.array([length - 1])).astype(np.int32)
        ids = (
            rng.integers(0, vocab, (len(positions), k)).astype(np.int32) if signal is Signal.AT_IDS else None
        )
        items.append(
            ScoreItem(f"row-{seed}-{i}", tokens, positions, signal, k if signal is Signal.TOPK else 0, ids)
        )
    return items


@dataclass
class ReplicaProcess:
    process: subprocess.Popen[bytes]
    watch: int
    """Our end of the pipe; the replica exits when it closes."""
    log: Path
    url: str = ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        self.kill()
        self.process.wait(30)
        if self.watch >= 0:
            os.close(self.watch)
            self.watch = -1


def spawn_replica(
    model: Path, folder: Path, name: str = "math", *options: str, token: str | None = TOKEN
) -> ReplicaProcess:
    """Start a real server process; `await_ready` waits until it can score."""
    folder.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("UNDERSTUDY_TOKEN", None)
    if token is not None:
        env["UNDERSTUDY_TOKEN"] = token
    command = [
        sys.executable,
        "-m",
        "understudy.teacher.replica.server",
        "--model",
        str(model),
        "--name",
        name,
    ]
    command += [
        "--threads",
        "1",
        "--ready-file",
        str(folder / "ready.json"),
        "--watch-fd",
        str(read_end),
        *options,
    ]
    log = folder / "log.txt"
    with log.open("ab") as stream:
        process = subprocess.Popen(command, env=env, stdout=stream, stderr=stream, pass_fds=[read_end])
    os.close(read_end)
    return ReplicaProcess(process, write_end, log)


def ready_url(replica: ReplicaProcess, folder: Path) -> str | None:
    ready = folder / "ready.json"
    if replica.process.poll() is not None:
        raise RuntimeError(
            f"replica ended with {replica.process.returncode}: {replica.log.read_text()[-2000:]}"
        )
    return json.loads(ready.read_text())["url"] if ready.exists() else None


def await_ready(replica: ReplicaProcess, folder: Path, seconds: float = 90) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if url := ready_url(replica, folder):
            replica.url = url
            return url
        time.sleep(0.05)
    raise RuntimeError(f"replica not ready: {replica.log.read_text()[-2000:]}")


class ReplicaForkServer:
    """Forks real replica processes from one that has already imported everything; see replica_fork_server.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        (orders_read, orders_write), (answers_read, answers_write) = os.pipe(), os.pipe()
        self.orders, self.answers = os.fdopen(orders_write, "w"), os.fdopen(answers_read)
        self.process = self._forked(env, answers_write, orders_read) or subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("replica_fork_server.py"))],
            env=env,
            stdin=orders_read,
            stdout=answers_write,
        )
        os.close(orders_read)
        os.close(answers_write)
        self.count = 0
        self._answer()

    @staticmethod
    def _forked(env: Mapping[str, str], answers: int, orders: int) -> fork_server.ChildProcess | None:
        """By the fork server of this test process, which has imported torch already, if there is one."""
        server = fork_server.current()
        if server is None or not server.takes(env):
            return None
        while not server.ready():
            if server.over:
                return None
            time.sleep(0.05)
        return server.start("replica_fork_server", [], env, answers, orders)

    def _answer(self) -> dict[str, int]:
        line = self.answers.readline()
        if not line:
            raise RuntimeError("the fork server ended")
        return json.loads(line)

    def fork(
        self,
        model: Path,
        options: Sequence[str] = (),
        lie: str | None = None,
        rate: float = 1.0,
        seed: int = 0,
        name: str = "math",
    ) -> Child:
        self.count += 1
        folder = self.folder / f"replica-{self.count}"
        folder.mkdir(parents=True)
        argv = [
            "--model",
            str(model),
            "--name",
            name,
            "--threads",
            "1",
            "--ready-file",
            str(folder / "ready.json"),
            *options,
        ]
        order = {
            "argv": argv,
            "log": str(folder / "log.txt"),
            "token": TOKEN,
            "lie": lie,
            "rate": rate,
            "seed": seed,
        }
        self.orders.write(json.dumps(order) + "\n")
        self.orders.flush()
        return Child(self._answer()["pid"], folder)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.orders.close()
        self.answers.close()


_SHARED: list[ReplicaForkServer] = []


def shared_fork_server(folders: pytest.TempPathFactory) -> ReplicaForkServer:
    """The fork server shared by all tests of this process, since its imports take seconds. It ends with the process."""
    if not _SHARED:
        _SHARED.append(ReplicaForkServer(folders.mktemp("fork_server")))
        atexit.register(_SHARED[0].close)
    return _SHARED[0]


@dataclass
class Child:
    """A forked replica, known by its process id."""

    pid: int
    folder: Path

    @property
    def log(self) -> str:
        path = self.folder / "log.txt"
        return path.read_text() if path.exists() else ""

    @property
    def lies(self) -> list[str]:
        """The kinds of corrupted replies it has sent, in order."""
        return re.findall(r"^lied: (\w+)$", self.log, re.MULTILINE)

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def exit_code(self, seconds: float = 30) -> int | None:
        """Its exit code once it has ended; None when it was killed."""
        until = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < until, f"replica {self.pid} still runs: {self.log[-2000:]}"
            time.sleep(0.02)
        code = self.folder / "exit"
        return int(code.read_text()) if code.exists() else None

    async def ready(self, seconds: float = 60) -> Endpoint:
        until = time.monotonic() + seconds
        while not (self.folder / "ready.json").exists():
            if not self.alive() or time.monotonic() > until:
                raise RuntimeError(f"replica {self.pid} did not start: {self.log[-2000:]}")
            await asyncio.sleep(0.02)
        return Endpoint(json.loads((self.folder / "ready.json").read_text())["url"], TOKEN)

    async def end(self) -> None:
        self.signal(signal.SIGKILL)
        while self.alive():
            await asyncio.sleep(0.01)


@dataclass
class ForkServerLauncher:
    """A launcher over real processes, as a cluster would be."""

    fork_server: ReplicaForkServer
    model: Path
    options: Sequence[str] = ()
    lies: dict[str, tuple[str, float, int]] = field(default_factory=dict)
    """Replica → (kind of corrupted reply, rate, seed)."""
    children: dict[str, Child] = field(default_factory=dict)
    every: list[Child] = field(default_factory=list)
    down: bool = False
    """While set, nothing can be started: the machine is down."""

    async def start(self, replica: str) -> Endpoint:
        if self.down:
            raise RuntimeError("the machine is down")
        lie, rate, seed = self.lies.get(replica, (None, 0.0, 0))
        child = self.fork_server.fork(self.model, self.options, lie, rate, seed)
        self.children[replica] = child
        self.every.append(child)
        return await child.ready()

    async def stop(self, replica: str) -> None:
        if replica in self.children:
            await self.children.pop(replica).end()

    def end_of_log(self, replica: str) -> str:
        return ""

    def alive(self, replica: str) -> bool:
        return replica in self.children and self.children[replica].alive()
