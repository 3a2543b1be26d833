"""Opens the student's engine for a recipe, and chooses how new weights reach it.

| engine | runs in                     | new weights                                                   |
|--------|-----------------------------|---------------------------------------------------------------|
| hf     | this process                | not moved: engine and policy share tensors (sync, one rank)   |
| hf     | engine processes            | snapshot in memory; each process copies it between two tokens |
| hf     | the same, on other machines | the same, broadcast to all (`cluster.roles.rollout`)          |
| vllm   | servers that the run starts | snapshot in memory; each server loads it in place             |
| vllm   | the same, on other machines | broadcast into a snapshot there, which each server loads      |
| vllm   | running servers at `urls`   | snapshot in `rollout.snapshots`, which each server loads      |
| sglang | running servers at `urls`   | the same, by SGLang's own route                               |
| openai | running servers at `urls`   | not possible: `live_weights = false`                          |

This module connects `[rollout]`, the process launcher and the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from understudy.assembly.engine_processes import hosts_of
from understudy.config import DataConfig
from understudy.engines.base import Engine, Sampling
from understudy.engines.launcher import HostLauncher
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.kv_pool import KVFormat
from understudy.engines.local.scheduler import Batching
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.engines.servers.gpu_handover import GpuHandover
from understudy.engines.servers.vllm import VLLMSettings, start_vllm
from understudy.engines.servers.vllm_servers import cpu_environment, cpu_options, picture_options
from understudy.errors import ConfigError
from understudy.nn.rotary_border import crossing
from understudy.observability.live import LiveView
from understudy.planning.preflight import endpoints_of, vllm_python
from understudy.planning.resolved import EngineSettings
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.rollout.render import Renderer
from understudy.rollout.row_length import longest_row, prompts_of
from understudy.serving.supervisor import Restarts
from understudy.trainers.models import LoadedModel
from understudy.trainers.prompt_data import PromptData
from understudy.types.usable_ids import UsableIds
from understudy.weights.publish import (
    CopiedWeights,
    SharedWeights,
    WeightPublisher,
)


def context_of(settings: EngineSettings, student: LoadedModel) -> int:
    """The maximum length of a rollout's sequence. `ConfigError` if the student cannot hold it."""
    wanted, name = settings.rollout.context_length, settings.student.model
    if wanted is not None and wanted > student.context:
        raise ConfigError(f"rollout.context_length = {wanted}; {name} holds {student.context} tokens")
    if (border := student.rotary_border) is not None and (wanted or student.context) > border:
        raise ConfigError(crossing(name, border, wanted or student.context))
    return wanted or student.context


def sampling_of(settings: EngineSettings, student: LoadedModel, usable: UsableIds | None = None) -> Sampling:
    rollout = settings.rollout
    rows = student.model.get_output_embeddings().weight.shape[0]
    cut = usable.within(rows) if usable is not None else None
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop_ids=student.stop_ids,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop_strings=tuple(rollout.stop),
        candidates=settings.candidates,
        usable=cut,
        head_rows=rows if cut is not None else 0,
    )


def renderer_of(settings: EngineSettings, data: DataConfig, student: LoadedModel) -> Renderer:
    """Writes prompts for the student."""
    return Renderer(
        student.tokenizer,
        context=context_of(settings, student),
        reserve=settings.rollout.max_new_tokens,
        template_options=settings.rollout.for_templates,
        max_prompt=data.max_prompt_tokens,
        truncate=data.overlong == "truncate_left",
        pictures=student.pictures,
    )


def longest_request(
    settings: EngineSettings, data: DataConfig, student: LoadedModel, rows: PromptData
) -> int | None:
    """Tokens of the longest row that the engine writes. Only for a student on a GPU, where an engine reserves keys and values
    for `rollout.max_batch` rows: of 32,768 tokens each they need more than a GPU has. None: not known, or not needed."""
    rollout = settings.rollout
    if rollout.context_length is not None or student.device.type == "cpu" or student.pictures is not None:
        return None
    renderer = renderer_of(settings, data, student)
    return longest_row(renderer, prompts_of(rows.train, rows.eval), rollout.agent, rollout.max_new_tokens)


async def open_engine(
    settings: EngineSettings,
    student: LoadedModel,
    launcher: HostLauncher,
    view: LiveView,
    devices: Sequence[str] = (),
    longest: int | None = None,
) -> Engine:
    """`devices`: the GPUs of each engine process or server, in the form of CUDA_VISIBLE_DEVICES. `longest`: the tokens of the
    longest row, if they are known: an engine of ours reserves memory for rows of that length instead of the whole context."""
    rollout = settings.rollout
    if rollout.engine != "hf":
        return await _remote(settings, student, launcher, view, devices)
    length = context_of(settings, student)
    length = min(length, longest or length)
    if rollout.processes:
        view.phase(f"starting {rollout.processes} engine process(es)")
        return await hosts_of(settings, student, launcher, devices, max_length=length, notify=view.note)
    batching = Batching.COMPOSED if settings.deterministic else Batching.CONTINUOUS
    own = student.sharing_copy() if settings.shares_tensors else student.copy()
    kv_format = KVFormat(rollout.kv_cache)
    return own.engine(rollout.max_batch, batching, length, kv_format, rollout.recompute_kv)


def publisher_of(settings: EngineSettings, policy: Policy | LeadingPolicy, engine: Engine) -> WeightPublisher:
    """The publisher of the policy's weights to this engine."""
    if isinstance(engine, HFEngine):
        if settings.shares_tensors:
            if isinstance(policy, Policy) and (features := policy.forward.features) is not None:
                engine.share_features(features)
            return SharedWeights(policy.model, engine)
        return CopiedWeights(policy.named_weights, engine)
    if not settings.rollout.live_weights:
        return FixedWeights(engine)
    return CopiedWeights(policy.named_adapters if settings.adapters_only else policy.named_weights, engine)


async def _remote(
    settings: EngineSettings,
    student: LoadedModel,
    launcher: HostLauncher,
    view: LiveView,
    devices: Sequence[str],
) -> RemoteEngine:
    """An engine over servers: started by the run, or running already."""
    rollout = settings.rollout
    snapshots = Path(rollout.snapshots) if rollout.snapshots else None
    if snapshots is not None:
        snapshots.mkdir(parents=True, exist_ok=True)
    if rollout.starts_servers:
        view.phase(f"starting {rollout.replicas} vLLM server(s)")
        # A restarted server on the trainer's GPU may read the trained tensors if no update changes them then.
        at_hand = settings.shares_tensors and settings.beside_trainer
        handover = GpuHandover() if at_hand and student.device.type == "cuda" else None
        return await start_vllm(
            vllm_settings(settings, student, devices),
            launcher,
            restarts=Restarts(settings.restarts, first_wait_s=1.0, longest_wait_s=60.0),
            notify=view.note,
            snapshots=snapshots,
            handover=handover,
            seeded=settings.deterministic,
            pictures=student.pictures,
            detokenize=student.tokenizer.decode,
        )
    return RemoteEngine(
        DIALECTS[rollout.engine],
        endpoints_of(rollout),
        model=rollout.served_model,
        max_length=context_of(settings, student),
        snapshots=snapshots,
        seeded=settings.deterministic,
        pictures=student.pictures,
        detokenize=student.tokenizer.decode,
    )


def vllm_settings(
    settings: EngineSettings, student: LoadedModel, devices: Sequence[str] = ()
) -> VLLMSettings:
    """`devices` as in `open_engine`."""
    rollout = settings.rollout
    base: dict[str, str] = {}
    family = student.pictures.processor.family if student.pictures is not None else None
    options = picture_options(rollout.engine_args, family)
    if student.device.type == "cpu" and not torch.cuda.is_available():
        base, options = cpu_environment(), cpu_options(options)
    candidates = settings.candidates
    if candidates and not any(option.startswith("--max-logprobs") for option in options):
        options.append(f"--max-logprobs={candidates + 1}")
    if settings.student.revision:
        options.append(f"--revision={settings.student.revision}")
    return VLLMSettings(
        python=vllm_python(rollout),
        model=settings.student.model,
        max_length=context_of(settings, student),
        max_batch=rollout.max_batch,
        dtype=settings.student.dtype,
        options=tuple(options),
        env=tuple(
            {**base, **({"CUDA_VISIBLE_DEVICES": one} if one else {})}
            for one in devices or [""] * rollout.replicas
        ),
    )


class FixedWeights:
    """Publishes nothing, for servers whose weights stay fixed. All tokens have version 0: the run is
    off-policy by choice."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    async def publish(self, version: int) -> None:
        if self._engine.version < 0:
            await self._engine.update_weights(0, ())
