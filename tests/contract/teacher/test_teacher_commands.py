"""The commands `understudy serve-teacher` and `understudy score`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forked_command import forked_command
from small_runs import Command
from teacher_rig import random_items, write_model
from test_teacher_backends import assert_plain

from understudy.cli.main import main
from understudy.types.scores import ScoreItem, Signal, TeacherScores


def serve(model: Path, log: Path, *options: str, token: str | None = None) -> Command:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("UNDERSTUDY_TOKEN", None)
    if token:
        env["UNDERSTUDY_TOKEN"] = token
    arguments = ["serve-teacher", str(model), "--name", "math", "--bind", "127.0.0.1:0", *options]
    with log.open("wb") as sink:
        if forked := forked_command(arguments, env, sink.fileno()):
            return forked
        command = [sys.executable, "-m", "understudy.cli.main", *arguments]
        return subprocess.Popen(command, env=env, stdout=sink, stderr=sink, text=True)


def address(process: Command, log: Path) -> str:
    until = time.monotonic() + 120
    while not (found := re.search(r"scores at (\S+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.1)
    return found.group(1)


def score(url: str, rows: Path, *options: str, token: str) -> subprocess.CompletedProcess[str]:
    """Runs `score` in a new process, which shows that standard output holds nothing but scores."""
    command = [sys.executable, "-m", "understudy.cli.main", "score", url, str(rows), *options]
    env = {**os.environ, "UNDERSTUDY_TOKEN": token}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def read_scores(items: list[ScoreItem], lines: list[str]) -> list[TeacherScores]:
    found = []
    for item, line in zip(items, lines, strict=True):
        values = json.loads(line)
        ids = np.array(values["ids"]) if "ids" in values else None
        logprobs = np.array(values["logprobs"]) if "logprobs" in values else None
        found.append(
            TeacherScores(item.key, "math", item.signal, np.array(values["sampled_logprobs"]), ids, logprobs)
        )
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_serve_teacher_and_score_give_plain_scores_for_a_file(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", seed=5)
    log = tmp_path / "log.txt"
    process = serve(
        model, log, "--tensor-parallel", str(ranks), "--layout", "padded", token="from-the-environment"
    )
    try:
        url = address(process, log)
        assert "token:" not in log.read_text(), "a token from the environment must not be printed"
        items = [*random_items(70, 1, Signal.TOPK, 3, lengths=(3, 6)), *random_items(2, 2, Signal.AT_IDS, 4)]
        rows = tmp_path / "rows.jsonl"
        lines = [
            {"tokens": item.tokens.tolist(), "positions": item.positions.tolist()}
            | ({} if item.ids is None else {"ids": item.ids.tolist()})
            for item in items
        ]
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        saved = tmp_path / "scores.jsonl"
        done = score(url, rows, "--topk", "3", "--out", str(saved), token="from-the-environment")
        assert done.returncode == 0 and done.stdout == "", done.stderr
        assert_plain(model, items, read_scores(items, saved.read_text().splitlines()))
        # The same command in this process, which has imported everything already.
        monkeypatch.setenv("UNDERSTUDY_TOKEN", "from-the-environment")
        assert main(["score", url, str(rows), "--topk", "3"]) == 0
        assert capsys.readouterr().out == saved.read_text()
        monkeypatch.setenv("UNDERSTUDY_TOKEN", "wrong")
        assert main(["score", url, str(rows)]) == 2
        assert "401" in capsys.readouterr().err
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_serve_teacher_exits_when_a_rank_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    process = serve(write_model(tmp_path / "model"), log, "--tensor-parallel", "2")
    try:
        address(process, log)
        assert re.search(r"token: \S{20,}", log.read_text()), (
            "without a given token one must be generated and printed"
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert process.wait(60) != 0
        assert "rank 1 of this replica ended" in log.read_text()
    finally:
        process.kill()
        process.wait()


def test_serve_teacher_refuses_a_non_loopback_bind_without_a_token(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    process = serve(write_model(tmp_path / "model"), log, "--bind", "0.0.0.0:0")
    assert process.wait(120) == 2 and "refused without a token" in log.read_text()
