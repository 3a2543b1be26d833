"""The base model of a LoRA student as a teacher in an engine process: scores do not depend on adapters or restarts."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from small_student import settings
from transformers import AutoModelForCausalLM

from understudy.assembly.engine_processes import HostSettings, start_hosts
from understudy.assembly.processes.scoring_engine import EngineBase
from understudy.assembly.teachers.launchers import EngineTeachers
from understudy.cluster.local import LocalProcesses
from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.local.scheduler import Batching
from understudy.errors import EngineError, TeacherError
from understudy.policy.load import load_student
from understudy.policy.lora import LoraSettings
from understudy.policy.policy import Policy
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.protocol import request_of
from understudy.teacher.replica.assemble import build_worker
from understudy.teacher.replica.in_process import LoraBaseReplica
from understudy.teacher.replica.server import parse_args
from understudy.types.scores import ScoreItem, Signal
from understudy.weights.publish import CopiedWeights

STUDENT = str(Path(str(resources.files("understudy.assets") / "quickstart")) / "models" / "student")
VOCAB = json.loads((Path(STUDENT) / "config.json").read_text())["vocab_size"]
TARGETS = ["q_proj", "down_proj"]
pytestmark = pytest.mark.timeout(240)


def items() -> list[ScoreItem]:
    random = np.random.default_rng(0)
    rows = [random.integers(6, VOCAB, size).astype(np.int32) for size in (9, 20, 33)]
    return [
        ScoreItem(f"row-{i}", row, np.arange(1, len(row), dtype=np.int32), Signal.TOPK, 4)
        for i, row in enumerate(rows)
    ]


def of_a_standalone_replica() -> list[bytes]:
    """The scores of a scorer that loads the model itself, as a replica's process does."""
    worker, *_ = build_worker(parse_args(["--model", STUDENT, "--name", "base"]))
    reply = worker.scorer.score(request_of(items()))
    return [reply.sampled_P.tobytes(), reply.ids.tobytes(), reply.logprobs.tobytes()]


async def scores(pool: TeacherPool) -> tuple[list[bytes], list[np.ndarray]]:
    found = [await one.fetch() for one in await pool.score(items())]
    columns = [
        np.concatenate([np.asarray(getattr(one, name)).reshape(-1) for one in found])
        for name in ("sampled_logprobs", "ids", "logprobs")
    ]
    return [column.tobytes() for column in columns], [one.sampled_logprobs for one in found]


async def written(engine: HostedEngine) -> np.ndarray:
    request = GenerateRequest("row", np.arange(6, 14, dtype=np.int32), Sampling(8, ()), seed=3)
    return (await engine.generate([request]))[0].logprobs


def learnt() -> Policy:
    """A policy whose adapters change its logprobs."""
    lora = LoraSettings(rank=2, alpha=8.0, targets=tuple(TARGETS))
    policy = Policy(load_student(STUDENT).model, settings(lora=lora))
    with torch.no_grad():
        for name, tensor in policy.model.named_parameters():
            if "lora_B" in name:
                tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return policy


@asynccontextmanager
async def opened(
    folder: Path,
) -> AsyncIterator[tuple[HostedEngine, LocalProcesses, EngineTeachers, TeacherPool]]:
    """One engine process with the base as a teacher in it."""
    processes = LocalProcesses(folder / "logs")
    base = EngineBase([LoraBaseReplica("base", "by_request", 16_384, None, None)], TARGETS, True)
    host = HostSettings(STUDENT, "float32", "cpu", 1, 8, 64, 0, Batching.COMPOSED, True, base=base)
    engine = await start_hosts(processes, host, [{}], weight_bytes=1 << 22)
    teacher = EngineTeachers(processes, "base", engine, 0)
    pool = TeacherPool("base", [ReplicaSpec("0")], teacher, options=PoolOptions(canary=False))
    try:
        await pool.start()
        await engine.update_weights(0, ())
        yield engine, processes, teacher, pool
    finally:
        await pool.close()
        await engine.close()
        await processes.close()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    pytest.importorskip("peft")
    torch.set_num_threads(1)


def test_the_base_model_in_an_engine_process_scores_like_a_separate_replica(tmp_path: Path) -> None:
    """To the bit, and close to a plain transformers forward, also after the engine has got adapters."""
    expected, policy = of_a_standalone_replica(), learnt()
    plain = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float64).eval()

    async def body() -> None:
        async with opened(tmp_path) as (engine, _, _, pool):
            found, sampled = await scores(pool)
            assert found == expected
            for item, row in zip(items(), sampled, strict=True):
                ids = torch.from_numpy(item.tokens.astype(np.int64))
                with torch.no_grad():
                    theirs = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                assert np.abs(theirs.numpy() - row).max() < 1e-4
            first = await written(engine)
            await CopiedWeights(policy.named_adapters, engine).publish(1)
            assert np.abs(first - await written(engine)).max() > 0.05, (
                "the engine must generate with the adapters"
            )
            assert (await scores(pool))[0] == expected, "the teacher must stay the base model"
            with pytest.raises(TeacherError, match=r"a replica in each of the 1 engine process\(es\)"):
                await pool.add(ReplicaSpec("1"))
            with pytest.raises(EngineError, match=r"set student\.lora\.publish = 'adapter'"):
                await CopiedWeights(policy.named_weights, engine).publish(2)
            assert (await scores(pool))[0] == expected

    asyncio.run(asyncio.wait_for(body(), 200))


@pytest.mark.slow
def test_an_engine_process_with_a_teacher_is_restarted_after_a_kill_and_on_request(tmp_path: Path) -> None:
    expected, policy = of_a_standalone_replica(), learnt()

    async def body() -> None:
        async with opened(tmp_path) as (engine, processes, teacher, pool):
            await CopiedWeights(policy.named_adapters, engine).publish(1)
            before = await written(engine)
            os.kill(processes.children["rollout-0"].ready["pid"], signal.SIGKILL)
            assert (await scores(pool))[0] == expected
            assert (await written(engine)).tobytes() == before.tobytes()
            (one,) = pool.metrics().replicas
            assert one.restarts == 1

            pid = processes.children["rollout-0"].ready["pid"]
            assert await teacher.start("0") == teacher.endpoints["0"]
            assert processes.children["rollout-0"].ready["pid"] != pid, "a living process must be replaced"
            assert (await scores(pool))[0] == expected

    asyncio.run(asyncio.wait_for(body(), 200))
