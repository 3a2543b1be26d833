"""Calls the reward on some rows for `understudy check`, so that a broken one is found before the run.

A reward that ships is called on every row, in this process. Any other is user code: it runs in a child
process with a deadline (`rollout/rewards/trial.py`), on a few rows. A single bad row would cost only that row
in a run, so it gives a note, not a problem. Imports no torch.
"""

from __future__ import annotations

import importlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from understudy.config import Recipe
from understudy.config.base import nearest
from understudy.errors import DataError
from understudy.rollout.dataset import Dataset
from understudy.rollout.loading import moved, without_suffix
from understudy.rollout.rewards import trial as reward_trial
from understudy.rollout.rewards.builtin import answers_of
from understudy.rollout.rewards.rewards import row_of
from understudy.serving.process_group import end_group, has_ended

_SHIPPED = "understudy.rollout."
_CALL_SECONDS = 60.0
_END_SECONDS = 5.0
"""How long a child that has closed its output may take to end."""
_MOST = 4
"""How many first rows of a dataset, and how many data sources, a user's reward is called on."""


@dataclass
class RewardFindings:
    problems: list[str] = field(default_factory=list)
    """Why the reward cannot work in a run."""
    notes: list[str] = field(default_factory=list)
    """Rows on which it fails; each would become a dead letter."""


def check_reward(recipe: Recipe, datasets: Mapping[str, Dataset]) -> RewardFindings:
    """One line for each finding; `datasets` by the recipe key that names them."""
    reward = str(recipe.data.reward)
    module, colon, name = reward.partition(":")
    if not colon or not module or not name:
        return RewardFindings(
            [
                f"data.reward = {reward!r}: expected 'module:function', for example 'understudy.rollout.rewards.builtin:gsm8k'"
            ]
        )
    if (hint := without_suffix(reward)) is not None:
        return RewardFindings([f"data.reward = {reward!r}: {hint}"])
    if module.startswith(_SHIPPED):
        return _shipped(recipe, reward, datasets)
    asked = {key: list(_first_rows(dataset)) for key, dataset in datasets.items()}
    seconds = min(recipe.rollout.deadline_seconds, _CALL_SECONDS)
    flat = [entry for rows in asked.values() for entry in rows]
    fatal, bad = _tried(reward, flat, recipe.cluster.start_timeout_seconds, seconds)
    if fatal is not None:
        return RewardFindings([f"data.reward = {reward!r} {fatal}"])
    findings = RewardFindings()
    for rows in asked.values():
        failed = [place for place, _ in rows if place in bad]
        if not failed:
            continue
        line = f"data.reward = {reward!r} {bad[failed[0]]} at {failed[0]}"
        if len(failed) == len(rows):
            findings.problems.append(line)
        else:
            findings.notes.append(
                f"{line} ({len(failed)} of {len(rows)} rows tried; each would be a dead letter)"
            )
    return findings


def _shipped(recipe: Recipe, reward: str, datasets: Mapping[str, Dataset]) -> RewardFindings:
    module, _, name = reward.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        new = moved(reward)
        return RewardFindings([f"data.reward = {reward!r}: {f'write {new!r}; ' if new else ''}{error}"])
    function = getattr(found, name, None)
    if not callable(function):
        guess = nearest(name, [one for one in dir(found) if not one.startswith("_")])
        hint = f"; did you mean {guess!r}?" if guess else ""
        return RewardFindings([f"data.reward = {reward!r}: {module} has no function {name}{hint}"])
    findings = RewardFindings()
    for key, dataset in datasets.items():
        first, failed = "", 0
        for number, row in enumerate(dataset.rows):
            try:
                # An async reward grades in its own processes: all it needs of a row is the answer.
                answers_of(row) if reward_trial.is_async(function) else function(row, "")
            except DataError as error:
                failed += 1
                first = first or f"data.reward = {reward!r}: {key}: {dataset.place(number)}: {error}"
        many = failed > recipe.trainer.max_dead_letters * len(dataset) if key == "data.train" else False
        if failed and (many or failed == len(dataset)):
            findings.problems.append(f"{first} ({failed} of {len(dataset)} rows)")
        elif failed:
            findings.notes.append(f"{first} ({failed} of {len(dataset)} rows; each would be a dead letter)")
    return findings


def _first_rows(dataset: Dataset) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first few rows, and the first of each data source."""
    seen: set[str] = set()
    for number, row in enumerate(dataset.rows):
        source = row.get("data_source") or ""
        if number < _MOST or (source not in seen and len(seen) < _MOST):
            seen.add(source)
            yield dataset.place(number), row_of(dataset.prompt(number, key="", epoch=0))


def _tried(
    reward: str, rows: Sequence[tuple[str, dict[str, Any]]], start_seconds: float, seconds: float
) -> tuple[str | None, dict[str, str]]:
    """(a fatal problem of the reward, problems by row); rows that JSON cannot encode are skipped."""
    request: dict[str, Any] = {"reward": reward, "paths": sys.path, "rows": []}
    places = []
    for place, row in rows:
        with suppress(TypeError, ValueError):
            request["rows"].append(json.loads(json.dumps(row)))
            places.append(place)
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, reward_trial.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            return _conversation(child, json.dumps(request), places, start_seconds, seconds, errors)
        finally:
            end_group(child)


def _conversation(
    child: subprocess.Popen[bytes],
    request: str,
    places: Sequence[str],
    start_seconds: float,
    seconds: float,
    errors: Any,
) -> tuple[str | None, dict[str, str]]:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    assert child.stdin is not None and child.stdout is not None
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()

    def answer(deadline: float) -> dict[str, Any] | None:
        """None if the child ended without an answer."""
        line = lines.get(timeout=deadline)
        return dict(json.loads(line)) if line else None

    def ended() -> str:
        until = time.monotonic() + _END_SECONDS
        while not has_ended(child) and time.monotonic() < until:  # its output has
            time.sleep(0.002)
        code = end_group(child)
        errors.seek(0)
        lines_of_error = [
            line for line in errors.read().decode(errors="replace").splitlines() if line.strip()
        ]
        return f"ended its process with code {code}" + (
            f" ({lines_of_error[-1].strip()})" if lines_of_error else ""
        )

    with suppress(BrokenPipeError):
        child.stdin.write(request.encode() + b"\n")
        child.stdin.close()
    try:
        begun = answer(start_seconds)
    except queue.Empty:
        return f"was not imported within {start_seconds:g} s (cluster.start_timeout_seconds)", {}
    if begun is None:
        return f"{ended()} while it was imported", {}
    if "problem" in begun:
        return str(begun["problem"]), {}
    problems: dict[str, str] = {}
    for place in places:
        try:
            reply = answer(seconds)
        except queue.Empty:
            late = f"gave no answer for {place} within {seconds:g} s; what takes longer belongs to its import"
            return late, problems
        if reply is None:
            return f"{ended()} at {place}", problems
        if "problem" in reply:
            problems[place] = str(reply["problem"])
    return None, problems


def _read(pipe: Any, lines: queue.SimpleQueue[bytes]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(b"")
