"""The GPU half of async.py: sync, fully async and TRL with vLLM, one after another on one GPU.

The shapes are step.py's. In a fully async run three parties share the GPU: the engine and the trainer in one
process, each on a CUDA stream of its own, and the teacher in another. Kernels of one process run in
parallel; processes are time-sliced, unless the driver's multi-process service (MPS) is on (`--mps` adds a
run under it; the service is started for that run and stopped after it).

`--every 2` adds a run that publishes weights after every second update and decodes twice the rows at a time:
the cost of decoding besides attention is then paid half as often. The peer has no such setting (it generates
one training batch at a time).

`--kv-cache model fp8` adds runs that keep keys and values of rollouts in eight bits (`rollout.kv_cache`).
The peer's trainer has no setting for that, so such a row does not compare the same arithmetic; its name says
so.

Every rate is tokens over seconds of all counted steps; the fully async run is stopped while rollouts are
still in progress.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hardware import cpu_name, gpu_name
from step import MODELS, ON_CPU, QUICK, TINY, WHOLE, problem
from step_problem import Row, Shape, Timing, has_trl, run_ours, run_trl, save, show

GOALS = {"": 2.5, "fp8": 2.7, "every": 2.0}
"""Over the peer: published after every update, with keys and values in fp8 besides, and published less often."""
MAIN = "fully async, staleness 1"
MPS = ", MPS"
EVERY = ", publishing every "
FP8 = ", keys and values in fp8"
PUBLISH = {
    "drain": "",
    "recompute": ", rollouts continue",
    "keep": ", rollouts continue with their keys and values",
}
"""What a publish does to the rollouts in progress: it waits for them, or they continue under the new weights with keys and values
that are computed again or kept."""
PEER = "TRL 1.16 + vLLM colocated"
_LEAST_SECONDS = 35.0
"""A run is not started with less time left than this."""


def compare_on_gpu(options: argparse.Namespace) -> None:
    started = time.monotonic()
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no CUDA device; --gpu --tiny tries the script with tiny shapes on the CPU")
    shape = ON_CPU if options.tiny else QUICK if options.quick else WHOLE
    shape = replace(shape, compile_student=not options.eager_student)
    hardware = cpu_name() if options.tiny else gpu_name()
    print(f"{hardware}, torch {torch.__version__}, shape {shape.name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="understudy-async-") as name:
        folder = Path(name)
        given = problem(shape, folder, TINY if options.tiny else MODELS)
        print(f"models written after {time.monotonic() - started:.0f} s", flush=True)
        found: dict[str, Timing | str] = {}
        for system in _order(options):
            left = options.budget - (time.monotonic() - started)
            if left < (5.0 if options.tiny else _LEAST_SECONDS):
                found[system] = f"no time left ({left:.0f} s)"
            elif system == PEER:
                use_vllm = not options.tiny
                missing = has_trl(options.trl_python, use_vllm)
                found[system] = missing or run_trl(shape, folder, *given, left, options.trl_python, use_vllm)
            else:
                found[system] = _ours(system, shape, folder, given, min(left, options.each), options)
            _say(system, found[system], folder, time.monotonic() - started)
            rows = _rows(shape, found)
            if (
                rows and not options.tiny
            ):  # after each run, so that an interrupted benchmark keeps its results
                save("async-quick" if options.quick else "async", hardware, rows, options.out)
    for row in rows:
        print(show(row), flush=True)
    print(f"done after {time.monotonic() - started:.0f} s")


def _order(options: argparse.Namespace) -> list[str]:
    """The pair that has a goal runs first, so that an interrupted benchmark still has it. MPS runs after the
    peer: a stopped client may leave the service in a bad state, which then only affects our own runs."""
    degrees = sorted(options.staleness, key=lambda one: (one != 1.0, one))
    ours = [f"fully async, staleness {one:g}" for one in degrees] if "plain" in options.systems else []
    peer = [PEER] if "trl" in options.systems else []
    sync = ["sync"] if "sync" in options.systems else []
    publishing = [f"{EVERY}{one} updates" if one > 1 else "" for one in options.every]
    kept = [FP8 if one == "fp8" else "" for one in options.kv_cache]
    shared = [
        MAIN + one + other + PUBLISH[kind] + (MPS if options.mps else "")
        for kind in options.publish
        for other in kept
        for one in publishing
        if one or other or PUBLISH[kind] or options.mps
    ]
    return [*ours[:1], *peer, *shared, *sync, *ours[1:]]


def _ours(
    system: str,
    shape: Shape,
    folder: Path,
    given: tuple[str, str, Path],
    timeout: float,
    options: argparse.Namespace,
) -> Timing | str:
    if system == "sync":
        return run_ours(shape, folder, *given, timeout, {}, {}, "sync")
    plain = system.removesuffix(MPS)
    kind = next(kind for kind in ("keep", "recompute", "drain") if plain.endswith(PUBLISH[kind]))
    plain, partial = plain.removesuffix(PUBLISH[kind]), kind != "drain"
    narrow = plain.endswith(FP8)
    degree, _, rarely = plain.removesuffix(FP8).partition(EVERY)
    staleness, every = float(degree.rsplit(" ", 1)[1]), int(rarely.split()[0]) if rarely else 1
    # Three windows until every party is busy: two were written while the first update compiled, and the
    # third right after.
    longer = replace(shape, skip=3 * every, steps=3 * every + options.counted * every)
    trainer = {"mode": "fully_async", "max_staleness": staleness, "partial_rollouts": partial}
    trainer |= {"sync_every": every}
    # With staleness 1, rollouts of two windows are in progress unless a publish waits for those of one.
    together = shape.batch * (2 if partial else every)
    engine = {"context_length": shape.new_tokens + 128, "max_batch": options.max_batch or together}
    engine |= {"recompute_kv": False} if kind == "keep" else {}
    engine |= {"kv_cache": "fp8"} if narrow else {}
    engine |= json.loads(options.engine)
    if not system.endswith(MPS):
        name = f"async-{staleness:g}-{every}" + "-fp8" * narrow + f"-{kind}"
        # A run would start the service by itself (`run.mps`).
        return run_ours(longer, folder, *given, timeout, engine, trainer, name, run_keys={"mps": "off"})
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return "nvidia-cuda-mps-control is not installed"
    with _mps(control) as environment:
        return run_ours(
            longer,
            folder,
            *given,
            timeout,
            engine,
            trainer,
            f"async-mps-{every}" + "-fp8" * narrow + f"-{kind}",
            environment,
        )


def _say(system: str, result: Timing | str, folder: Path, seconds: float) -> None:
    if not isinstance(result, str):
        steps = ", ".join(f"{one:.2f}" for one in result.seconds)
        parts = ", ".join(f"{name} {value:.2f}" for name, value in result.parts.items())
        print(
            f"{system}: {result.overall:,.0f} tokens/s; steps {steps} s; {parts} [{seconds:.0f} s]",
            flush=True,
        )
        return
    print(f"{system}: {result} [{seconds:.0f} s]", flush=True)
    for log in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[-1:]:
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), flush=True)


def _rows(shape: Shape, found: Mapping[str, Timing | str]) -> list[Row]:
    peer = found.get(PEER)
    rows = []
    for system, result in found.items():
        if isinstance(result, str) or system == PEER:
            continue
        row = Row(f"{shape.name}: {system}", round(result.overall, 1), "completion tokens/s")
        if isinstance(peer, Timing):
            row.peer, row.peer_value = PEER, round(peer.overall, 1)
            row.ratio = round(result.overall / peer.overall, 3)
            if system.startswith(MAIN):
                goal = GOALS["every" if EVERY in system else "fp8" if FP8 in system else ""]
                row.goal, row.met = f">= {goal} x", row.ratio >= goal
        rows.append(row)
        rows += [
            Row(f"{row.name}, {part}", round(value, 4), "s of a step") for part, value in result.parts.items()
        ]
    sync = found.get("sync")
    for system, result in found.items():
        if isinstance(result, Timing) and isinstance(sync, Timing) and system.startswith("fully"):
            rows.append(
                Row(
                    f"{shape.name}: {system}, beside sync", round(result.overall, 1), "completion tokens/s",
                    "sync, same run", round(sync.overall, 1), round(result.overall / sync.overall, 3),
                )
            )  # fmt: skip
    return rows


@contextmanager
def _mps(control: str) -> Iterator[dict[str, str]]:
    """The driver's multi-process service for the processes that get this environment."""
    with tempfile.TemporaryDirectory(prefix="understudy-mps-") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        everything: dict[str, Any] = {**os.environ, **environment}
        subprocess.run([control, "-d"], env=everything, check=True, timeout=30)
        try:
            yield environment
        finally:
            subprocess.run([control], input="quit -t 5\n", text=True, env=everything, timeout=30, check=False)
