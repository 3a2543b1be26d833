"""Shared by step.py and step_cpu.py: models, prompts, the two systems as processes, and the table.

Both systems get the same weights, prompts, batch, token budget and learning rate, and both are timed over
the same later steps of one run. Ours is the command a user types (`understudy train`), with its journal,
teacher process, checks and metrics; its parts are read from the run directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

HERE = Path(__file__).parent
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one step."""

    name: str
    batch: int
    new_tokens: int
    micro_batch: int
    """Rows of the peer's forward and backward."""
    micro_batch_tokens: int
    """Tokens of our forward and backward."""
    topk: int
    context: int
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 6
    skip: int = 2
    """Warm-up steps that are not counted."""
    learning_rate: float = 1e-5
    threads: int = 0
    compile_student: bool = True
    """Only on a GPU."""


@dataclass(slots=True)
class Row:
    name: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """The counted steps of one system."""

    seconds: list[float]
    tokens: list[int]
    parts: Mapping[str, float]
    """Median seconds of each part of a step."""
    cpu_seconds: float | None = None
    """CPU seconds of all processes, per step."""

    @property
    def tokens_per_cpu_second(self) -> float | None:
        return median(self.tokens) / self.cpu_seconds if self.cpu_seconds else None

    @property
    def overall(self) -> float:
        """Tokens per second over all counted steps together; fair if single steps wait for one another."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))


def our_recipe(
    shape: Shape,
    run: Path,
    student: str,
    teacher: str,
    prompts: Path,
    engine: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    ahead: int = 0,
    run_keys: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Our recipe of a shape. `extra`: more keys of [trainer]; `run_keys`: of [run]; `ahead`: steps after the
    last one counted."""
    return {
        "student": {
            "model": student,
            "dtype": shape.dtype,
            "device": shape.device,
            "compile": shape.compile_student and shape.device != "cpu",
        },
        "teachers": {
            "teacher": {
                "model": teacher,
                "dtype": shape.dtype,
                "device": shape.device,
                "compile": shape.device != "cpu",
                **({"threads": shape.threads} if shape.threads else {}),
            }
        },
        "loss": {"kind": "forward_kl", "signal": "topk", "topk": shape.topk},
        "rollout": {"max_new_tokens": shape.new_tokens, "max_batch": shape.batch, **engine},
        "data": {"train": str(prompts), "shuffle": False},
        "trainer": {
            "steps": shape.steps + ahead,
            "batch_size": shape.batch,
            "learning_rate": shape.learning_rate,
            "micro_batch_tokens": shape.micro_batch_tokens,
            "checkpoint_every": 10_000,
            **(extra or {}),
        },
        "run": {
            "dir": str(run),
            **({"threads": shape.threads} if shape.threads else {}),
            **(run_keys or {}),
        },
    }


def run_ours(
    shape: Shape,
    folder: Path,
    student: str,
    teacher: str,
    prompts: Path,
    timeout: float,
    engine: Mapping[str, Any],
    trainer: Mapping[str, Any] | None = None,
    name: str = "ours",
    environment: Mapping[str, str] | None = None,
    run_keys: Mapping[str, Any] | None = None,
) -> Timing | str:
    """Times steps of `understudy train`; returns the reason if it failed. `trainer` and `run_keys`: more keys of
    [trainer] and [run].
    A fully async run continues for some steps after the last one counted, so that engines, teachers and
    trainer are all still busy while it is timed."""
    run = folder / name
    extra = dict(trainer or {})
    ahead = 4 if extra.get("mode") == "fully_async" else 0
    recipe = our_recipe(shape, run, student, teacher, prompts, engine, extra, ahead, run_keys)
    path = folder / f"{name}.toml"
    path.write_text(toml(recipe))
    metrics = run / "metrics.jsonl"
    command = [sys.executable, "-m", "understudy.cli.main", "train", str(path), "--quiet"]
    problem, spent = _run(
        command,
        timeout,
        folder / f"{name}.log",
        metrics,
        shape.steps,
        {**_threads(shape), **(environment or {})},
    )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    lines = [line for line in lines if shape.skip < line["step"] <= shape.steps]
    if not lines:
        return problem or "no step was finished"
    tokens = [round(line["response_length/mean"] * line["rollout/rows"]) for line in lines]
    return Timing(
        [line["time/step"] for line in lines],
        tokens,
        _async_parts(lines) if ahead else _our_parts(run, lines),
        _cpu_per_step(spent, shape.skip),
    )


def _threads(shape: Shape) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(shape.threads)} if shape.threads else {}


def _our_parts(run: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Where a step's time goes. Rollouts and scores overlap, so each is the time during which any was in
    progress; `idle` is what no span covers. `forward, meanwhile` is the student's forward while its rows
    were scored."""
    spans = [json.loads(line) for line in (run / "spans.jsonl").read_text().splitlines()]
    parts: dict[str, list[float]] = {}
    for line in lines:
        whole = [
            span
            for span in spans
            if span.get("step") == line["step"] and span["name"] in ("produce", "claim", "update", "publish")
        ]
        start, end = min(span["start"] for span in whole), max(span["end"] for span in whole)
        inside = [span for span in spans if start <= span["start"] and span["end"] <= end]
        groups = {
            "generate": ("rollout", "reward"),
            "score": ("score",),
            "forward/backward": ("update",),
            "publish": ("publish",),
        }
        for name, kinds in groups.items():
            parts.setdefault(name, []).append(_covered([s for s in inside if s["name"] in kinds]))
        parts.setdefault("idle", []).append(
            line["time/step"] - _covered([s for s in inside if s["name"] != "produce"])
        )
    ahead = median(line["time/update/ahead"] for line in lines)
    during = {"forward, meanwhile": ahead} if ahead else {}
    return {name: median(values) for name, values in parts.items()} | during


def _async_parts(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The trainer's parts of a step; rollouts and teachers work in parallel."""
    names = {
        "wait for rows": "time/wait for rows",
        "forward/backward": "time/update/compute",
        "optimizer": "time/update/optimizer",
        "drain": "time/drain",
        "publish": "time/publish",
    }
    return {name: median(line.get(key, 0.0) for line in lines) for name, key in names.items()}


def _covered(spans: Sequence[Mapping[str, float]]) -> float:
    """Seconds during which at least one of the spans was open."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span["start"]):
        total += max(0.0, span["end"] - max(span["start"], reached))
        reached = max(reached, span["end"])
    return total


def run_trl(
    shape: Shape,
    folder: Path,
    student: str,
    teacher: str,
    prompts: Path,
    timeout: float,
    python: str,
    vllm: bool,
) -> Timing | str:
    """Times steps of TRL's DistillationTrainer in its own environment; returns the reason if it failed."""
    spec = {
        **asdict(shape),
        "student": student,
        "teacher": teacher,
        "prompts": str(prompts),
        "vllm": vllm,
    }
    out = folder / "trl.jsonl"
    (folder / "trl-spec.json").write_text(json.dumps(spec))
    command = [python, str(HERE / "step_trl.py"), str(folder / "trl-spec.json"), str(out)]
    problem, spent = _run(command, timeout, folder / "trl.log", out, shape.steps, _threads(shape))
    steps = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    steps = steps[shape.skip :]
    if not steps:
        return problem or "no step was finished"
    parts = {name: median(step["parts"].get(name, 0.0) for step in steps) for name in steps[0]["parts"]}
    if "prepare" in parts:
        parts["prepare besides generate"] = parts.pop("prepare") - parts.get("generate", 0.0)
    parts["backward, optimizer, rest"] = median(step["seconds"] for step in steps) - sum(parts.values())
    seconds, tokens = [step["seconds"] for step in steps], [step["tokens"] for step in steps]
    return Timing(seconds, tokens, parts, _cpu_per_step(spent, shape.skip))


def has_trl(python: str, vllm: bool) -> str:
    """Empty if the peer can be run, else why not."""
    modules = "trl, datasets" + (", vllm" if vllm else "")
    try:
        found = subprocess.run(
            [python, "-c", f"import {modules}"], capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    return "" if found.returncode == 0 else found.stderr.strip().splitlines()[-1]


def compare(shape: Shape, ours: Timing | str, peer: Timing | str, peer_name: str, goal: float) -> list[Row]:
    rows: list[Row] = []
    if isinstance(ours, str):
        print(f"{shape.name}: ours failed: {ours}")
        return rows
    row = Row(
        f"{shape.name}: whole sync step",
        round(ours.tokens_per_second, 1),
        "completion tokens/s",
        goal=f">= {goal} x",
    )
    if isinstance(peer, str):
        print(f"{shape.name}: {peer_name} was not measured: {peer}")
    else:
        row.peer, row.peer_value = peer_name, round(peer.tokens_per_second, 1)
        row.ratio = round(ours.tokens_per_second / peer.tokens_per_second, 3)
        row.met = row.ratio >= goal
    rows.append(row)
    if ours.tokens_per_cpu_second:
        frugal = Row(
            f"{shape.name}: tokens per CPU second",
            round(ours.tokens_per_cpu_second, 1),
            "completion tokens/CPU s",
        )
        if not isinstance(peer, str) and peer.tokens_per_cpu_second:
            frugal.peer, frugal.peer_value = peer_name, round(peer.tokens_per_cpu_second, 1)
            frugal.ratio = round(ours.tokens_per_cpu_second / peer.tokens_per_cpu_second, 3)
        rows.append(frugal)
    rows += [
        Row(f"{shape.name}: {name}", round(value, 4), "s of a step") for name, value in ours.parts.items()
    ]
    if not isinstance(peer, str):
        rows += [
            Row(f"{shape.name}: {peer_name}, {name}", round(value, 4), "s of a step")
            for name, value in peer.parts.items()
        ]
    for line in rows:
        print(show(line), flush=True)
    return rows


def show(row: Row) -> str:
    text = f"{row.name:<64} {row.value:>12,.4g} {row.unit}"
    if row.peer_value is not None:
        text += f"   {row.peer}: {row.peer_value:,.4g}   ratio {row.ratio}"
    if row.met is not None:
        text += f" (goal {row.goal}: {'met' if row.met else 'missed'})"
    return text


def save(name: str, hardware: str, rows: Sequence[Row], folder: Path | None = None) -> Path:
    folder = folder or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hardware}-{time.strftime('%Y-%m-%d')}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"wrote {path}")
    return path


def _run(
    command: Sequence[str],
    timeout: float,
    log: Path,
    steps_in: Path,
    enough: int,
    environment: Mapping[str, str] | None = None,
) -> tuple[str, dict[int, float]]:
    """Runs until `steps_in` has `enough` lines or the time is up (lines written until then count), without
    waiting for the last checkpoint. Returns the last output of a failure, and the CPU seconds of all
    processes at each number of lines."""
    deadline, spent = time.monotonic() + max(timeout, 1.0), {}
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        watched = psutil.Process(process.pid)
        with killed_at_the_end(process):
            while process.poll() is None and time.monotonic() < deadline:
                steps = steps_in.read_text().count("\n") if steps_in.exists() else 0
                if steps not in spent:
                    spent[steps] = cpu_seconds(watched)
                if steps >= enough:
                    return "", spent
                time.sleep(_POLL_SECONDS)
            if process.poll() is None:
                return f"not finished after {timeout:.0f} s", spent
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failed = process.returncode != 0
    return f"exit code {process.returncode}: " + " | ".join(lines[-3:]) if failed else "", spent


@contextmanager
def killed_at_the_end(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kills the process and all that it started when the block ends, also by an exception or by a SIGTERM to the benchmark:
    a run left behind would hold the memory and the time of what is measured next."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("the benchmark was ended by SIGTERM"))
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()
        signal.signal(signal.SIGTERM, before)


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process and its children."""
    total = 0.0
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for member in family:
        with suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def _cpu_per_step(spent: Mapping[int, float], skip: int) -> float | None:
    """CPU seconds per counted step; unlike wall time they do not depend on other load on the machine."""
    counted = sorted(steps for steps in spent if steps > skip)
    if len(counted) < 2:
        return None
    first, last = counted[0], counted[-1]
    return (spent[last] - spent[first]) / (last - first)


def toml(tables: Mapping[str, Any], prefix: str = "") -> str:
    lines, nested = [], []
    for key, value in tables.items():
        if isinstance(value, Mapping):
            nested.append((f"{prefix}{key}", value))
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    text = "\n".join(lines) + "\n"
    for name, value in nested:
        text += f"[{name}]\n{toml(value, f'{name}.')}"
    return text
