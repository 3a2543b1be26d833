"""Environments over OpenEnv's protocol: an episode is one trajectory, its rewards are summed, sessions are separate.

The server is a process that speaks the protocol. If UNDERSTUDY_OPENENV_PYTHON names an interpreter with the package
`openenv`, the tests also run against the package's own server.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.engines.base import Generation, Sampling
from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.registry import build_loop
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

HERE = Path(__file__).parent
TOKENIZER = chat_tokenizer("chatml")
SERVERS = ["stand_in", "package"]


def serving(kind: str, sessions: int) -> Iterator[str]:
    python = sys.executable if kind == "stand_in" else os.environ.get("UNDERSTUDY_OPENENV_PYTHON")
    if python is None:
        pytest.skip("UNDERSTUDY_OPENENV_PYTHON names no interpreter with the package openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = "openenv_stand_in.py" if kind == "stand_in" else "small_openenv.py"
    server = subprocess.Popen([python, str(HERE / name), str(port), str(sessions)])
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from serving(request.param, 1)


def play(url: str, players: Sequence[Sequence[str]], context: int = 512, **options: Any) -> list[Any]:
    """Runs concurrent sessions in which the engine generates the given texts. Returns trajectories or errors."""

    def student(texts: Sequence[str], place: int) -> LoopContext:
        async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
            ids = [*TOKENIZER(texts[turn], add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
            many = len(ids)
            return Generation(
                np.array(ids, np.int32), np.zeros(many, np.float32), np.zeros(many, np.int32), StopReason.EOS
            )

        renderer = Renderer(TOKENIZER, context=context)
        return LoopContext(generate, renderer, Sampling(400), f"00000-000000{place}", 0, context)

    async def body() -> list[Any]:
        loop = build_loop("openenv", {"url": url, "action": "guess", **options})
        try:
            prompts = [
                Prompt(f"00000-000000{i}", i, 0, "", messages=({"role": "user", "content": "Let us play."},))
                for i in range(len(players))
            ]
            runs = [loop.run(p, student(t, p.ordinal)) for p, t in zip(prompts, players, strict=True)]
            return await asyncio.gather(*runs, return_exceptions=True)
        finally:
            await loop.close()  # type: ignore[attr-defined]

    return asyncio.run(body())


def test_an_openenv_episode_is_one_trajectory_with_the_sum_of_its_rewards(url: str) -> None:
    ((row,),) = play(url, [["5", "20", "10"]])
    assert isinstance(row, Trajectory) and row.turns == 3 and row.reward == pytest.approx(0.5)
    assert row.metrics["env/steps"] == 3.0 and row.metrics["env/done"] == 1.0
    text = TOKENIZER.decode(row.tokens)
    assert "Let us play.\n\nGuess a number.<|im_end|>" in text and "Higher.<|im_end|>" in text
    written = TOKENIZER.decode(row.tokens[row.loss_mask])
    assert written == "5<|im_end|>20<|im_end|>10<|im_end|>"


def test_sessions_wait_when_the_server_is_at_capacity_and_keep_separate_states(url: str) -> None:
    """The server holds one session at a time; the number to guess is 10 + the row's number."""
    rows = play(url, [["10"], ["11"], ["12", "1"]])
    assert [row[0].reward for row in rows] == [1.0, 1.0, 1.0]


def test_an_openenv_episode_stops_at_max_turns_and_at_the_context(url: str) -> None:
    ((row,),) = play(url, [["1", "2", "3"]], max_turns=2)
    assert row.turns == 2 and row.reward == -0.5 and row.metrics["env/done"] == 0.0
    ((row,),) = play(url, [["1"] * 8], context=60)
    assert 0 < row.turns < 8 and len(row.tokens) <= 60


def test_the_observation_template_renders_the_fields_of_an_observation(url: str) -> None:
    ((row,),) = play(url, [["5", "10"]], observation="The game says: {{ hint }}")
    assert "The game says: Higher." in TOKENIZER.decode(row.tokens)
    (error,) = play(url, [["5"]], observation="{{ text }}")
    assert isinstance(error, DataError) and "the observation has hint" in str(error)


def test_openenv_errors_name_the_environment_and_hide_credentials(url: str) -> None:
    (error,) = play(url, [["five"]])
    assert isinstance(error, DataError) and "refused `step`" in str(error) and "EXECUTION_ERROR" in str(error)
    (error,) = play(url, [["5"]], action="message")
    assert isinstance(error, DataError) and "VALIDATION_ERROR" in str(error)
    (error,) = play("http://127.0.0.1:1", [["5"]])
    assert isinstance(error, DataError) and "no environment answers at ws://127.0.0.1:1/ws" in str(error)
    (error,) = play("http://me:pw@127.0.0.1:1/?token=abc", [["5"]])
    assert isinstance(error, DataError) and "pw" not in str(error) and "abc" not in str(error)
    with pytest.raises(ConfigError, match="expected the address of a server"):
        build_loop("openenv", {"url": "localhost:8000"})
