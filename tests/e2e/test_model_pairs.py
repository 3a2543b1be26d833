"""A base student under an instruct teacher, padded heads, tokens that only one of them has: whole runs, held to plain transformers."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from qwen_pair import ADDED, write_model, write_pair, write_questions
from small_runs import call_cli, write_toml
from transformers import AutoModelForCausalLM, AutoTokenizer

import understudy
from understudy.observability.rundir import read_json

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_opd.py"
K, BATCH, NEW = 3, 8, 6


def table(tmp_path: Path, student: str, teacher: str, **loss: Any) -> dict[str, Any]:
    return {
        "student": {"model": student},
        "teachers": {"math": {"model": teacher}},
        "loss": {"topk": K, **loss},
        "rollout": {"max_new_tokens": NEW, "max_batch": BATCH},
        "data": {"train": write_questions(tmp_path / "rows.jsonl"), "shuffle": False},
        "trainer": {"steps": 2, "batch_size": BATCH, "learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "run"), "threads": 1, "determinism": "full"},
    }


def plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_opd", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_loss(student: str, teacher: str, ids: int, ends: int) -> float:
    """Forward KL over the teacher's K best and one bucket for the rest, by models whose heads have the first `ids` rows only."""
    opd = plain()

    def cut(folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.resize_token_embeddings(ids)
        return model.eval()

    own, other = cut(student), cut(teacher)
    tokenizer = AutoTokenizer.from_pretrained(student)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{i}+{i}="}], add_generation_prompt=True, return_dict=False
        )
        for i in range(BATCH)
    ]
    seeds = [opd.seed_of(0, 0, f"{0:05d}-{i:07d}", 0, 0) for i in range(BATCH)]
    answers = opd.rollout(own, prompts, seeds, NEW, ends)
    total, count = 0.0, sum(map(len, answers))
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            p_TV, q_TV = opd.predictions(other, prompt, answer), opd.predictions(own, prompt, answer)
            p_TK, ids_TK = p_TV.topk(K)
            q_TK = q_TV.gather(-1, ids_TK)
            tails = [x.scatter(-1, ids_TK, -torch.inf).logsumexp(-1) for x in (p_TV, q_TV)]
            total += float(
                ((p_TK.exp() * (p_TK - q_TK)).sum(-1) + tails[0].exp() * (tails[0] - tails[1])).sum()
            )
    return total / count


def steps_without_dead_letters(run: Path) -> list[dict[str, Any]]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "actor/loss" in step]
    letters = run / "dataplane" / "dead_letters.jsonl"
    assert len(steps) == 2 and not (letters.exists() and letters.read_text())
    return steps


def test_a_base_student_under_an_instruct_teacher(tmp_path: Path) -> None:
    """Qwen2.5's shape: other eos, eos list, template and padding, and a token that only the teacher has."""
    student, teacher = write_pair(tmp_path, more=("<think>",))
    recipe = table(tmp_path, student, teacher)
    code, said = call_cli("check", str(write_toml(tmp_path / "recipe.toml", recipe)))
    said = " ".join(said.split())
    assert code == 0, said
    ends = "teachers.math ends its turns with '<|endoftext|>' (256), '<|im_end|>' (258); rollouts end with the student's '<|endoftext|>' (256)"
    assert ends in said and "1 token ('<think>' (278)) that the student lacks" in said
    assert "another chat template" in said
    run = understudy.train(recipe, progress=False)
    assert read_json(run.dir / "usable_ids.json") == {"limit": 278, "holes": []}
    first = steps_without_dead_letters(run.dir)[0]
    assert first["actor/loss"] == pytest.approx(first_loss(student, teacher, 278, 256), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "trainer", "rollout"),
    [
        ({"kind": "reverse_kl", "signal": "at_ids"}, {}, {"processes": 1}),
        ({"kind": "jsd", "signal": "hidden"}, {}, {"repetition_penalty": 1.1, "workers": 1}),
        ({"kind": "k3", "signal": "sampled"}, {"ranks": 2}, {"top_k": 20}),
    ],
    ids=["own candidates, engine process", "hidden states, workers", "sampled, two ranks"],
)
def test_no_path_meets_an_id_without_a_token(
    tmp_path: Path, loss: dict[str, Any], trainer: dict[str, Any], rollout: dict[str, Any]
) -> None:
    """The student has padding and a token of its own, the teacher has fewer rows than the student."""
    student = write_model(
        tmp_path / "student", rows=400, eos="<|endoftext|>", ends=256, added=(*ADDED, "<mine>")
    )
    teacher = write_model(tmp_path / "teacher", rows=278, eos="<|im_end|>", ends=[258, 256], seed=1)
    recipe = table(tmp_path, student, teacher, **loss)
    recipe["trainer"] |= trainer
    recipe["rollout"] |= rollout
    run = understudy.train(recipe, progress=False)
    assert read_json(run.dir / "usable_ids.json") == {"limit": 278, "holes": []}
    assert len(steps_without_dead_letters(run.dir)) == recipe["trainer"]["steps"]
