"""Recipes that learn in minutes on two CPU cores: privileged context, given answers, teachers of other kinds."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import understudy
from understudy.config import load_recipe
from understudy.dataplane.ledger import audit

RECIPES = Path(__file__).parents[3] / "recipes"


def run_make_script(script: Path, out: Path) -> Path:
    subprocess.run([sys.executable, str(script), "--out", str(out)], check=True, timeout=900)
    return out


@pytest.fixture(scope="module")
def hinted_student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that repeats an answer shown before the question, and cannot solve the problems itself."""
    script = RECIPES / "self-distillation" / "make_model.py"
    return run_make_script(script, tmp_path_factory.mktemp("models") / "student")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "sorts", "both"),
    [
        ("recipe", 0.8, 0.4),
        ("feedback", 0.5, 0.25),
        ("lora", 0.45, 0.2),
        ("average", 0.5, 0.25),
    ],
)
def test_a_student_learns_from_itself_as_a_teacher_that_sees_the_answer(
    hinted_student: Path, tmp_path: Path, name: str, sorts: float, both: float
) -> None:
    """It starts without the skill. As its own teacher it sees the answers and only scores."""
    if name == "lora":
        pytest.importorskip("peft")
    overrides = [f"run.dir={tmp_path / 'run'}", f"student.model={hinted_student}"]
    recipe = load_recipe(RECIPES / "self-distillation" / f"{name}.toml", overrides)
    run = understudy.train(recipe, progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.1
    assert run.last["val/accuracy"] > both and run.last["val/accuracy/sort"] > sorts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_given_answers_beside_its_own(tmp_path: Path) -> None:
    recipe = RECIPES / "given-answers" / "recipe.toml"
    run = understudy.train(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy"] > 0.85
    shares = [line["rollout/given"] for line in run.metrics[1:]]
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.03)
    assert run.last["actor/sft_loss"] < run.metrics[1]["actor/sft_loss"] / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_given_answers_alone(tmp_path: Path) -> None:
    recipe = RECIPES / "given-answers" / "sft.toml"
    run = understudy.train(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_teachers_of_another_tokenizer(tmp_path: Path) -> None:
    folder = RECIPES / "other-tokenizer"
    student = run_make_script(folder / "make_model.py", tmp_path / "student")
    overrides = [f"run.dir={tmp_path / 'run'}", f"student.model={student}"]
    run = understudy.train(load_recipe(folder / "recipe.toml", overrides), progress=False)
    assert run.metrics[0]["val/accuracy/sort"] < 0.5
    assert run.last["val/accuracy/sort"] > 0.85
    assert run.metrics[1]["teacher/add/in_chains"] > 0.1 > run.last["teacher/add/in_chains"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("signal", ["sampled", "topk"])
def test_a_real_student_trains_some_steps_under_a_teacher_of_another_family(
    tmp_path: Path, signal: str
) -> None:
    """That the whole recipe learns was measured once (docs/teachers.md)."""
    recipe = RECIPES / "other-tokenizer" / "stories.toml"
    config = load_recipe(recipe)
    models = [recipe.parent / one for one in (config.student.model, config.teachers["smollm2"].model)]
    if missing := [str(one) for one in models if not one.exists()]:
        pytest.skip(f"the head of {recipe.name} says how to make {', '.join(missing)}")
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    assert tokenizer("Once upon a time, there was")["input_ids"] == [1, 9038, 2501, 263, 931, 29892, 727, 471]
    overrides = ["trainer.steps=3", f"run.dir={tmp_path / 'run'}", f"loss.signal={signal}"]
    if signal == "topk":
        overrides += ["loss.kind=reverse_kl", "loss.topk=64"]
    run = understudy.train(load_recipe(recipe, overrides), progress=False)
    for line in run.metrics:
        one, chains, left = (
            line[f"teacher/smollm2/{name}"] for name in ("one_to_one", "in_chains", "left_out")
        )
        assert one + chains + left == pytest.approx(1) and 0 < chains < 0.3 and left < 0.05
        assert 0 < line["actor/distillation/k1"] < 3
    report = audit(run.dir)
    assert (report.trained, report.dead) == (48, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_teachers_in_eight_bits(tmp_path: Path) -> None:
    recipe = RECIPES / "eight-bit-teachers" / "recipe.toml"
    run = understudy.train(load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"]), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy"] > 0.85
    log = (run.dir / "logs" / "trainer.log").read_text()
    assert "teacher add has weights in float32+int8: KL " in log


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_a_mixture_of_experts_over_two_processes(tmp_path: Path) -> None:
    folder = RECIPES / "mixture-of-experts"
    teacher = run_make_script(folder / "make_model.py", tmp_path / "teacher")
    overrides = [f"run.dir={tmp_path / 'run'}", f"teachers.sort.model={teacher}"]
    run = understudy.train(load_recipe(folder / "recipe.toml", overrides), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy/sort"] > 0.85


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_learns_from_mixtures_of_two_teachers(tmp_path: Path) -> None:
    folder = RECIPES / "mixtures"
    data = run_make_script(folder / "make_data.py", tmp_path / "data")
    overrides = [f"run.dir={tmp_path / 'run'}", f"data.train={data / 'train.jsonl'}"]
    run = understudy.train(load_recipe(folder / "recipe.toml", overrides), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.3
    assert run.last["val/accuracy"] > 0.5
    assert all(line["teacher/add+sort/share"] == 1 for line in run.metrics[1:])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_of_two_fine_tuned_teachers_learns_both_domains(tmp_path: Path) -> None:
    folder, data = RECIPES / "two-domains", tmp_path / "data"
    config = load_recipe(folder / "recipe.toml")
    models = [folder / one for one in (config.student.model, *(t.model for t in config.teachers.values()))]
    if missing := [str(one) for one in models if not one.exists()]:
        pytest.skip(f"{folder / 'README.md'} says how to make {', '.join(missing)}")
    made = [sys.executable, str(folder / "make_data.py"), "--out", str(data)]
    subprocess.run(made, check=True, timeout=60)
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        f"data.train={data}/train.jsonl",
        f"data.eval={data}/valid.jsonl",
    ]
    run = understudy.train(load_recipe(folder / "recipe.toml", overrides), progress=False)
    assert run.metrics[0]["val/accuracy"] < 0.05
    assert run.last["val/accuracy/past"] > 0.9 and run.last["val/accuracy/order"] > 0.3
