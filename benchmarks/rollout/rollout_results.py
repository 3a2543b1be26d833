"""The rollout benchmark's rows."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import torch


class Results:
    """Result rows, printed and written to disk as soon as they are known. Rows of other parts from the same
    day are kept."""

    def __init__(self, folder: Path, hardware: str) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rollout-{slug}-{datetime.date.today()}.json"
        self._head = {"hardware": hardware, "torch": torch.__version__}
        self._rows: list[dict[str, Any]] = (
            json.loads(self._path.read_text())["rows"] if self._path.exists() else []
        )

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        peer: str = "",
        peer_value: float | None = None,
        goal: float | None = None,
        note: str = "",
    ) -> None:
        ratio = value / peer_value if peer_value else None
        row = {"name": name, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio,
               "goal": goal, "met": None if goal is None or ratio is None else ratio >= goal, "note": note}  # fmt: skip
        self._rows = [*(old for old in self._rows if old["name"] != name), row]
        beside = f"   {ratio:.2f} x {peer} ({peer_value:,.4g}), goal {goal}" if ratio is not None else ""
        print(f"{name}: {value:,.4g} {unit}{beside} {note}", flush=True)
        self._path.write_text(json.dumps({**self._head, "rows": self._rows}, indent=1) + "\n")
