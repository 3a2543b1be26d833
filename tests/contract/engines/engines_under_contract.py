"""The engines that the contract suite tests, each with the same small model."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from wire_servers import WireServer, listening

from understudy.cluster.local import LocalProcesses
from understudy.engines.base import Engine
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.scheduler import Batching
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.engines.servers.vllm import VLLMEngine, VLLMSettings, start_vllm
from understudy.serving.endpoint import Endpoint

VOCAB, CONTEXT, EOS = 64, 256, 2
Opened = Callable[[Any, Path], AbstractAsyncContextManager[Engine]]


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        eos_token_id=EOS, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


@asynccontextmanager
async def hf_composed(model: Any, folder: Path) -> AsyncIterator[Engine]:
    engine = HFEngine(model, max_batch=8, device="cpu", pad_id=0, max_length=CONTEXT, version=0)
    yield engine
    await engine.close()


@asynccontextmanager
async def hf_continuous(model: Any, folder: Path) -> AsyncIterator[Engine]:
    engine = HFEngine(
        model,
        max_batch=8,
        device="cpu",
        pad_id=0,
        max_length=CONTEXT,
        version=0,
        batching=Batching.CONTINUOUS,
    )
    yield engine
    await engine.close()


def wire(dialect: str) -> Opened:
    @asynccontextmanager
    async def opened(model: Any, folder: Path) -> AsyncIterator[Engine]:
        server = WireServer(dialect, model, CONTEXT)
        async with listening(server) as url:
            engine = RemoteEngine(
                DIALECTS[dialect],
                [Endpoint(url)],
                model="student",
                max_length=CONTEXT,
                version=0,
                snapshots=folder,
                timeout_s=10,
            )
            yield engine
            await engine.close()

    return opened


VLLM_PYTHON = os.environ.get("UNDERSTUDY_VLLM_PYTHON", "")
"""The interpreter of an environment with vLLM."""


@asynccontextmanager
async def real_vllm(
    model: Any, folder: Path, launcher: type[LocalProcesses] = LocalProcesses
) -> AsyncIterator[VLLMEngine]:
    model.save_pretrained(folder / "student")
    processes = launcher(folder / "logs", start_timeout=400)
    options = ("--enforce-eager", "--skip-tokenizer-init") if not torch.cuda.is_available() else ()
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings = VLLMSettings(VLLM_PYTHON, str(folder / "student"), CONTEXT, 32, "float32", options, (env,))
    try:
        engine = await start_vllm(settings, processes, version=0, snapshots=folder, timeout_s=400)
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        await processes.close()


ENGINES: dict[str, Opened] = {
    "hf": hf_composed,
    "hf-continuous": hf_continuous,
    "vllm-wire": wire("vllm"),
    "sglang-wire": wire("sglang"),
    "openai-wire": wire("openai"),
}
