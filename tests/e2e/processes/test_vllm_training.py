"""`rollout.engine = "vllm"`: the trainer starts a real vLLM, sends it every new version, and restarts it after
a kill."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import ASSETS
from vllm_student import write_student

from understudy.assembly.build import build
from understudy.cluster.local import LocalProcesses
from understudy.config import parse_recipe
from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.servers.vllm import VLLMEngine
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir
from understudy.planning.preflight import PYTHON_VARIABLE
from understudy.trainers.pacing.idle_meter import ProducerMeters
from understudy.trainers.stopping import Interrupts
from understudy.trainers.sync import take_step
from understudy.trainers.system import System


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE), reason=f"set {PYTHON_VARIABLE} to an interpreter that has vLLM"
)
@pytest.mark.parametrize("signal_kind", ["topk", "at_ids"])
def test_vllm_generates_with_the_newest_weights_after_each_step_and_after_a_kill(
    recipe: Callable[..., dict[str, Any]], signal_kind: str, tmp_path: Path
) -> None:
    table = recipe(
        student__model=write_student(tmp_path / "student"),
        rollout__engine="vllm",
        rollout__n=2,
        loss__kind="reverse_kl" if signal_kind == "at_ids" else "forward_kl",
        loss__signal=signal_kind,
        loss__topk=4,
        trainer__batch_size=8,
        trainer__learning_rate=1e-2,
        cluster__start_timeout_seconds=400.0,
    )
    parsed = parse_recipe(table)

    async def body() -> None:
        run = RunDir.create(parsed.run.dir, parsed.run.name)
        processes = LocalProcesses(run.logs, parsed.cluster.start_timeout_seconds)
        try:
            async with build(parsed, run, processes, LiveView(2, enabled=False)) as system:
                assert not system.producer.settings.deterministic and isinstance(
                    system.producer.engine, VLLMEngine
                )
                before = [p.detach().clone() for p in system.learner.policy.model.parameters()]
                first = await take_step(system, 1, Interrupts(print), ProducerMeters())
                assert any(
                    not torch.equal(old, new)
                    for old, new in zip(before, system.learner.policy.model.parameters(), strict=True)
                )
                await _assert_server_logprobs_equal_the_policy_s(system, version=1)
                if signal_kind == "topk":
                    (child,) = system.producer.engine.children.values()
                    os.kill(child.ready["pid"], signal.SIGKILL)
                second = await take_step(system, 2, Interrupts(print), ProducerMeters())
                assert first["rollout/weight_version/min"] == 0 and second["rollout/weight_version/min"] == 1
                await _assert_server_logprobs_equal_the_policy_s(system, version=2)
        finally:
            await processes.close()

    asyncio.run(body())
    assert not list(Path("/dev/shm").glob("understudy-weights-*")), "weight snapshots are removed"


async def _assert_server_logprobs_equal_the_policy_s(system: System, version: int) -> None:
    """Generates with the server and compares its logprobs and weight versions with the current policy."""
    prompt = np.array([1, 4, 7, 8, 42, 9, 10, 43, 5], np.int32)
    asked = [GenerateRequest(f"probe-{i}", prompt, Sampling(8), seed=i) for i in range(4)]
    for generation in await asyncio.wait_for(system.producer.engine.generate(asked), 400):
        ids = torch.tensor([[*prompt.tolist(), *generation.tokens.tolist()]])
        with torch.no_grad():
            logprobs = system.learner.policy.model(input_ids=ids).logits[0].float().log_softmax(-1)
        ours = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(generation.logprobs, ours, atol=5e-3)
        assert set(generation.weight_versions.tolist()) == {version}


def test_preflight_refuses_a_vllm_python_that_is_not_an_interpreter(
    recipe: Callable[..., dict[str, Any]],
) -> None:
    from understudy.planning.preflight import preflight

    parsed = parse_recipe(recipe(rollout__engine="vllm", rollout__vllm_python=str(ASSETS)[:5] + "/no/python"))
    assert any("is not an interpreter" in problem for problem in preflight(parsed))
