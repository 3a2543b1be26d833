"""Measures per written token, from whatever columns a row has. Pure: numpy in, plain lists out.

Every measure has one entry per written token (`loss_mask`), in order. p: the teacher, q: the student, y: the
written token. A measure is left out where its columns are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.types.scores import NO_CANDIDATE

MEASURES = {
    "kl": "KL(p‖q) over the candidates and the tail, nats",
    "gap": "log q(y) − log p(y), nats",
    "teacher_surprise": "−log p(y), nats",
    "student_surprise": "−log q(y) as sampled, nats",
    "entropy": "student's entropy, nats",
    "teacher_entropy": "teacher's entropy over its candidates and the tail, nats",
    "tail": "teacher's mass outside its candidates",
    "ratio": "trainer's q(y) over the engine's",
    "clamped": "1: its loss was clamped or clipped",
    "version": "weight version that wrote it",
    "weight": "loss weight",
    "loss": "loss of the position",
    "advantage": "advantage",
}
"""Name → what it is; the page offers those that a row has."""
WORST = 8
"""Tokens of a row that count as its worst."""


def is_candidate(logprobs: Any) -> np.ndarray:
    """Whether entries of the K candidates are one, or empty (`NO_CANDIDATE`)."""
    return np.asarray(logprobs, np.float64) > NO_CANDIDATE / 2


def measures(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float64 [P] each."""
    mask = np.asarray(columns["loss_mask"], bool)
    found: dict[str, np.ndarray] = {}
    own = np.asarray(columns["behaviour_logprobs"], np.float64)[mask]
    drawn = columns.get("origin", "student") == "student"  # a given answer has no logprobs as sampled
    if drawn:
        found["student_surprise"] = -own
        found["version"] = np.asarray(columns["weight_versions"], np.float64)[mask]
    teacher = columns.get("teacher_logprobs")
    if teacher is not None and len(teacher) == len(own):
        if drawn:
            found["gap"] = own - np.asarray(teacher, np.float64)
        found["teacher_surprise"] = -np.asarray(teacher, np.float64)
    top = columns.get("teacher_topk_logprobs")
    if top is not None and len(top) == len(own):
        chance = np.exp(np.asarray(top, np.float64))
        tail = columns.get("tail")
        rest = np.clip(1.0 - chance.sum(1), 0.0, 1.0) if tail is None else np.asarray(tail, np.float64)
        found["tail"] = rest
        found["teacher_entropy"] = -(chance * np.asarray(top, np.float64)).sum(1) - _xlogx(rest)
        student = columns.get("student_topk_logprobs")
        if student is not None and np.shape(student) == np.shape(top):
            q = np.asarray(student, np.float64)
            other = np.clip(1.0 - np.where(is_candidate(top), np.exp(q), 0.0).sum(1), 1e-12, 1.0)
            inside = (chance * (np.asarray(top, np.float64) - q)).sum(1)
            found["kl"] = inside + _xlogx(rest) - rest * np.log(other)
    for name, column in (
        ("entropy", "student_entropy"), ("weight", "loss_weights"), ("loss", "losses"),
        ("advantage", "advantages"), ("clamped", "clamped"),
    ):  # fmt: skip
        if column in columns and len(columns[column]) == len(own):
            found[name] = np.asarray(columns[column], np.float64)
    if drawn and "trainer_logprobs" in columns and len(columns["trainer_logprobs"]) == len(own):
        found["ratio"] = np.exp(np.asarray(columns["trainer_logprobs"], np.float64) - own)
    return {name: found[name] for name in MEASURES if name in found}


def worst_tokens(
    columns: Mapping[str, Any], gap: np.ndarray | None = None, most: int = WORST
) -> list[tuple[int, int, float, int]]:
    """(place among the written tokens, its id, log q(y) − log p(y), the id the teacher wanted most; −1:
    unknown), the largest gap first; only tokens that the teacher finds less likely than the student does."""
    mask = np.asarray(columns["loss_mask"], bool)
    gap = measures(columns).get("gap") if gap is None else gap
    if gap is None:
        return []
    written = np.asarray(columns["tokens"])[mask]
    ids, top = columns.get("teacher_ids"), columns.get("teacher_topk_logprobs")
    order = np.argsort(-np.nan_to_num(gap, nan=-np.inf), kind="stable")[:most]
    found = []
    for place in order.tolist():
        if not gap[place] > 0:
            break
        wanted = -1
        if ids is not None and top is not None and is_candidate(top[place]).any():
            wanted = int(ids[place][int(np.argmax(top[place]))])
        found.append((place, int(written[place]), float(gap[place]), wanted))
    return found


def _xlogx(value: np.ndarray) -> np.ndarray:
    return value * np.log(np.clip(value, 1e-12, 1.0))
