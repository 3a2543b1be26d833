"""Engine processes that get only the student's adapters (`student.lora.publish = "adapter"`).

One engine shares memory with the trainer, the other gets every version by broadcast. Both must generate with the
trained model.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hosted_rig import RemoteProcesses, hosted
from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch

from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.hosted.engine import HostedEngine
from understudy.errors import EngineError
from understudy.policy.lora import LoraSettings
from understudy.policy.policy import Policy
from understudy.weights.publish import CopiedWeights

pytestmark = pytest.mark.timeout(240)
ASKED = [
    [
        GenerateRequest(f"{turn}-{i}", np.arange(1, 4 + i, dtype=np.int32), Sampling(8, ()), seed=i)
        for i in range(4)
    ]
    for turn in range(4)
]


@pytest.fixture(autouse=True)
def _peft() -> None:
    pytest.importorskip("peft")


async def worst_difference(engine: HostedEngine, policy: Policy, version: int) -> float:
    """The largest difference between the engines' logprobs and those of a plain model with the merged weights."""
    merged = qwen3()
    merged.load_state_dict(dict(policy.named_weights()), strict=False)
    before = {host.name: host.sent_tokens for host in engine._replicas.all}
    worst = 0.0
    for batch in ASKED:
        for request, written in zip(batch, await engine.generate(batch), strict=True):
            assert set(written.weight_versions.tolist()) == {version}
            ids = torch.tensor([*request.tokens.tolist(), *written.tokens.tolist()])
            with torch.no_grad():
                logprobs = merged.eval()(ids[None]).logits[0].log_softmax(-1)
            start = len(request.tokens)
            expected = logprobs[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(written.logprobs)).abs().max()))
    assert all(host.sent_tokens > before[host.name] for host in engine._replicas.all)
    return worst


@pytest.mark.slow
def test_engines_that_get_only_adapters_generate_like_the_merged_student(tmp_path: Path) -> None:
    policy: Any = Policy(qwen3(), settings(lora=LoraSettings(rank=2, alpha=8.0)))

    def learn(seed: int) -> None:
        batch = varied_batch(seed=seed)
        policy.update(batch, cross_entropy, token_mean(batch))

    async def body() -> None:
        torch.set_num_threads(1)
        processes = RemoteProcesses(tmp_path / "logs", local=["rollout-0"])
        async with hosted(qwen3(), tmp_path, hosts=2, processes=processes) as (engine, _):
            whole = CopiedWeights(policy.named_weights, engine)
            alone = CopiedWeights(policy.named_adapters, engine)
            assert await worst_difference(engine, policy, 0) < 1e-5
            start = dict(policy.named_weights())
            for version in range(1, 6):
                learn(version)
                await alone.publish(version)
                assert await worst_difference(engine, policy, version) < 1e-5
            moved = max(float((new - start[name]).abs().max()) for name, new in policy.named_weights())
            assert moved > 1e-2, "the weights must have changed, or the comparison tests nothing"

            small = sum(p.numel() for name, p in policy.model.named_parameters() if "lora_" in name) * 4
            assert small <= alone.published_bytes < small + 40 * 14, (
                "only the adapters, 14 scales and a mark may be sent"
            )

            os.kill(processes.children["rollout-0"].ready["pid"], signal.SIGKILL)
            os.kill(processes.children["rollout-1"].ready["pid"], signal.SIGKILL)
            await engine.generate(ASKED[0])
            while engine._restarting:
                await asyncio.sleep(0.05)
            assert await worst_difference(engine, policy, 5) < 1e-5, (
                "a restarted engine must have the base with the newest adapters"
            )

            policy._weights._base_mark = bytes(16)
            with pytest.raises(EngineError, match="belong to other weights than this engine has loaded"):
                await alone.publish(6)
            assert await worst_difference(engine, policy, 5) < 1e-5, "a refused publish must change nothing"
            learn(9)
            await whole.publish(7)
            assert await worst_difference(engine, policy, 7) < 1e-5
            assert whole.published_bytes > alone.published_bytes

    asyncio.run(asyncio.wait_for(body(), 200))
