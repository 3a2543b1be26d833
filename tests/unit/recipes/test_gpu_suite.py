"""benchmarks/one_gpu/suite.py: which tasks run, their time limits, and the archive of their results."""

import json
import random
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from understudy.teacher.scoring.model import vocabulary_of

ROOT = Path(__file__).resolve().parents[3]
SUITE = ROOT / "benchmarks" / "one_gpu" / "suite.py"


def suite(folder: Path, tasks: str, *arguments: str) -> tuple[str, list[dict[str, object]]]:
    (folder / "tasks.toml").write_text(tasks)
    command = [
        sys.executable,
        str(SUITE),
        "--tasks",
        str(folder / "tasks.toml"),
        "--out",
        str(folder / "out"),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [
        json.loads(line) for line in (folder / "out" / "tasks.jsonl").read_text().splitlines()
    ]


def task(name: str, code: str, seconds: float = 60, needs: str = "[]") -> str:
    return f"[[task]]\nname = {name!r}\ncommand = '''{{python}} -c {shlex.quote(code)}'''\nseconds = {seconds}\nneeds = {needs}\n"


def test_finished_tasks_are_not_run_again_and_failed_ones_are(tmp_path: Path) -> None:
    tasks = (
        task("well", "print(1)")
        + task("failing", "raise SystemExit(3)")
        + task("later", "", needs='["not/there"]')
    )
    output, lines = suite(tmp_path, tasks)
    assert [(line["name"], line["code"]) for line in lines] == [("well", 0), ("failing", 3)]
    assert "later: not run, needs not/there" in output
    assert (tmp_path / "out" / "well.log").read_text() == "1\n"
    _, lines = suite(tmp_path, tasks)
    assert [line["name"] for line in lines] == ["well", "failing", "failing"]


def test_a_task_over_its_time_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    output, (line,) = suite(tmp_path, task("long", code, seconds=3))
    assert line["code"] is None and "long: past its seconds, killed" in output
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a child of the killed task is still alive"
        time.sleep(0.05)


def test_a_task_is_skipped_if_a_needed_variable_is_unset_or_its_output_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    making = (
        task("making", f"open({str(made)!r}, 'w')", needs='["$PLACE_OF_THE_SUITE"]')
        + f"makes = {str(made)!r}\n"
    )
    tasks = task("first", "") + making
    output, lines = suite(tmp_path, tasks)
    assert [line["name"] for line in lines] == ["first"]
    assert "making: not run, needs $PLACE_OF_THE_SUITE" in output
    monkeypatch.setenv("PLACE_OF_THE_SUITE", str(tmp_path))
    _, lines = suite(tmp_path, tasks)
    assert [line["name"] for line in lines] == ["first", "making"] and made.exists()
    (tmp_path / "out" / "tasks.jsonl").unlink()
    _, lines = suite(tmp_path, tasks)
    assert [line["name"] for line in lines] == ["first"], "a task ran although its output exists"


def archived(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {name: archive.extractfile(name).read() for name in archive.getnames()}


def test_results_of_a_killed_task_are_in_the_archive_and_its_checkpoints_are_deleted(tmp_path: Path) -> None:
    """Metrics of earlier GPU runs were lost with the machine: only --out had them."""
    code = f"""
import pathlib, time
run = pathlib.Path({str(tmp_path / "out" / "run")!r})
(run / "checkpoints" / "step-1").mkdir(parents=True)
(run / "checkpoints" / "step-1" / "model.safetensors").write_bytes(b"0" * 1000)
(run / "metrics.jsonl").write_text('{{"step": 1}}\\n')
print("half-way", flush=True)
time.sleep(600)
"""
    archive = tmp_path / "back" / "results.tar.gz"
    output, _ = suite(tmp_path, task("long", code, seconds=3), "--archive", str(archive))
    found = archived(archive)
    assert set(found) == {"run/metrics.jsonl", "tasks.jsonl", "long.log"}
    assert found["long.log"] == b"half-way\n" and "half-way\n== long: past its seconds, killed" in output
    assert not (tmp_path / "out" / "run" / "checkpoints").exists()


def test_an_archive_has_no_weights_and_leaves_out_files_beyond_its_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.append(str(SUITE.parent))
    import archive

    noise = random.Random(0)
    lines = "".join(f"{noise.random()}\n" for _ in range(40_000))
    for name in ("a.json", "b.jsonl", "c.log", "weights.safetensors"):
        (tmp_path / name).write_text(lines)
    monkeypatch.setattr(archive, "MOST_ARCHIVED", 400_000)
    archive.write_archive(tmp_path, tmp_path / "back" / "results.tar.gz")
    found = archived(tmp_path / "back" / "results.tar.gz")
    assert list(found) == ["a.json", "b.jsonl", "left-out.txt"] and found["left-out.txt"] == b"c.log\n"
    (tmp_path / "a.json").unlink(), (tmp_path / "b.jsonl").unlink()
    archive.write_archive(tmp_path, tmp_path / "back" / "results.tar.gz")
    end = archived(tmp_path / "back" / "results.tar.gz")["c.log"]
    assert (
        len(end) <= 300_000
        and lines.encode().endswith(end)
        and end.split(b"\n")[0] in lines.encode().split(b"\n")
    )


def test_the_scoring_benchmarks_teacher_has_all_ids_of_its_sequences_in_its_vocabulary(
    tmp_path: Path,
) -> None:
    """Its tokenizer once had 32 words, and a replica refused the random ids of the benchmark."""
    sys.path.append(str(SUITE.parents[1]))
    from scoring import TINY, sequences, write_model

    vocab = 42 * 24
    write_model(tmp_path / "tiny", TINY, vocab, "cpu", torch.float32)
    known = set(vocabulary_of(str(tmp_path / "tiny")).ids.values())
    assert all(known >= set(row.tolist()) for row in sequences("64", 8, vocab))


def test_the_tasks_of_suite_toml_name_files_that_exist() -> None:
    sys.path.append(str(SUITE.parent))
    from suite import read_tasks

    for one in read_tasks(SUITE.with_name("suite.toml")):
        parts = shlex.split(one.command)
        scripts = [
            word
            for word in parts
            if word.endswith(".py") or (word.endswith(".toml") and "models" not in word)
        ]
        assert all((ROOT / script).exists() for script in scripts), one.name
