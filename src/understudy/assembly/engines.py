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

This is the only module that uses the recipe, the process launcher and the engines together.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from understudy.assembly.engine_processes import hosts_of
from understudy.config import Recipe
from understudy.engines.base import Engine, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.kv_pool import KeptAs
from understudy.engines.local.scheduler import Batching
from understudy.engines.replicas import Restarts
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.engines.servers.gpu_handover import GpuHandover
from understudy.engines.servers.vllm import HostLauncher, VLLMSettings, start_vllm
from understudy.errors import ConfigError
from understudy.nn.rotary_border import crossing
from understudy.planning.preflight import endpoints_of, vllm_python
from understudy.trainers.models import LoadedModel
from understudy.trainers.remote_rows.rollouts import brings_tokens_to_servers
from understudy.types.usable_ids import UsableIds
from understudy.weights.publish import (
    AdaptersOnly,
    AdapterSource,
    CopiedWeights,
    SharedWeights,
    WeightPublisher,
    WeightSource,
)

_CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""By default vLLM on a CPU takes 4 GiB and binds itself to cores that the trainer uses."""


class Notes(Protocol):
    """Shows the user what the run waits for."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class TrainedPolicy(WeightSource, AdapterSource, Protocol):
    """A policy whose weights or adapters can be published."""

    @property
    def model(self) -> nn.Module: ...


def context_of(recipe: Recipe, student: LoadedModel) -> int:
    """The maximum length of a rollout's sequence. `ConfigError` if the student cannot hold it."""
    wanted = recipe.rollout.context_length
    if wanted is not None and wanted > student.context:
        raise ConfigError(
            f"rollout.context_length = {wanted}; {recipe.student.model} holds {student.context} tokens"
        )
    if (border := student.rotary_border) is not None and (wanted or student.context) > border:
        raise ConfigError(crossing(recipe.student.model, border, wanted or student.context))
    return wanted or student.context


def sampling_of(recipe: Recipe, student: LoadedModel, usable: UsableIds | None = None) -> Sampling:
    rollout, loss = recipe.rollout, recipe.loss
    rows = student.model.get_output_embeddings().weight.shape[0]
    cut = usable.within(rows) if usable is not None else None
    own_candidates = loss.signal == "at_ids" and loss.distill_coef > 0
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop_ids=student.stop_ids,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop_strings=tuple(rollout.stop),
        candidates=loss.topk if own_candidates else 0,
        usable=cut,
        head_rows=rows if cut is not None else 0,
    )


async def open_engine(
    recipe: Recipe,
    student: LoadedModel,
    launcher: HostLauncher,
    notes: Notes,
    *,
    shared: bool,
    deterministic: bool,
) -> Engine:
    """`shared`: no generation runs while the optimizer writes, so an engine in this process may use the
    trained tensors."""
    if recipe.rollout.engine != "hf":
        return await _remote(recipe, student, launcher, notes, shared, seeded=deterministic)
    if recipe.rollout.processes:
        notes.phase(f"starting {recipe.rollout.processes} engine process(es)")
        length = context_of(recipe, student)
        return await hosts_of(
            recipe, student, launcher, max_length=length, deterministic=deterministic, notify=notes.note
        )
    batching = Batching.COMPOSED if deterministic else Batching.CONTINUOUS
    own = student.sharing_twin() if shared else student.twin()
    kept_as = KeptAs(recipe.rollout.kv_cache)
    return own.engine(recipe.rollout.max_batch, batching, context_of(recipe, student), kept_as)


def publisher_of(recipe: Recipe, policy: TrainedPolicy, engine: Engine, *, shared: bool) -> WeightPublisher:
    """The publisher of the policy's weights to this engine. `shared` as in `open_engine`."""
    if isinstance(engine, HFEngine):
        return SharedWeights(policy.model, engine) if shared else CopiedWeights(policy, engine)
    if not recipe.rollout.live_weights:
        return FixedWeights(engine)
    lora = recipe.student.lora
    alone = lora is not None and lora.publish == "adapter"
    return CopiedWeights(AdaptersOnly(policy) if alone else policy, engine)


async def _remote(
    recipe: Recipe, student: LoadedModel, launcher: HostLauncher, notes: Notes, at_rest: bool, seeded: bool
) -> RemoteEngine:
    """An engine over servers: started by the run, or running already.

    `at_rest`: the trainer does not train while they generate, so a restarted server on the trainer's GPU may
    read the trained tensors at any time."""
    rollout = recipe.rollout
    snapshots = Path(rollout.snapshots) if rollout.snapshots else None
    if snapshots is not None:
        snapshots.mkdir(parents=True, exist_ok=True)
    if rollout.starts_servers:
        notes.phase(f"starting {rollout.replicas} vLLM server(s)")
        beside = "rollout" not in recipe.cluster.roles or recipe.cluster.backend == "local"
        handover = GpuHandover() if at_rest and beside and student.device.type == "cuda" else None
        address = launcher.address if brings_tokens_to_servers(recipe, launcher) else None
        settings = vllm_settings(recipe, student, address)
        return await start_vllm(
            settings,
            launcher,
            restarts=Restarts(recipe.cluster.restarts.rollout, first_wait_s=1.0, longest_wait_s=60.0),
            notify=notes.note,
            snapshots=snapshots,
            handover=handover,
            seeded=seeded,
        )
    return RemoteEngine(
        DIALECTS[rollout.engine],
        endpoints_of(rollout),
        model=rollout.served_model,
        max_length=context_of(recipe, student),
        snapshots=snapshots,
        seeded=seeded,
    )


def vllm_settings(recipe: Recipe, student: LoadedModel, address: str | None = None) -> VLLMSettings:
    rollout = recipe.rollout
    base: dict[str, str] = {}
    options = list(rollout.engine_args)
    if student.device.type == "cpu" and not torch.cuda.is_available():
        base = {key: value for key, value in _CPU_DEFAULTS.items() if key not in os.environ}
        if "--enforce-eager" not in options:
            options.append("--enforce-eager")
    candidates = sampling_of(recipe, student).candidates
    if candidates and not any(option.startswith("--max-logprobs") for option in options):
        options.append(f"--max-logprobs={candidates + 1}")
    if recipe.student.revision:
        options.append(f"--revision={recipe.student.revision}")
    devices = rollout.devices or [""] * rollout.replicas
    return VLLMSettings(
        python=vllm_python(rollout),
        model=recipe.student.model,
        max_length=context_of(recipe, student),
        max_batch=rollout.max_batch,
        dtype=recipe.student.dtype,
        options=tuple(options),
        env=tuple({**base, **({"CUDA_VISIBLE_DEVICES": one} if one else {})} for one in devices),
        address=address,
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
