"""Tasksets of `verifiers.v1`: the package's chat program talks to the student, its reward is the trajectory's.

Needs `verifiers` 0.3 or newer, and `uv`, with which that package starts its programs.
"""

import asyncio
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.engines.base import Generation, Sampling
from understudy.errors import ConfigError, DataError, EngineError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.registry import build_loop
from understudy.rollout.agents.verifiers_v1 import write_rows
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason

INSTALLED = importlib.util.find_spec("verifiers") and importlib.util.find_spec("verifiers.v1.utils.loaders")
needs_package = pytest.mark.skipif(
    not (INSTALLED and shutil.which("uv")), reason="needs verifiers 0.3 or newer, and uv"
)
ENV = {"taskset": {"id": "small_verifiers_v1"}}
TOKENIZER = chat_tokenizer("chatml")


def play(texts: list[str], rows: list[dict[str, Any]], context: int = 512) -> list[Any]:
    """Runs one session per row concurrently; the engine generates its text. Returns trajectories or errors."""

    def student(text: str, place: int) -> LoopContext:
        async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
            if text == "crash":
                raise EngineError("the engine is gone")
            ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
            many = len(ids)
            return Generation(
                np.array(ids, np.int32), np.zeros(many, np.float32), np.zeros(many, np.int32), StopReason.EOS
            )

        renderer = Renderer(TOKENIZER, context=context)
        return LoopContext(generate, renderer, Sampling(400), f"00000-000000{place}", 0, context)

    async def body() -> list[Any]:
        loop = build_loop("verifiers_v1", {"env": ENV})
        try:
            prompts = [
                Prompt(f"00000-000000{i}", i, 0, "", messages=tuple(row["messages"]), columns=row)
                for i, row in enumerate(rows)
            ]
            runs = [loop.run(p, student(t, p.ordinal)) for p, t in zip(prompts, texts, strict=True)]
            return await asyncio.gather(*runs, return_exceptions=True)
        finally:
            await loop.close()  # type: ignore[attr-defined]

    return asyncio.run(body())


@needs_package
@pytest.mark.timeout(300)
def test_sessions_of_a_verifiers_taskset_become_trajectories_with_its_reward(tmp_path: Path) -> None:
    assert write_rows(ENV, tmp_path / "rows.jsonl") == 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[1]["messages"] == [{"role": "user", "content": "What is 2 * 3?"}] and rows[1]["task"] == 1
    rows = [*rows, rows[0], {**rows[0], "task": 7}]
    right, wrong, failed, missing = play(["It is 36.", "It is 5.", "crash", "no"], rows)
    assert isinstance(right, list) and isinstance(wrong, list), (right, wrong)
    assert [one[0].reward for one in (right, wrong)] == [1.0, 0.0]
    assert right[0].metrics["env/right"] == 1.0 and right[0].turns == 1
    assert "What is 12 * 3?" in TOKENIZER.decode(right[0].tokens)
    assert TOKENIZER.decode(right[0].tokens[right[0].loss_mask]) == "It is 36.<|im_end|>"
    assert isinstance(failed, EngineError)
    assert isinstance(missing, DataError) and "task 7 of a taskset with 2 tasks" in str(missing)


def test_a_verifiers_v1_env_without_a_taskset_id_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no taskset\.id"):
        build_loop("verifiers_v1", {"env": {}})


@pytest.mark.skipif(bool(INSTALLED), reason="the package is there")
def test_a_missing_verifiers_package_is_named_in_the_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"needs verifiers 0\.3 or newer and the taskset 'small_verifiers_v1'"
    ):
        build_loop("verifiers_v1", {"env": ENV})
