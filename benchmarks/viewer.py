"""The page on a run of 100,000 rows: first paint, any row, a search, memory of the server, and what it costs a trainer.

    python benchmarks/viewer.py                  # goals: paint < 1 s, row < 200 ms, memory < 300 MB
    python benchmarks/viewer.py --trainer        # also trains the quickstart with and without a page open (minutes)

First paint is taken with a browser where Playwright and chromium are found, otherwise as the time of all the
requests that the first paint needs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from understudy.dataplane.kept_rows import FOLDER_NAME, RowKeeper
from understudy.observability.rundir import RunDir

ROWS_A_STEP = 128


def make_run(folder: Path, rows: int) -> None:
    """Dumps of `rows` rows, metrics and spans of their steps, and kept rows of every tenth step."""
    draw = np.random.default_rng(0)
    words = [f"word{n}" for n in range(500)]
    run = RunDir.create(str(folder), "run")
    run.recipe.write_text(
        json.dumps({"student": {"model": "none"}, "trainer": {"steps": rows // ROWS_A_STEP}, "run": {}})
    )
    run.state.write_text(json.dumps({"status": "finished", "pid": 0}))
    run.rollouts.mkdir()
    keeper = RowKeeper(run.path / FOLDER_NAME, 64 << 20)
    with run.metrics.open("w") as metrics, run.spans.open("w") as spans:
        for step in range(1, rows // ROWS_A_STEP + 1):
            line = {f"group{n % 7}/metric{n}": float(draw.random()) for n in range(120)}
            metrics.write(
                json.dumps({"step": step, "actor/loss": 1 / step, "teacher/a/kl": 2 / step, **line}) + "\n"
            )
            lines = []
            for n in range(ROWS_A_STEP):
                key = f"00000-{step * ROWS_A_STEP + n:07d}_0_0"
                text = " ".join(random.choices(words, k=60))
                lines.append(
                    {
                        "key": key,
                        "prompt": text[:200],
                        "completion": text,
                        "reward": float(n % 2),
                        "stop_reason": "eos",
                        "turns": 1,
                        "tokens": 60,
                        "teacher": "a",
                        "kl": float(draw.exponential()),
                    }
                )
                for nth, name in enumerate(("rollout", "reward", "score")):
                    spans.write(
                        json.dumps(
                            {
                                "name": name,
                                "start": step + nth * 0.2,
                                "end": step + 0.2 + nth * 0.2,
                                "key": key,
                            },
                            separators=(",", ":"),
                        )
                        + "\n"
                    )
            spans.write(
                json.dumps(
                    {"name": "update", "start": step + 0.6, "end": step + 1.0, "step": step},
                    separators=(",", ":"),
                )
                + "\n"
            )
            (run.rollouts / f"{step:06d}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
            if step % 10 == 0:
                keeper.write(
                    step, [({**lines[n], "why": "sample", "worst": []}, columns(draw)) for n in range(12)]
                )


def columns(draw: Any, tokens: int = 400, k: int = 16) -> dict[str, Any]:
    return {
        "tokens": draw.integers(0, 1000, tokens).astype(np.int32),
        "loss_mask": np.arange(tokens) > 50,
        "behaviour_logprobs": -draw.random(tokens).astype(np.float32),
        "weight_versions": np.zeros(tokens, np.int32),
        "teacher_logprobs": -draw.random(tokens - 51).astype(np.float32),
        "teacher_ids": draw.integers(0, 1000, (tokens - 51, k)).astype(np.int32),
        "teacher_topk_logprobs": np.full((tokens - 51, k), -3.0, np.float32),
    }


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli.main", "view", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = re.search(r"http://\S+", process.stdout.readline())
    assert address
    return process, address[0]


def first_paint(address: str) -> tuple[str, float]:
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415
    except ImportError:
        sync_playwright = None
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if sync_playwright is None or chromium is None:
        begun = time.perf_counter()
        with httpx.Client(base_url=address) as client:
            for name in (
                "",
                "page/app.js",
                "page/uplot.js",
                "api/runs",
                "api/keys",
                "api/advisories",
                "api/held-out",
            ):
                client.get(name).raise_for_status()
        return "requests of the first paint", time.perf_counter() - begun
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto("about:blank")
        begun = time.perf_counter()
        page.goto(address)
        page.wait_for_selector("main .view")
        seconds = time.perf_counter() - begun
        browser.close()
    return "first paint", seconds


def measure(folder: Path) -> dict[str, Any]:
    process, address = serve(folder)
    try:
        name, paint = first_paint(address)
        begun = time.perf_counter()
        with httpx.Client(base_url=address, timeout=60) as client:
            while not client.get("api/runs").json()[0]["complete"]:
                time.sleep(0.1)
            indexed = time.perf_counter() - begun
            total = client.get("api/rows").json()["of"]
            times: dict[str, list[float]] = {
                "row": [],
                "page of rows": [],
                "search": [],
                "timeline": [],
                "tokens": [],
            }
            for n in range(30):
                offset = random.randrange(total - 1)
                sort = random.choice(["kl", "step", "reward"])
                rows = timed(times["page of rows"], client, "api/rows", offset=offset, sort=sort, limit=50)[
                    "rows"
                ]
                timed(times["row"], client, "api/row", id=rows[0]["id"])
                kept = client.get("api/rows", params={"kind": "kept", "offset": n, "limit": 1}).json()[
                    "rows"
                ][0]
                timed(times["tokens"], client, "api/row", id=kept["id"])
                timed(times["timeline"], client, "api/timeline", **{"from": 10 * n, "to": 10 * n + 30})
            for word in ("word499", "word7 word8", "nowhere"):
                timed(times["search"], client, "api/rows", q=word)
            memory = psutil.Process(process.pid).memory_info().rss / 1e6
        found = {"rows": total, name: paint, "read everything": indexed, "memory MB": memory}
        for what, seconds in times.items():
            found[f"{what}, median"], found[f"{what}, most"] = statistics.median(seconds), max(seconds)
        return found
    finally:
        process.terminate()
        process.wait()


def timed(seconds: list[float], client: httpx.Client, path: str, **asked: Any) -> Any:
    begun = time.perf_counter()
    reply = client.get(path, params=asked).raise_for_status().json()
    seconds.append(time.perf_counter() - begun)
    return reply


def trainer_cost(folder: Path, steps: int = 60) -> dict[str, float]:
    """Median seconds a step of the quickstart, without a page and with one that asks every second. Steps of
    the two kinds alternate in blocks of ten within one run, so that a drift of the machine hits both alike."""
    words = ["quickstart", "--quiet", f"trainer.steps={steps}", "trainer.eval_every=0", f"run.dir={folder}"]
    trainer = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli.main", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = folder / "metrics.jsonl"
    while not metrics.exists():
        time.sleep(0.2)
    process, address = serve(folder)
    asked = {False: 0, True: 0}
    try:
        with httpx.Client(base_url=address, timeout=60) as client:
            while trainer.poll() is None:
                step = len(metrics.read_text().splitlines())
                watched = step // 10 % 2 == 1
                if watched:
                    client.get("api/runs")
                    client.get("api/advisories")
                    client.get("api/rows")
                asked[watched] += 1
                time.sleep(1.0)
    finally:
        process.terminate()
        process.wait()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for line in map(json.loads, metrics.read_text().splitlines()):
        if line["step"] > 10 and "time/step" in line:
            seconds[line["step"] // 10 % 2 == 1].append(line["time/step"])
    plain, watched_seconds = statistics.median(seconds[False]), statistics.median(seconds[True])
    return {
        "step without a page": plain,
        "step with a page": watched_seconds,
        "slower": watched_seconds / plain - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--trainer", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make_run(Path(place) / "run", options.rows)
        for name, value in measure(Path(place) / "run").items():
            print(
                f"{name:<34} {value:,.3f}" if isinstance(value, float) else f"{name:<34} {value:,}",
                flush=True,
            )
        if options.trainer:
            for name, value in trainer_cost(Path(place) / "trained").items():
                print(f"{name:<34} {value:,.4f}", flush=True)


if __name__ == "__main__":
    main()
