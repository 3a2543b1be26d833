"""One row as the token microscope shows it: text, measures and candidates of its tokens, from its columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.dataplane.token_measures import MEASURES, is_candidate, measures
from understudy.viewer.token_text import TokenText

MOST_TOKENS = 4096
"""Tokens of one answer; the page asks for more by range."""
_FACTS = ("turns", "stop_reason", "reward", "teacher", "replica", "teacher_version", "metrics")


def token_view(columns: dict[str, Any], text: TokenText, first: int, at: int | None = None) -> dict[str, Any]:
    """The tokens from `first` on; from further on if written token `at` would not be among them."""
    tokens, mask = np.asarray(columns["tokens"]).tolist(), np.asarray(columns["loss_mask"], bool)
    if at is not None and 0 <= at < mask.sum():
        place = int(np.flatnonzero(mask)[at])
        if not first <= place < first + MOST_TOKENS:
            first = max(0, place - MOST_TOKENS // 2)
    last = min(first + MOST_TOKENS, len(tokens))
    found = measures(columns)
    written = np.cumsum(mask) - 1
    before = int(mask[:first].sum())
    inside = slice(before, before + int(mask[first:last].sum()))
    return {
        "first": first,
        "length": len(tokens),
        "page": MOST_TOKENS,
        "turn": _turns_before(mask, first),
        "tokens": tokens[first:last],
        "pieces": text.pieces(tokens[max(0, first - 8) : last])[min(first, 8) :],
        "written": np.where(mask, written, -1)[first:last].tolist(),
        "measures": {name: _listed(values[inside]) for name, values in found.items()},
        "bounds": {name: _bounds(values) for name, values in found.items()},
        "described": MEASURES,
        "has_candidates": columns.get("teacher_ids") is not None or columns.get("student_ids") is not None,
        "has_tokenizer": text.found,
        "facts": {
            name: columns[name]
            for name in _FACTS
            if name in columns and not isinstance(columns[name], np.ndarray)
        },
    }


def candidates(columns: dict[str, Any], text: TokenText, first: int, last: int) -> list[dict[str, Any]]:
    """What teacher and student would have written at written tokens `first` to `last`: id, text and
    probabilities, the likeliest first. Without a teacher's candidates, the student's own alone."""
    ids, teacher = columns.get("teacher_ids"), columns.get("teacher_topk_logprobs")
    student = columns.get("student_topk_logprobs")
    own_ids, own = columns.get("student_ids"), columns.get("student_logprobs")
    tail, found = measures(columns).get("tail"), []
    count = int(np.asarray(columns["loss_mask"], bool).sum())
    for place in range(max(0, first), min(last, count)):
        entries, mine = [], []
        if ids is not None and teacher is not None:
            for i in np.argsort(-teacher[place], kind="stable"):
                if not is_candidate(teacher[place][i]):
                    break
                q = None if student is None else float(np.exp(student[place][i]))
                entries.append(_entry(text, ids[place][i]) | {"p": float(np.exp(teacher[place][i])), "q": q})
        if own_ids is not None and own is not None:
            mine = [
                _entry(text, i) | {"q": float(np.exp(q))}
                for i, q in zip(own_ids[place], own[place], strict=True)
            ]
        rest = None if tail is None else float(tail[place])
        known = {one["id"]: one["q"] for one in (*entries, *mine) if one.get("q") is not None}
        own_rest = max(0.0, 1.0 - sum(known.values())) if known else None
        found.append(
            {"place": place, "teacher": entries, "student": mine, "tail": rest, "own_tail": own_rest}
        )
    return found


def _turns_before(mask: np.ndarray, first: int) -> int:
    """Stretches of written tokens that end before token `first`."""
    seen = mask[: first + 1]
    return int((seen[:-1] & ~seen[1:]).sum())


def _entry(text: TokenText, number: Any) -> dict[str, Any]:
    return {"id": int(number), "text": text.one(int(number))}


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if not np.isfinite(value) else round(float(value), 5) for value in values]


def _bounds(values: np.ndarray) -> list[float]:
    known = values[np.isfinite(values)]
    return [float(known.min()), float(known.max())] if len(known) else [0.0, 0.0]
