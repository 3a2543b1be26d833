"""The page on a run of 100,000 rows: first paint, any row, memory of the server, and what it costs a trainer.

    python benchmarks/viewer.py                  # about 9 minutes on two cores
    python benchmarks/viewer.py --no-trainer     # without the training run
    python benchmarks/viewer.py --only-trainer   # the training run alone, about 5 minutes

First paint is taken with a browser where Playwright and chromium are found, otherwise as the time of all the
requests that the first paint needs. For the trainer's cost a quickstart trains while the server of that run
answers what an open page asks; in one of every two blocks of steps the server is stopped (SIGSTOP). The figure is
the median over pairs of blocks, as in `keep_rows_cost.py`. Beside it stand the trainer's own CPU seconds a step,
which do not depend on how programs share the cores, and the share of a core that the server takes while it answers.

Results go to benchmarks/results/viewer-<hardware>-<date>.json, one row per goal, or to the folder named by `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from hardware import cpu_name
from keep_rows_cost import compared, is_on, paired
from step_problem import Row, save
from understudy.dataplane.kept_rows import FOLDER_NAME, RowKeeper
from understudy.observability.rundir import RunDir

ROWS_A_STEP = 128


def make_run(folder: Path, rows: int) -> None:
    """Dumps of `rows` rows, metrics and spans of their steps, and kept rows of every tenth step."""
    draw = np.random.default_rng(0)
    words = [f"word{n}" for n in range(500)]
    run = RunDir.create(str(folder), "run")
    run.recipe.write_text(
        json.dumps({"student": {"model": "none"}, "trainer": {"steps": -(-rows // ROWS_A_STEP)}, "run": {}})
    )
    run.state.write_text(json.dumps({"status": "finished", "pid": 0}))
    run.rollouts.mkdir()
    keeper = RowKeeper(run.path / FOLDER_NAME, 64 << 20)
    with run.metrics.open("w") as metrics, run.spans.open("w") as spans:
        for step in range(1, -(-rows // ROWS_A_STEP) + 1):
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


def _peak_megabytes(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024 / 1e6


def first_paint(address: str) -> tuple[str, float, float]:
    """What was timed, its seconds, and the seconds until the curves stood there."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not find_spec("playwright"):
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
        spent = time.perf_counter() - begun
        return "requests of the first paint", spent, spent
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector("main .view .chart")
        # The page's own clock: since its navigation began.
        seconds = page.evaluate("performance.getEntriesByType('paint').at(-1).startTime") / 1000
        curves = page.evaluate("performance.now()") / 1000
        browser.close()
    return "first paint", max(seconds, 0.0), curves


def measure(folder: Path) -> dict[str, Any]:
    process, address = serve(folder)
    try:
        name, paint, curves = first_paint(address)
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
                timed(times["tokens"], client, "api/candidates", id=kept["id"], **{"from": 0, "to": 32})
                timed(times["timeline"], client, "api/timeline", **{"from": 10 * n, "to": 10 * n + 30})
            for word in ("word499", "word7 word8", "nowhere"):
                timed(times["search"], client, "api/rows", q=word)
            memory = _peak_megabytes(process.pid)
        found = {
            "rows": total,
            name: paint,
            "curves": curves,
            "read everything": indexed,
            "memory MB": memory,
        }
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


BLOCK, WARM = 6, 1
ASKED = ("runs", "keys", "advisories", "held-out", "rows")
CURVES = (
    "actor/loss",
    "teacher/add/kl",
    "teacher/sort/kl",
    "critic/score/mean",
    "response_length/mean",
    "time/step",
)


def trainer_cost(folder: Path, blocks: int) -> list[Row]:
    """A quickstart of `blocks` blocks of steps; in some the server of its page answers (`is_on`), in the others it is
    stopped. The page asks every two seconds, as an open one does."""
    steps = BLOCK * blocks
    words = ["quickstart", "--quiet", f"trainer.steps={steps}", "trainer.eval_every=0", f"run.dir={folder}"]
    cpu_file, recording = folder.with_suffix(".cpu.json"), Path(__file__).with_name("keep_rows_cost.py")
    trainer = subprocess.Popen(
        [sys.executable, str(recording), "0", str(cpu_file), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = folder / "metrics.jsonl"
    while not metrics.exists():
        time.sleep(0.2)
    process, address = serve(folder)
    asked, server = 0, psutil.Process(process.pid)
    answering = [0.0, 0.0]
    """Seconds in which the server ran, and its CPU seconds."""
    last = (time.monotonic(), sum(server.cpu_times()[:2]))
    try:
        # A connection of each request: the server ends kept ones that were idle while it was stopped.
        unkept = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=address, timeout=60, limits=unkept) as client:
            running, due = True, 0.0
            while trainer.poll() is None:
                step = metrics.read_bytes().count(b"\n")  # the first line is the evaluation of step 0
                now = (time.monotonic(), sum(server.cpu_times()[:2]))
                if running and step > 2 * BLOCK:
                    answering = [answering[0] + now[0] - last[0], answering[1] + now[1] - last[1]]
                last = now
                wanted = is_on(max(step, 1), BLOCK)
                if wanted != running:
                    process.send_signal(signal.SIGCONT if wanted else signal.SIGSTOP)
                    running = wanted
                if running and time.monotonic() > due:
                    due = time.monotonic() + 2.0
                    for name in ASKED:
                        client.get(f"api/{name}").raise_for_status()
                    client.get("api/curves", params={"key": CURVES, "points": 600}).raise_for_status()
                    asked += 1
                time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()
    lines = map(json.loads, metrics.read_text().splitlines())
    seconds = {line["step"]: line["time/step"] for line in lines if "time/step" in line}
    # From one update to the next: most of it belongs to the later step, which the rollouts were for.
    cpu = {int(step) + 1: spent for step, spent in json.loads(cpu_file.read_text()).items()}
    return [
        *compared("trainer with a page open", paired(seconds, BLOCK, skip=WARM), 0.01),
        *compared("a step's CPU with a page open, trainer's process", paired(cpu, BLOCK, skip=WARM), 0.01),
        Row("the server while it answers a page", round(answering[1] / answering[0], 4), "of a core"),
        Row("median step of that trainer", round(statistics.median(seconds.values()), 4), "s"),
        Row("refreshes of the page", asked, "times"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--no-trainer", action="store_true", help="without the training run")
    part.add_argument("--only-trainer", action="store_true", help="the training run alone")
    parser.add_argument(
        "--blocks", type=int, default=140, help=f"blocks of {BLOCK} steps of the training run"
    )
    parser.add_argument("--out", type=Path, help="folder of the result file, for trials")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = [] if options.only_trainer else page_speed(Path(place) / "run", options.rows)
        if not options.no_trainer:
            rows += trainer_cost(Path(place) / "trained", options.blocks)
        rows.append(Row("load average of the machine, 5 minutes", round(os.getloadavg()[1], 2), "processes"))
        for row in rows:
            print(
                f"{row.name:<50} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}",
                flush=True,
            )
    # Under another name: the speed page shows the newest file of all goals.
    save("viewer_trainer" if options.only_trainer else "viewer", cpu_name(), rows, options.out)


def page_speed(run: Path, rows: int) -> list[Row]:
    make_run(run, rows)
    found = measure(run)
    for name, value in found.items():
        print(f"{name:<34} {value:,.3f}" if isinstance(value, float) else f"{name:<34} {value:,}", flush=True)
    paint = next(name for name in found if "first paint" in name)
    return [
        goal(f"{found['rows']:,} rows: {paint}", found[paint], "s", 1.0),
        Row("until the curves are drawn", round(found["curves"], 3), "s"),
        goal("any row, the slowest of 30", max(found["row, most"], found["tokens, most"]), "s", 0.2),
        goal("memory of the server, at most", found["memory MB"], "MB", 300.0),
        Row("a page of rows, the slowest of 30", round(found["page of rows, most"], 4), "s"),
        Row("search in all texts, the slowest of 3", round(found["search, most"], 3), "s"),
        Row("timeline, the slowest of 30", round(found["timeline, most"], 4), "s"),
    ]


def goal(name: str, value: float, unit: str, most: float) -> Row:
    return Row(name, round(value, 5), unit, goal=f"< {most:g}", met=value < most)


if __name__ == "__main__":
    main()
