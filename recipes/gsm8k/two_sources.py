"""Writes prompts with every second one under the source gsm8k-informed, for a recipe with two teachers.

python recipes/gsm8k/two_sources.py IN.jsonl OUT.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(given: Path, written: Path) -> None:
    rows = [json.loads(line) for line in given.read_text().splitlines()]
    for row in rows[1::2]:
        row["data_source"] = "gsm8k-informed"
    written.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
