"""Reads what a run left in its directory, without the package's own accounting."""

from __future__ import annotations

import functools
import json
import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

from checker import Event

from understudy.dataplane.kept_rows import read_columns

WALL_CLOCK = ("time/", "perf/")
"""Prefixes of metrics that do not repeat."""


def count_steps(run: Path) -> int:
    """Steps whose metrics are written, also of a file that is being written."""
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return sum(b'"actor/loss"' in line for line in lines)


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics, without clocks."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(WALL_CLOCK)}
        for line in lines
    ]


def read_journal(folder: Path) -> tuple[list[Event], frozenset[str]]:
    """The events of a data plane's folder, and the rows in flight."""
    file = folder / "journal.sqlite"
    if not file.exists():
        return [], frozenset()
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as journal:
        events = journal.execute("SELECT kind, key, sign, step FROM facts ORDER BY seq, place")
        rows = journal.execute("SELECT key FROM rows WHERE trained IS NULL")
        return [Event(*event) for event in events], frozenset(key for (key,) in rows)


def read_spans(run: Path) -> list[dict[str, Any]]:
    """What the trainer of each launch did, in the order in which it ended. A kill and a full disk cost spans."""
    path, spans, launch = run / "spans.jsonl", list[dict[str, Any]](), 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            span = json.loads(line)
        except ValueError:  # the last of a killed trainer
            continue
        launch += span["name"] == "launch"
        spans.append({**span, "launch": launch})
    return spans


def read_letters(folder: Path) -> dict[str, str]:
    file = folder / "dead_letters.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {letter["key"]: letter["reason"] for letter in map(json.loads, lines)}


def read_kept(run: Path) -> list[dict[str, Any]]:
    """A sample of the trained rows."""
    return [
        {"step": int(path.stem), **json.loads(line)}
        for path in sorted((run / "kept_rows").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def scored_again(run: Path, kept: list[dict[str, Any]], table: Path) -> list[dict[str, Any]]:
    """The rows, each with how far (nats) its teacher's scores are from those of a plain forward of its teacher's model, which the
    recipe `table` names. Rows of a run with pictures are left as they are: there, scores leave placeholders out of the softmax.
    So are rows of a teacher with a prompt or a tokenizer of its own, which reads other tokens."""
    teachers = tomllib.loads(table.read_text()).get("teachers", {})
    models = {
        name: own["model"]
        for name, own in teachers.items()
        if "prompt" not in own and own.get("vocabulary") != "align"
    }
    if any(_reads_pictures(Path(model)) for model in models.values()):
        return kept
    return [
        {**row, "apart": _apart(read_columns(run / "kept_rows", row["step"], row), models[row["teacher"]])}
        if row.get("teacher") in models
        else row
        for row in kept
    ]


def _reads_pictures(model: Path) -> bool:
    return "vision_config" in json.loads((model / "config.json").read_text())


def _apart(columns: dict[str, Any], model: str) -> float:
    import torch  # two seconds, which a campaign of a few tests need not spend

    tokens = torch.tensor(columns["tokens"]).long()
    with torch.no_grad():
        logprobs = _model(model)(tokens[None]).logits[0].double().log_softmax(-1)
    own = [place for place, trained in enumerate(columns["loss_mask"]) if trained]
    expected = [float(logprobs[place - 1, tokens[place]]) for place in own]
    given = columns["teacher_logprobs"]
    if len(given) != len(expected):
        return float("inf")
    return max((abs(float(a) - b) for a, b in zip(given, expected, strict=True)), default=0.0)


@functools.cache
def _model(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
