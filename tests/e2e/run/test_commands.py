"""CLI commands on real runs, and the same from Python."""

import asyncio
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import fake_hub
from huggingface_hub import constants
from small_runs import ASSETS, write_toml
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import understudy
from understudy.cli.main import main
from understudy.dataplane.ledger import audit
from understudy.rollout.agents.single_turn import SingleTurn
from understudy.rollout.tools.sandbox import namespace_problem

Make = Callable[..., dict[str, Any]]


def flaky_reward(row: dict[str, Any], text: str) -> float:
    """Raises on some rows and gives NaN on others: both must become dead letters."""
    question = row["messages"][0]["content"]
    if question.startswith("9"):
        raise RuntimeError("reward failed")
    return float("nan") if question.startswith("8") else 1.0


@pytest.fixture
def finished(recipe: Make) -> understudy.Run:
    return understudy.train(
        recipe(data__eval=str(ASSETS / "data" / "test.jsonl"), trainer__eval_samples=16, trainer__steps=2),
        progress=False,
    )


def test_a_finished_run_has_its_files_and_can_be_audited_evaluated_exported_and_resumed(
    finished: understudy.Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in (
        "recipe.json",
        "state.json",
        "metrics.jsonl",
        "spans.jsonl",
        "samples.jsonl",
        "report.html",
        "logs/trainer.log",
    ):
        assert (finished.dir / name).exists(), name
    page = (finished.dir / "report.html").read_text()
    assert '"val/accuracy"' in page and "understudy export" in page and '"student_topk_logprobs"' not in page
    assert '"kind":"kept"' in page and '"kind":"held-out"' in page
    assert json.loads((finished.dir / "state.json").read_text())["status"] == "finished"
    assert "token-of-the-test-session" not in "".join(
        path.read_text(errors="replace") for path in finished.dir.rglob("*") if path.is_file()
    )

    assert main(["audit", str(finished.dir)]) == 0
    assert "issued 32 = trained 32" in capsys.readouterr().out

    assert main(["eval", str(finished.dir), "--samples", "16"]) == 0
    measured = dict(line.split() for line in capsys.readouterr().out.strip().splitlines())
    assert float(measured["accuracy"]) == pytest.approx(finished.last["val/accuracy"], abs=1e-4)

    with fake_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", hub.token)
        transformers_logging.enable_progress_bar()  # as in a new process
        assert main(["export", str(finished.dir), str(tmp_path / "out"), "--push", "my-org/student"]) == 0
    shown = capsys.readouterr()
    assert f"pushed to {hub.url}/my-org/student (private)" in shown.out
    assert "%|" not in shown.err, "no progress bars of transformers"
    assert hub.files["my-org/student"] == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34="}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model.generate(**ids, max_new_tokens=4).shape[1] > ids["input_ids"].shape[1]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "teacher-add" in card and "forward_kl" in card
    assert '# base_model: write the hub id of "student" here' in card and "prompts: train.jsonl" in card
    assert main(["export", str(finished.dir), str(tmp_path / "out")]) == 2

    written = (finished.dir / "state.json").stat().st_mtime_ns
    assert main(["resume", str(finished.dir)]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert (finished.dir / "state.json").stat().st_mtime_ns == written, (
        "a resume with nothing to do starts no model or teacher"
    )
    metrics, report = finished.dir / "metrics.jsonl", finished.dir / "report.html"
    whole, page = metrics.read_bytes(), report.read_bytes()
    metrics.write_bytes(whole + b'{"step": 2, "actor/lo')
    report.unlink()
    assert main(["resume", str(finished.dir)]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert metrics.read_bytes() == whole and report.read_bytes() == page, (
        "the launch may have been killed after its last step, before the report was whole"
    )
    for length, message in (
        (
            "trainer.steps=1",
            f"trainer.steps = 1: {finished.dir} has taken 2 steps already; steps are counted",
        ),
        ("trainer.passes=0.001", f": 1 step: {finished.dir} has taken 2 steps already; passes are counted"),
    ):
        assert main(["resume", str(finished.dir), length]) == 2
        output = capsys.readouterr().err
        assert (
            message in output
            and f"or leave {length.partition('=')[0]} out" in output
            and "changed" not in output
        )
    assert main(["doctor", str(finished.dir)]) == 0
    output = capsys.readouterr().out
    assert "ended (finished)" in output and "under way" not in output and "healthy" not in output


def test_check_describes_the_loss_and_plan_prints_the_changed_keys(
    recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_toml(tmp_path / "recipe.toml", recipe()))
    assert main(["check", path]) == 0
    assert "forward_kl over the teacher's top-8" in capsys.readouterr().out
    assert main(["plan", path, "trainer.steps=77"]) == 0
    out = capsys.readouterr().out
    assert "[trainer]\nsteps = 77\n" in out and "77 steps" in out
    assert "topk = 8\n" in out and "gamma" not in out, "keys with their defaults are left out"


def test_doctor_reports_tool_isolation_and_a_call_without_command_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "torch" in output and "bubblewrap" not in output
    problem = namespace_problem()
    assert f"tool isolation   {f'none ({problem})' if problem else 'namespaces'}" in output
    assert main([]) == 2


@pytest.mark.slow
def test_runs_without_run_dir_get_separate_directories(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = recipe(trainer__steps=1)
    table["run"].pop("dir")
    runs = [understudy.train(table, progress=False) for _ in range(2)]
    assert runs[0].dir != runs[1].dir and len(list((tmp_path / "runs").iterdir())) == 2


def test_rows_whose_reward_fails_become_dead_letters_up_to_max_dead_letters(
    recipe: Make, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()]
    failing = [row for row in rows if row["messages"][0]["content"][0] in "89"][:3]
    passing = [row for row in rows if row["messages"][0]["content"][0] not in "89"][:29]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*failing, *passing]))
    table = recipe(
        data__train=str(data),
        data__reward="test_commands:flaky_reward",
        trainer__steps=2,
        trainer__max_dead_letters=0.2,
    )
    run = understudy.train(table, progress=False)
    letters = [
        json.loads(line) for line in (run.dir / "dataplane" / "dead_letters.jsonl").read_text().splitlines()
    ]
    assert len(letters) == 3 and all("reward flaky_reward" in letter["reason"] for letter in letters)
    report = audit(run.dir)
    assert report.balanced and report.dead == 3 and report.trained == 29

    strict = recipe(
        "strict",
        data__train=str(data),
        data__reward="test_commands:flaky_reward",
        trainer__steps=2,
        trainer__max_dead_letters=0.0,
    )
    with pytest.raises(understudy.errors.UnderstudyError, match="max_dead_letters"):
        understudy.train(strict, progress=False)


class SlowOnce:
    """An agent loop that hangs on some prompts: only those may run into the deadline."""

    async def run(self, prompt: Any, context: Any) -> Any:
        if prompt.messages[0]["content"].startswith("9"):
            await asyncio.sleep(60)
        return await SingleTurn().run(prompt, context)


def test_only_the_row_of_a_hanging_agent_loop_becomes_a_dead_letter(recipe: Make, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()]
    hanging = [row for row in rows if row["messages"][0]["content"].startswith("9")][:1]
    data = tmp_path / "data.jsonl"
    passing = [row for row in rows if not row["messages"][0]["content"].startswith("9")][:15]
    data.write_text("".join(json.dumps(row) + "\n" for row in [*hanging, *passing]))
    table = recipe(
        data__train=str(data),
        rollout__agent="test_commands:SlowOnce",
        rollout__deadline_seconds=1.0,
        trainer__steps=1,
        trainer__max_dead_letters=0.2,
    )
    run = understudy.train(table, progress=False)
    report = audit(run.dir)
    assert report.balanced and report.dead == 1 and report.trained == 15
    (reason,) = report.reasons
    assert reason.startswith("agent loop timed out: 00000-")
    assert reason.endswith("took longer than rollout.deadline_seconds = 1")


def test_distill_and_export_work_from_python_without_package_metadata(
    tmp_path: Path, teacher_urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        json.loads(line)
        for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()
        if '"add"' in line
    ][:16]
    run = understudy.distill(
        student=ASSETS / "models" / "student",
        teacher=ASSETS / "models" / "teacher-add",
        data=rows,
        progress=False,
        trainer__steps=1,
        trainer__batch_size=8,
        rollout__max_new_tokens=8,
        loss__topk=8,
        run__dir=str(tmp_path / "run"),
    )
    assert run.steps == 1 and run.last["teacher/teacher/rows"] == 8
    found = importlib.metadata.version

    def without_ours(name: str) -> str:
        if name == "understudy":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", without_ours)  # as in a source tree on PYTHONPATH
    assert run.export(tmp_path / "out") == tmp_path / "out"
    with pytest.raises(understudy.errors.ConfigError, match="section__key"):
        understudy.distill(student="s", teacher="t", data=rows, steps=3)
