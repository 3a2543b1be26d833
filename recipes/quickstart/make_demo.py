"""Makes the recorded run of `understudy view --demo` from a quickstart: python recipes/quickstart/make_demo.py

Keeps what the page reads, without paths of this machine, within a megabyte: metrics with five digits and
without those of single replicas, spans of the last steps, kept rows within a small budget.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "src" / "understudy" / "viewer" / "demo"
STEPS, SPAN_STEPS, KEPT_BYTES = 64, 6, 260_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        help="a finished run made with the settings below; makes one if not given",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = options.run or Path(place) / "run"
        if options.run is None:
            words = [
                f"trainer.steps={STEPS}",
                "trainer.eval_every=16",
                "trainer.eval_samples=60",
                f"run.keep_rows={KEPT_BYTES}",
                f"run.dir={run}",
            ]
            subprocess.run([sys.executable, "-m", "understudy.cli.main", "quickstart", *words], check=True)
        if DEMO.exists():
            shutil.rmtree(DEMO)
        DEMO.mkdir()
        copy(run)
    print(f"{DEMO}: {sum(path.stat().st_size for path in DEMO.rglob('*') if path.is_file()):,} bytes")


def copy(run: Path) -> None:
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["run"]["dir"], recipe["run"]["name"] = "demo", "demo"
    text = re.sub(r'"/(?:[^"]*/)?quickstart/?', '"', json.dumps(recipe, indent=1))
    (DEMO / "recipe.json").write_text(text + "\n")
    state = json.loads((run / "state.json").read_text())
    (DEMO / "state.json").write_text(json.dumps({**state, "pid": 0}) + "\n")
    with (DEMO / "metrics.jsonl").open("w") as out:
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            out.write(json.dumps({key: short(value) for key, value in line.items() if wanted(key)}) + "\n")
    shutil.copy(run / "samples.jsonl", DEMO)
    spans = [json.loads(line) for line in (run / "spans.jsonl").read_text().splitlines()]
    since = sorted(span["end"] for span in spans if span["name"] == "update")[-SPAN_STEPS - 1]
    with (DEMO / "spans.jsonl").open("w") as out:
        for span in spans:
            if span["end"] > since or span["name"] not in ("rollout", "reward", "score"):
                out.write(
                    json.dumps(
                        {
                            key: round(value, 4) if isinstance(value, float) else value
                            for key, value in span.items()
                        },
                        separators=(",", ":"),
                    )
                    + "\n"
                )
    shutil.copytree(run / "kept_rows", DEMO / "kept_rows")


def wanted(key: str) -> bool:
    return not re.match(r"perf/teacher/\w+/\d|time/rollout/|perf/workers|.*(_max|_min)$", key)


def short(value: Any, digits: int = 6) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
