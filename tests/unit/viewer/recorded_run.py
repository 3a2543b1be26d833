"""Writes a small run directory with everything the viewer reads, including hostile text."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from understudy.dataplane.kept_rows import FOLDER_NAME, RowKeeper
from understudy.dataplane.token_measures import worst_tokens
from understudy.observability.rundir import RunDir

HOSTILE = '<script>document.title="owned"</script><img src=x onerror=alert(1)> \x1b[31mred\x1b[0m \u202eevil\u202c مرحبا'
QUICKSTART = Path(__file__).parents[3] / "src" / "understudy" / "assets" / "quickstart"


def token_columns(
    seed: int = 0, tokens: int = 12, prompt: int = 5, planted: int | None = None
) -> dict[str, Any]:
    """Columns as the trainer journals them. At the generated token `planted` the teacher prefers id 9."""
    draw = np.random.default_rng(seed)
    written = tokens - prompt
    mask = np.arange(tokens) >= prompt
    own = np.where(mask, -draw.random(tokens), np.nan).astype(np.float32)
    ids = np.stack([draw.permutation(np.arange(6, 14))[:4] for _ in range(written)]).astype(np.int32)
    logprobs = np.log(np.array([[0.6, 0.2, 0.1, 0.05]] * written, np.float32))
    teacher = own[mask] - 0.01
    if planted is not None:
        ids[planted] = (9, 10, 11, 12)
        teacher[planted] = own[mask][planted] - 7.5
    return {
        "tokens": np.concatenate([draw.integers(6, 14, tokens)]).astype(np.int32),
        "loss_mask": mask,
        "behaviour_logprobs": own,
        "weight_versions": np.where(mask, 3, -1).astype(np.int32),
        "stop_reason": "eos",
        "reward": 1.0,
        "turns": 1,
        "metrics": {},
        "teacher": "add",
        "teacher_logprobs": teacher.astype(np.float32),
        "teacher_ids": ids,
        "teacher_topk_logprobs": logprobs,
    }


def long_columns(prompt: int = 3000, turns: int = 2, written: int = 1800, tool: int = 500) -> dict[str, Any]:
    """A row with more tokens than one answer of the server: turns of the student with tool results between them. The teacher
    disagrees at the tenth token from the end."""
    short = token_columns(tokens=turns * written, prompt=0, planted=turns * written - 10)
    segments = [(prompt, False)] + [(written, True), (tool, False)] * turns
    mask = np.concatenate([np.full(length, own) for length, own in segments[:-1]])
    tokens = np.full(len(mask), 7, np.int32)
    tokens[mask] = short["tokens"]
    columns = {**short, "tokens": tokens, "loss_mask": mask, "turns": turns}
    for name, empty in (("behaviour_logprobs", np.nan), ("weight_versions", -1)):
        columns[name] = np.full(len(mask), empty, short[name].dtype)
        columns[name][mask] = short[name]
    return columns


def summary(key: str, columns: dict[str, Any], **more: Any) -> dict[str, Any]:
    values = {
        "key": key,
        "prompt": f"prompt of {key}",
        "completion": "answer",
        "reward": 1.0,
        "stop_reason": "eos",
    }
    values |= {
        "turns": 1,
        "tokens": int(columns["loss_mask"].sum()),
        "teacher": "add",
        "source": "sums",
        "kl": 0.5,
    }
    return {**values, "oldest": 3, "newest": 3, "why": "sample", "worst": worst_tokens(columns), **more}


def recorded_run(folder: Path, steps: int = 12, hostile: str = HOSTILE) -> RunDir:
    run = RunDir.create(str(folder), "run")
    run.recipe.write_text(
        json.dumps(
            {
                "student": {"model": str(QUICKSTART / "models" / "student")},
                "trainer": {"steps": steps, "batch_size": 4},
                "rollout": {"max_new_tokens": 8},
                "run": {"dir": str(folder), "note": hostile},
            }
        )
    )
    run.state.write_text(json.dumps({"status": "finished", "pid": 0}))
    lines = [{"step": 0, "val/accuracy/sums": 0.1, "val/teacher_accuracy/sums": 0.9}]
    lines += [
        {"step": s, "actor/loss": 2.0 / s, "teacher/add/kl": 1.0 / s, "odd/metric": s}
        for s in range(1, steps + 1)
    ]
    lines[-1]["val/accuracy/sums"] = 0.8
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans = [{"name": "update", "start": float(s), "end": s + 0.5, "step": s} for s in range(1, steps + 1)]
    spans += [{"name": "rollout", "start": steps + 0.5, "end": steps + 0.9, "key": "p1_0_0"}]
    run.spans.write_text("".join(json.dumps(span, separators=(",", ":")) + "\n" for span in spans))
    run.rollouts.mkdir()
    for step in range(2, steps + 1, 2):
        rows = [
            summary(f"p{step}{n}_0_0", token_columns(), prompt=hostile if n == 0 else f"prompt {n}")
            for n in range(3)
        ]
        rows[0]["completion"] = f"needle{step} {hostile}"
        dumped = [
            {key: value for key, value in row.items() if key not in ("worst", "why", "source")}
            for row in rows
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in dumped)
        (run.rollouts / f"{step:06d}.jsonl").write_text(text)
    keeper = RowKeeper(run.path / FOLDER_NAME, 1 << 20)
    for step in (1, steps):
        planted = token_columns(step, planted=2)
        kept = [
            (summary("p1_0_0", planted, prompt=hostile, kl=1.5, teacher_prompts={"add": hostile}), planted),
            (summary("p2_0_0", token_columns(7)), token_columns(7)),
        ]
        keeper.write(step, kept)
    sample = {
        "step": 0,
        "key": "eval-0",
        "source": "sums",
        "prompt": "1+1=",
        "text": hostile,
        "answer": "2",
        "reward": 0.0,
    }
    run.samples.write_text(
        json.dumps(sample) + "\n" + json.dumps({**sample, "step": steps, "text": "2"}) + "\n"
    )
    return run


_CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from recorded_run import token_columns
from understudy.dataplane.embedded import EmbeddedDataPlane

async def write():
    plane = EmbeddedDataPlane.open(Path(sys.argv[1]), max_rows=100, max_bytes=1 << 30, spill_bytes=1 << 20)
    keys = [f"j{{n}}_0_0" for n in range({rows})]
    tags = {{key: {{"step": 13, "data_source": "sums"}} for key in keys}}
    await plane.issue("train", keys, step=13, tags=tags)
    await plane.put("train", {{key: token_columns(n, planted=1) for n, key in enumerate(keys)}}, tags)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(write())
"""


def journalled(run: RunDir, rows: int = 5) -> None:
    """Adds rows to the journal as a killed trainer leaves them: the process ends by SIGKILL after the commit."""
    code = _CHILD.format(here=str(Path(__file__).parent), rows=rows)
    ended = subprocess.run([sys.executable, "-c", code, str(run.dataplane)], check=False)
    assert ended.returncode == -signal.SIGKILL
    run.state.write_text(json.dumps({"status": "running", "pid": 2**22 + 1}))


def write_waits(run: RunDir, seconds_ago: float = 0.0) -> None:
    """Writes waits.json as a trainer that makes progress does."""
    entry = {
        "status": "running",
        "written": time.time() - seconds_ago,
        "seconds_without_progress": 1.0,
        "waiting": [],
        "facts": {},
    }
    run.waits.write_text(json.dumps(entry))
