"""A tool may return pictures: the student reads them in its next turn, and the row lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer
from vision_models import folder_of, picture, reader_of

from understudy.engines.base import Generation, Sampling
from understudy.media.pictures import Pictures
from understudy.media.store import MediaStore, hash_of
from understudy.rollout.agents.agent import LoopContext, checked_outputs
from understudy.rollout.agents.tool_loop import ToolLoop
from understudy.rollout.dataset import load_dataset
from understudy.rollout.render import Renderer
from understudy.rollout.tools.base import ToolOutcome, ToolResult
from understudy.types.trajectory import StopReason

RED, BLUE = picture("red"), picture("blue", (70, 30))


class Camera:
    """A tool that takes a picture."""

    name = "camera"
    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {"name": "camera", "parameters": {"type": "object", "properties": {}, "required": []}},
    }

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def call(self, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        return ToolResult(ToolOutcome.OK, "taken", images=(self.data,))


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_picture_returned_by_a_tool_is_part_of_the_row(role: str, tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    tokenizer, reader = AutoTokenizer.from_pretrained(folder), reader_of(folder, store)
    renderer = Renderer(tokenizer, context=500, pictures=reader)
    row = {"messages": [{"role": "user", "content": "<image>look"}], "images": [RED]}
    prompt = load_dataset([row]).storing(Pictures(store)).prompt(0, key="p", epoch=0)
    requested: list[tuple[int, tuple[str, ...]]] = []

    async def generate(
        tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] | None = None
    ) -> Generation:
        requested.append((len(tokens), context.pictures_in("p", tokens, media)))
        text = '<tool_call>{"name": "camera", "arguments": {}}</tool_call>' if turn == 0 else "done"
        ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], dtype=np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), StopReason.EOS)

    def begin() -> LoopContext:
        return LoopContext(generate, renderer, Sampling(64), "p", 0, 500, media=[hash_of(RED)])

    context = begin()
    loop = ToolLoop([Camera(BLUE)], tool_role=role)
    done = checked_outputs(asyncio.run(loop.run(prompt, context)), context)[0]
    assert [media for _, media in requested] == [(hash_of(RED),), (hash_of(RED), hash_of(BLUE))]
    assert done.media == (hash_of(RED), hash_of(BLUE)) and store.get(hash_of(BLUE)) == BLUE
    places = np.isin(done.tokens, reader.processor.placeholder_ids)
    assert int(places.sum()) == reader.count(hash_of(RED)) + reader.count(hash_of(BLUE))
    assert not (places & done.loss_mask).any()
    context = begin()
    unreadable = checked_outputs(
        asyncio.run(ToolLoop([Camera(b"torn")], tool_role=role).run(prompt, context)), context
    )[0]
    assert unreadable.media == (hash_of(RED),) and unreadable.metrics["tool/error"] == 1
    assert "is not a readable picture" in tokenizer.decode(unreadable.tokens.tolist())
