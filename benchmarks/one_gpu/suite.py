"""Runs the GPU benchmarks and studies one after another, in pieces that fit the time a GPU is lent for.

    python benchmarks/one_gpu/suite.py --seconds 1500 --out gpu-results
    python benchmarks/one_gpu/suite.py --only determinism,user-load --out gpu-results

`suite.toml` has the tasks, most wanted first: a command, the seconds it may take, and the files it needs. A task whose files are not there is
left out for now and looked at again after the next one. A task that has ended by itself with 0 is not run again with the same --out. One that runs past its
seconds is killed with all that it started. Outputs and `tasks.jsonl` are in --out, which `{out}` in a command stands for.

`--archive FILE` is one compressed file with the results so far: what is small, and the end of what is not (`archive.py`). It is
written again while a task runs and after each task, so that it is there whenever a machine is taken away. Checkpoints in --out
are deleted when their task has ended, because one of a 1.5B student takes 22 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from archive import write_archive
from step_problem import killed_at_the_end

ROOT = Path(__file__).resolve().parents[2]
_LOOK_SECONDS = 2.0
_ARCHIVE_SECONDS = 20.0
_SHOWN_CHARACTERS = 1500
"""Of the end of a task's log, when it has ended."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    command: str
    seconds: float
    needs: tuple[str, ...] = ()
    """Files or folders, from the project's root, or environment variables that name one: `$UNDERSTUDY_VLLM_PYTHON`."""
    makes: str = ""
    """What the task is for: where it exists already, the task is left out."""

    @property
    def missing(self) -> list[str]:
        return [place for place in self.needs if not _place(place).exists()]

    @property
    def made(self) -> bool:
        return bool(self.makes) and _place(self.makes).exists()

    @property
    def ready(self) -> bool:
        return not self.missing


def _place(name: str) -> Path:
    return ROOT / os.path.expandvars(name)


def read_tasks(path: Path, only: str = "") -> list[Task]:
    tables = tomllib.loads(path.read_text())["task"]
    tasks = [Task(**{**table, "needs": tuple(table.get("needs", ()))}) for table in tables]
    wanted = [name for name in only.split(",") if name]
    if unknown := set(wanted) - {task.name for task in tasks}:
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: not in {path}")
    return [task for task in tasks if not wanted or task.name in wanted]


def ended(out: Path) -> set[str]:
    """Names of the tasks that have ended by themselves with 0."""
    log = out / "tasks.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {line["name"] for line in lines if line["code"] == 0}


def carry_out(task: Task, out: Path, archive: Path | None) -> dict[str, Any]:
    begun = time.monotonic()
    words = [
        word.replace("{python}", sys.executable).replace("{out}", str(out))
        for word in shlex.split(task.command)
    ]
    # vLLM looks for flashinfer's sampler and fails where that package is not installed.
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | os.environ
    with (out / f"{task.name}.log").open("w") as sink:
        process = subprocess.Popen(words, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        with killed_at_the_end(process):
            code: int | None = None
            while code is None and (left := begun + task.seconds - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left, _ARCHIVE_SECONDS))
                if code is None and archive is not None:
                    write_archive(out, archive)
    for folder in [*out.rglob("checkpoints")]:
        shutil.rmtree(folder, ignore_errors=True)
    return {"name": task.name, "code": code, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    options = _options()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    done = ended(out)
    left = [task for task in read_tasks(options.tasks, options.only) if task.name not in done]
    while left and (rest := deadline - time.monotonic()) > 0:
        left = [one for one in left if not one.made]
        task = next((one for one in left if one.ready and one.seconds <= rest), None)
        if task is None:
            if not options.wait or all(one.ready for one in left):
                break
            time.sleep(min(_LOOK_SECONDS, rest))
            continue
        left.remove(task)
        line = carry_out(task, out, options.archive)
        with (out / "tasks.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        if options.archive is not None:
            write_archive(out, options.archive)
        ending = "past its seconds, killed" if line["code"] is None else f"exit code {line['code']}"
        shown = (out / f"{task.name}.log").read_text(errors="replace")[-_SHOWN_CHARACTERS:]
        print(f"{shown.rstrip()}\n== {line['name']}: {ending}, {line['seconds']:.0f} s\n", flush=True)
    for task in left:
        missing = ", ".join(task.missing)
        print(
            f"{task.name}: not run, {'needs ' + missing if missing else f'needs {task.seconds:.0f} s'}",
            flush=True,
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=Path, default=Path(__file__).with_name("suite.toml"))
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--seconds", type=float, default=24 * 3600.0, help="for everything")
    parser.add_argument("--wait", action="store_true", help="for files that are not there yet")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--archive", type=Path, help="one file with the results, written again and again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
