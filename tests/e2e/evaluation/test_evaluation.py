"""Evaluation in a run and by `eval`: metrics over several samples, the best checkpoint, export and resume."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from small_runs import ASSETS, call_cli, run_cli, write_toml
from transformers import AutoTokenizer

import understudy
from understudy.assembly import sessions
from understudy.cli.main import main
from understudy.observability.metrics import read_metrics, without_clock
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.run import evaluate_model
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.trainers.models import LoadedModel

Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


def evaluated_run(module_folder: Path, recipe: Make) -> Path:
    """A run with a learning rate so high that accuracy drops after two steps: its best checkpoint is not its last.
    Trained once for all tests of this file."""
    run = module_folder / "run"
    if not (run / "report.html").exists():
        data = module_folder / "eval.jsonl"
        lines = Path(recipe()["data"]["train"]).read_text().splitlines()
        data.write_text("\n".join(lines[:24]) + "\n")
        table = recipe(
            data__eval=str(data),
            trainer__steps=6,
            trainer__eval_every=1,
            trainer__eval_k=3,
            trainer__checkpoint_every=4,
            trainer__learning_rate=1e-1,
        )
        table["run"]["dir"] = str(run)
        code, output = call_cli("train", str(write_toml(module_folder / "r.toml", table)), "--quiet")
        assert code == 0, output
    return run


def test_validation_metrics_are_written_for_every_data_source(module_folder: Path, recipe: Make) -> None:
    lines = read_metrics(evaluated_run(module_folder, recipe) / "metrics.jsonl")
    for line in lines:
        for name in ("accuracy", "avg@3", "pass@1", "pass@2", "pass@3"):
            assert {f"val/{name}", f"val/{name}/add", f"val/{name}/sort"} <= line.keys()
        assert line["val/pass@1"] == pytest.approx(line["val/avg@3"])
        assert line["val/pass@1"] <= line["val/pass@2"] <= line["val/pass@3"]
    assert lines[0]["val/pass@3"] > lines[0]["val/pass@1"] > 0, "samples of one problem differ"


def test_the_best_checkpoint_is_kept_when_older_ones_are_deleted(module_folder: Path, recipe: Make) -> None:
    run = evaluated_run(module_folder, recipe)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] >= 1]
    best = max(lines, key=lambda line: (line["val/accuracy"], -line["step"]))["step"]
    store = CheckpointStore(run / "checkpoints")
    assert store.marked("best") == best and best < 4, (
        "the learning rate should lower the accuracy after step 2"
    )
    assert store.steps() == [best, 4, 6]


@pytest.mark.slow
def test_export_and_eval_with_best_use_the_best_checkpoint(
    module_folder: Path, recipe: Make, tmp_path: Path
) -> None:
    run = evaluated_run(module_folder, recipe)
    store = CheckpointStore(run / "checkpoints")
    out = tmp_path / "model"
    code, output = run_cli("export", str(run), str(out), "--best")
    assert code == 0, output
    exported, stored = load_file(out / "model.safetensors"), store.load(store.marked("best")).policy.model
    name = next(iter(stored))
    assert (exported[name] == stored[name].numpy()).all()
    code, output = run_cli("eval", str(run), "--best", "--k", "2")
    assert code == 0, output
    line = read_metrics(run / "metrics.jsonl")[store.marked("best") or 0]
    found = dict(
        text.rsplit(maxsplit=1) for text in output.splitlines() if text.startswith(("accuracy", "pass@2"))
    )
    assert float(found["accuracy"]) == pytest.approx(line["val/accuracy"], abs=1e-4)
    assert "pass@2" in found


@pytest.mark.parametrize("trouble", ["missing", "damaged"])
def test_export_and_eval_do_not_need_the_optimizer_state(
    module_folder: Path, recipe: Make, tmp_path: Path, trouble: str
) -> None:
    """They used to refuse a checkpoint with intact weights whose optimizer state was missing or damaged. `resume` still
    refuses it."""
    run = shutil.copytree(evaluated_run(module_folder, recipe), tmp_path / "run")
    files = sorted((run / "checkpoints").glob("step-*/optimizer.safetensors"))
    for file in files:
        content = file.read_bytes()
        file.unlink()
        if trouble == "damaged":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
    for flags, folder in ((["--best"], files[0].parent), ([], files[-1].parent)):
        out = tmp_path / f"model{len(flags)}"
        code, output = call_cli("export", str(run), str(out), *flags)
        assert code == 0, output
        exported, stored = (load_file(one / "model.safetensors") for one in (out, folder))
        assert all(exported[name].tobytes() == stored[name].tobytes() for name in stored)
        code, output = call_cli("eval", str(run), "--samples", "2", *flags)
        assert code == 0, output
    code, output = call_cli("export", str(run), str(tmp_path / "averaged"), "--averaged")
    assert code == 2 and "optimizer.safetensors" in output, output
    code, output = call_cli("resume", str(run), "trainer.steps=7", "--quiet")
    assert code == 2 and "is whole" in output and "optimizer.safetensors" in output, output
    (files[-1].parent / "model.safetensors").unlink()
    code, output = call_cli("export", str(run), str(tmp_path / "earlier"))
    assert code == 0, output
    assert "| Steps trained | 4 |" in (tmp_path / "earlier" / "README.md").read_text()


@pytest.mark.slow
def test_resume_is_refused_without_deleting_anything_when_two_checkpoints_are_damaged(
    module_folder: Path, recipe: Make, tmp_path: Path
) -> None:
    """The newest checkpoint is damaged; the run goes back to the one before it, and then that one is damaged
    too. Only the best checkpoint is left, and the journal no longer holds the rows after it. `resume` used to
    notice that only after it had cut the metrics and removed the damaged checkpoint."""
    run = shutil.copytree(evaluated_run(module_folder, recipe), tmp_path / "run")
    store, lines = CheckpointStore(run / "checkpoints"), read_metrics(run / "metrics.jsonl")
    best = store.marked("best")
    damage(run, 6)
    code, output = run_cli("resume", str(run), fault="sync.after_produce:1")
    assert code == -signal.SIGKILL and store.steps() == [best, 4], output
    assert "step-000006 is damaged" in output and "going back to step 4" in output, output
    content = damage(run, 4)
    before = (run / "metrics.jsonl").read_bytes()
    code, output = run_cli("resume", str(run))
    assert code == 2 and "step-000004 is damaged" in output, output
    assert f"That of step {best} is whole, but the rows after it are deleted" in output, output
    assert store.steps() == [best, 4] and (run / "metrics.jsonl").read_bytes() == before
    (run / "checkpoints" / "step-000004" / "model.safetensors").write_bytes(content)
    code, output = run_cli("resume", str(run), "--quiet")
    assert code == 0, output
    again = read_metrics(run / "metrics.jsonl")
    assert list(map(without_clock, again)) == list(map(without_clock, lines))


def damage(run: Path, step: int) -> bytes:
    """Changes a byte of a checkpoint's weights; returns the original content of the file."""
    file = run / "checkpoints" / f"step-{step:06d}" / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
    return content


def test_eval_refuses_best_for_a_model_folder_and_a_missing_data_file(
    module_folder: Path, recipe: Make, tmp_path: Path
) -> None:
    run = evaluated_run(module_folder, recipe)
    code, output = call_cli("eval", str(recipe()["student"]["model"]), "--best", "--data", str(module_folder / "eval.jsonl"),
                            "--reward", "understudy.rollout.rewards.builtin:exact_match")  # fmt: skip
    assert code == 2 and "--best chooses among the checkpoints of a run" in output
    code, output = call_cli("eval", str(run), "--data", str(module_folder / "none.jsonl"))
    assert code == 2 and "error: --data: dataset" in output and "loading" not in output, output


@pytest.mark.slow
def test_resume_lists_changed_keys_and_refuses_those_that_cannot_change(
    module_folder: Path, recipe: Make
) -> None:
    run = evaluated_run(module_folder, recipe)
    before = [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]
    code, output = run_cli("resume", str(run), "loss.topk=4", "run.seed=3")
    assert code == 2 and output.count("cannot resume with") == 2 and "Traceback" not in output, output
    code, output = run_cli("resume", str(run), "trainer.steps=7", "trainer.eval_k=0", "--quiet")
    assert (
        code == 0 and "changed trainer.steps: 6 → 7" in output and "changed trainer.eval_k: 3 → 0" in output
    ), output
    after = [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]
    assert after[: len(before)] == before and after[-1]["step"] == 7 and "val/pass@1" not in after[-1]
    assert json.loads((run / "recipe.json").read_text())["trainer"]["steps"] == 7


@pytest.mark.slow
def test_eval_of_a_run_uses_the_run_s_repetition_penalty_and_dtype(
    recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both change greedy answers, so `eval RUN` gives the run's `val/accuracy` only if it uses them."""
    data = tmp_path / "eval.jsonl"
    data.write_text("\n".join(Path(recipe()["data"]["train"]).read_text().splitlines()[:24]) + "\n")
    reward = "small_rewards:varied"
    table = recipe(
        data__eval=str(data), data__reward=reward, trainer__steps=1, rollout__repetition_penalty=1.7,
        student__dtype="bfloat16",
    )  # fmt: skip
    run = understudy.train(table, progress=False)
    assert main(["eval", str(run.dir)]) == 0
    output = capsys.readouterr().out
    found = next(float(line.split()[1]) for line in output.splitlines() if line.startswith("accuracy "))
    assert found == pytest.approx(run.metrics[-1]["val/accuracy"], abs=1e-4)
    plain = recipe(
        "plain", data__eval=str(data), data__reward=reward, trainer__steps=1, student__dtype="bfloat16"
    )
    other = understudy.train(plain, progress=False)
    assert abs(other.metrics[0]["val/accuracy"] - run.metrics[0]["val/accuracy"]) > 1e-3, (
        "the repetition penalty should change the accuracy"
    )


@pytest.mark.slow
def test_evaluators_use_the_run_s_max_trajectory_tokens(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Evaluator] = []

    def recorded(*parts: Any) -> Evaluator:
        made.append(Evaluator(*parts))
        return made[-1]

    for module in (sessions, evaluate_model):
        monkeypatch.setattr(module, "Evaluator", recorded)
    data = tmp_path / "eval.jsonl"
    data.write_text("\n".join(Path(recipe()["data"]["train"]).read_text().splitlines()[:4]) + "\n")
    table = recipe(data__eval=str(data), trainer__steps=1, rollout__max_trajectory_tokens=5)
    assert main(["eval", str(understudy.train(table, progress=False).dir)]) == 0
    assert [one.max_generated for one in made] == [5, 5]


@pytest.mark.parametrize("model", ["a run", "a model"])
def test_eval_finds_a_reward_module_in_the_current_folder(
    model: str, module_folder: Path, recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PYTHONPATH, as `train` finds a module beside its recipe."""
    measured = (
        evaluated_run(module_folder, recipe) if model == "a run" else Path(recipe()["student"]["model"])
    )
    (tmp_path / "reward_in_a_folder.py").write_text(
        "def always(row, text):\n    return 1.0\n\ndef points(row, text):\n    return 7.5\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--data", str(module_folder / "eval.jsonl"), "--samples", "2", "--max-new-tokens", "4"]
    code, output = call_cli("eval", str(measured), "--reward", "reward_in_a_folder:always", *arguments)
    assert code == 0 and "accuracy                         1.0000" in output, output
    code, output = call_cli("eval", str(measured), "--reward", "reward_in_a_folder:points", *arguments)
    assert code == 0 and "mean reward                      7.5000" in output and "accuracy" not in output, (
        output
    )
    code, output = call_cli("eval", str(measured), "--reward", "nowhere_at_all:f", *arguments)
    assert code == 2 and f"modules are looked up in {tmp_path}" in output.replace(f"{module_folder}, ", ""), (
        output
    )


def test_the_evaluation_engine_is_sized_for_the_longest_prompt_plus_the_answer(
    tmp_path: Path, recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the engine reserves keys and values for rows of its maximum length: a whole context of 32,768
    tokens does not fit."""
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()[:6]
    data = tmp_path / "eval.jsonl"
    data.write_text("\n".join(lines) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(recipe()["student"]["model"])
    longest = max(
        len(
            tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True)[
                "input_ids"
            ]
        )
        for line in lines
    )
    lengths: list[Any] = []
    make = LoadedModel.engine
    monkeypatch.setattr(
        LoadedModel, "engine", lambda self, *given, **named: lengths.append(named.get("max_length")) or make(self, *given, **named)
    )  # fmt: skip
    reward = "understudy.rollout.rewards.builtin:exact_match"
    model = str(recipe()["student"]["model"])
    arguments = ("eval", model, "--data", str(data), "--reward", reward, "--max-new-tokens", "5")
    code, output = call_cli(*arguments)
    assert code == 0 and lengths == [longest + 5], output


def test_eval_of_a_model_folder_uses_max_batch_and_dtype_from_its_flags(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defaults, float32 and 64 answers at a time, are too much for a model of a billion parameters."""
    data = tmp_path / "eval.jsonl"
    data.write_text("\n".join(Path(recipe()["data"]["train"]).read_text().splitlines()[:3]) + "\n")
    made: list[tuple[str, int]] = []
    make = LoadedModel.engine
    monkeypatch.setattr(
        LoadedModel, "engine",
        lambda self, batch, *given, **named: made.append((str(self.model.dtype), batch)) or make(self, batch, *given, **named),
    )  # fmt: skip
    reward = "understudy.rollout.rewards.builtin:exact_match"
    arguments = ("eval", str(recipe()["student"]["model"]), "--data", str(data), "--reward", reward)
    arguments += ("--max-new-tokens", "5")
    for flags in ((), ("--max-batch", "2", "--dtype", "bfloat16")):
        code, output = call_cli(*arguments, *flags)
        assert code == 0 and "evaluating on 3 problems" in output, output
    assert made == [("torch.float32", 64), ("torch.bfloat16", 2)]


def test_teachers_are_evaluated_with_the_student_s_context_length(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher's engine used to be sized for the model's whole context, too much memory per row on a GPU with an agent
    loop."""
    data = tmp_path / "eval.jsonl"
    data.write_text("\n".join(Path(recipe()["data"]["train"]).read_text().splitlines()[:4]) + "\n")
    contexts: list[int] = []
    greedy = Evaluator.greedy
    monkeypatch.setattr(
        Evaluator, "greedy", lambda self, *given, **named: contexts.append(self.context) or greedy(self, *given, **named)
    )  # fmt: skip
    table = recipe(
        data__eval=str(data), trainer__steps=1, trainer__eval_teachers=True, rollout__context_length=48
    )
    for key in table["teachers"]:  # external teachers, as in the fixture, are not evaluated
        table["teachers"][key] = {"model": str(ASSETS / "models" / f"teacher-{key}"), "key": key}
    understudy.train(table, progress=False)
    assert len(contexts) == 4 and set(contexts) == {48}, "the student, both teachers, then the student again"


def test_eval_drops_problems_that_do_not_fit_beside_max_new_tokens(recipe: Make, tmp_path: Path) -> None:
    """`eval` used to reckon with the run's own max_new_tokens: it kept problems that then failed for lack of room."""
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()[:3]
    long = json.loads(lines[0])
    long["messages"][0]["content"] = "+".join(["12"] * 30) + "="
    data = tmp_path / "eval.jsonl"
    data.write_text("\n".join([*lines, json.dumps(long)]) + "\n")
    table = recipe(
        data__eval=str(data), data__reward="small_rewards:varied", data__overlong="drop", trainer__steps=1
    )
    run = understudy.train(table, progress=False)
    assert "evaluating on 4 problems" in call_cli("eval", str(run.dir))[1]
    code, output = call_cli("eval", str(run.dir), "--max-new-tokens", "60")
    assert code == 0 and "evaluating on 3 problems" in output, output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples", "0"], "--samples 0: expected a whole number of at least 1 (from Python: samples)"),
        (["--k", "-1"], "--k -1: expected a whole number of at least 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: expected a whole number of at least 1 (from Python: max_new_tokens)"),
        (["--max-batch", "0"], "--max-batch 0: expected a whole number of at least 1 (from Python: max_batch)"),
        ([], "--max-new-tokens 256 leaves no room for a problem"),
    ],
)  # fmt: skip
def test_eval_refuses_flags_with_which_no_problem_can_be_evaluated(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    """Without a run the default is 256 answer tokens, twice the context of the quickstart's student: every problem used
    to fail."""
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "12+34=", "answer": "46"}\n')
    reward = "understudy.rollout.rewards.builtin:exact_match"
    student = str(ASSETS / "models" / "student")
    code, output = call_cli(
        "eval", student, "--data", str(tmp_path / "held_out.jsonl"), "--reward", reward, *flags
    )
    assert code == 2 and message in " ".join(output.split()), output
