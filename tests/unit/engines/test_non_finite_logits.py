"""Logits that are not finite raise an error."""

import asyncio

import pytest
import torch
from engine_models import engine_over, make_model, make_requests

from understudy.engines.base import Sampling
from understudy.engines.local.engine import CacheLayout
from understudy.errors import EngineError


@pytest.mark.parametrize("layout", list(CacheLayout))
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_nan_weights_raise_an_error_at_the_next_generation(layout: CacheLayout, temperature: float) -> None:
    model = make_model("qwen3-16")
    requests = make_requests(3, Sampling(4, temperature=temperature))

    async def body() -> None:
        async with engine_over(model, layout=layout) as engine:
            assert len(await engine.generate(requests)) == 3
            with torch.no_grad():
                model.model.norm.weight[3] = torch.nan
            with pytest.raises(EngineError, match=r"row-0 was answered .* not finite"):
                await engine.generate(requests)

    asyncio.run(body())
