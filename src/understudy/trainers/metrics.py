"""Performance metrics of a step, under `perf/`: tokens per second, model FLOPs, memory, bytes."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

import psutil
import torch

from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.servers.engine import RemoteEngine
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.policy.step import StepResult
from understudy.teacher.pool.pool import TeacherPool
from understudy.trainers.critic.remote import RemoteCritic
from understudy.trainers.system import System
from understudy.weights.publish import CopiedWeights


def teacher_metrics(pools: Mapping[str, TeacherPool]) -> dict[str, float]:
    """Latency, queue, retries and ejections per teacher and per replica, and each replica's share of the
    tokens."""
    return {f"perf/{name}": value for pool in pools.values() for name, value in pool.metrics().flat().items()}


PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
}
"""Dense half-precision FLOP/s by a part of the device's name, as the vendors state them."""


_KILO = 1 if sys.platform == "darwin" else 1024
"""getrusage counts bytes on macOS and KiB on other systems."""


def usage_metrics(system: System, result: StepResult, seconds: float) -> dict[str, float]:
    """Metrics of one step that took `seconds`. Call it once per step, because it resets the memory peak.

    Byte counts start at the launch, except `published_bytes`: the last version's bytes to each engine.

    | metrics | bytes |
    |---|---|
    | `perf/ranks/bytes_sent` | from rank 0 to each other rank |
    | `perf/ranks/bytes_fetched` | rows fetched by rank 0 |
    | `perf/workers/*` | between the trainer's process and workers that write rows themselves |
    | `perf/queue/*` | between the trainer's process and the queue |
    | `perf/engines/*` | generations, between the trainer's process and engine processes or servers |
    | `perf/critic/*` | between the trainer's process and the critic's |
    """
    model, device = system.learner.policy.model, system.learner.policy.device
    updating = max(sum(result.seconds.values()), 1e-9)  # empty if the step updated no weights
    flops_per_second = model_flops(model, result.tokens) / updating / system.learner.settings.trainer.ranks
    metrics = {
        "perf/completion_tokens_per_second": result.loss_tokens / seconds,
        "perf/update_tokens_per_second": result.tokens / updating,
        "perf/model_tflops": flops_per_second / 1e12,
        "perf/micro_batch_tokens": float(system.learner.micro_batches.tokens),
        "perf/memory/rss_gb": psutil.Process().memory_info().rss / 1e9,
        "perf/memory/rss_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KILO / 1e9,
    }
    if isinstance(system.learner.policy, LeadingPolicy):
        metrics["perf/ranks/bytes_sent"] = float(system.learner.policy.bytes_sent)
    metrics |= system.learner.batches.metrics() | system.producer.rollouts.metrics()
    if isinstance(system.producer.engine, HostedEngine | RemoteEngine):
        metrics["perf/engines/bytes_sent"] = float(system.producer.engine.traffic.sent)
        metrics["perf/engines/bytes_received"] = float(system.producer.engine.traffic.received)
    if isinstance(system.learner.critic, RemoteCritic):
        metrics["perf/critic/bytes_sent"] = float(system.learner.critic.traffic.sent)
        metrics["perf/critic/bytes_received"] = float(system.learner.critic.traffic.received)
    if isinstance(system.learner.publisher, CopiedWeights):
        metrics["perf/weights/published_bytes"] = float(system.learner.publisher.published_bytes)
    if device.type == "cuda":
        peak = next((v for k, v in PEAK_FLOPS.items() if k in torch.cuda.get_device_name(device)), None)
        if peak is not None and system.learner.settings.student.dtype != "float32":
            metrics["perf/mfu"] = flops_per_second / peak
        metrics["perf/memory/cuda_peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


def model_flops(model: torch.nn.Module, tokens: int) -> float:
    """FLOPs of forward and backward: per weight and token 2 forward, 2 for the gradients of activations, and
    2 for the gradient of each trained weight. Embedding lookups, attention scores and recomputed layers are
    not counted."""
    lookup = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and head.weight is lookup
    counted = [p for p in model.parameters() if p is not lookup or tied]
    every, trained = sum(p.numel() for p in counted), sum(p.numel() for p in counted if p.requires_grad)
    return float(tokens) * (4 * every + 2 * trained)
