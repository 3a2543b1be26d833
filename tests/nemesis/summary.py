"""Summarizes the result files of campaigns: `campaign.py --summary FILES`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_results(path: Path) -> list[dict[str, Any]]:
    """One line per schedule. Until 2026-11-18 `only` held the mode that was asked for, and there was no `asked_mode`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        line if "asked_mode" in line else {**line, "asked_mode": line.get("only"), "only": ""}
        for line in lines
    ]


def identity(line: Mapping[str, Any]) -> tuple[int, str | None, str]:
    return line["seed"], line["asked_mode"], line["only"]


def upper_bound(failed: int, tried: int, confidence: float = 0.95) -> float:
    """The Clopper-Pearson bound: the failure rate at which so few failures have the probability 1 − confidence."""
    if failed >= tried:
        return 1.0
    low, high = failed / tried, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        at_most = sum(math.comb(tried, k) * rate**k * (1 - rate) ** (tried - k) for k in range(failed + 1))
        low, high = (rate, high) if at_most > 1 - confidence else (low, rate)
    return high


def summary(results: Iterable[Mapping[str, Any]]) -> str:
    results = list(results)
    tried = [line for line in results if "error" not in line]
    errors = [line for line in results if "error" in line]
    failed = [line for line in tried if line["violations"]]
    kinds = Counter(kind for line in tried for kind in line["kinds"])
    modes = Counter(line["mode"] for line in tried)
    faults, launches = sum(line["faults"] for line in tried), sum(len(line["launches"]) for line in tried)
    text = [
        f"{len(tried)} schedules, {faults} faults that hit ({faults / max(len(tried), 1):.1f} a schedule), {launches} launches,"
        f" {sum(line['seconds'] for line in tried) / 3600:.1f} h",
        f"{len(failed)} schedules with violations, {len(errors)} that could not be carried out",
    ]  # fmt: skip
    if tried:
        bound = upper_bound(len(failed), len(tried))
        text.append(f"rate of schedules with a violation: below {100 * bound:.2f} % (95 %)")
    text += [
        "",
        "| fault | hits |",
        "|---|---|",
        *_table(kinds),
        "",
        "| mode | schedules |",
        "|---|---|",
        *_table(modes),
    ]
    for line in failed:
        text.append(f"\nviolation, seed {line['seed']} ({line['mode']}): {line['violations'][0][:300]}")
    for line in errors:
        text.append(f"\nerror, seed {line['seed']} ({line['mode']}): {line['error'][-300:]}")
    return "\n".join(text)


def _table(counts: Mapping[str, int]) -> Sequence[str]:
    return [
        f"| {name} | {count} |" for name, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    ]
