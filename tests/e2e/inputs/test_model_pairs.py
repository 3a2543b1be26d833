"""Students and teachers that differ in eos, template, padding or tokens: whole runs, compared with plain
transformers."""

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from qwen_pair import ADDED, CHATML, write_model, write_pair, write_questions
from small_runs import call_cli, write_toml
from transformers import AutoModelForCausalLM, AutoTokenizer

import understudy
from understudy.dataplane.ledger import audit
from understudy.engines.base import GenerateRequest, Sampling
from understudy.errors import ClusterError
from understudy.observability.rundir import read_json
from understudy.trainers.models import load_model
from understudy.types.trajectory import StopReason
from understudy.types.usable_ids import UsableIds

EXAMPLE = Path(__file__).parents[3] / "examples" / "minimal_opd.py"
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


def load_minimal_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_opd", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_loss(student: str, teacher: str, ids: int, ends: Any) -> float:
    """The expected loss of the first step: forward KL over the teacher's top K and one bucket for the rest, by models
    whose heads are cut to the first `ids` rows."""
    opd = load_minimal_example()

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


def test_a_base_student_under_an_instruct_teacher_trains_with_the_expected_loss(tmp_path: Path) -> None:
    """Shaped like Qwen2.5: they differ in eos, eos list, template and padding, and only the teacher has `<think>`."""
    student, teacher = write_pair(tmp_path, more=("<think>",))
    recipe = table(tmp_path, student, teacher)
    code, output = call_cli("check", str(write_toml(tmp_path / "recipe.toml", recipe)))
    output = " ".join(output.split())
    assert code == 0, output
    ends = "teachers.math ends its turns with '<|endoftext|>' (256), '<|im_end|>' (258); rollouts end with the student's '<|endoftext|>' (256)"
    assert ends in output and "1 token ('<think>' (278)) that the student lacks" in output
    assert "another chat template" in output
    run = understudy.train(recipe, progress=False)
    assert read_json(run.dir / "usable_ids.json") == {"limit": 278, "holes": [], "placeholders": []}
    first = steps_without_dead_letters(run.dir)[0]
    assert first["actor/loss"] == pytest.approx(first_loss(student, teacher, 278, 256), rel=1e-4)


@pytest.mark.slow
def test_the_qwen2_5_pair_at_its_real_vocabulary_size_trains_with_the_expected_loss(tmp_path: Path) -> None:
    """Qwen2.5-0.5B under Qwen2.5-3B-Instruct: 151,665 tokens, heads of 151,936 and 152,064 rows."""
    student, teacher = write_pair(tmp_path, base=151_643, rows=(151_936, 152_064))
    recipe = table(tmp_path, student, teacher)
    code, output = call_cli("check", str(write_toml(tmp_path / "recipe.toml", recipe)))
    assert code == 0 and "'<|endoftext|>' (151643), '<|im_end|>' (151645)" in " ".join(output.split()), output
    run = understudy.train(recipe, progress=False)
    assert read_json(run.dir / "usable_ids.json") == {"limit": 151_665, "holes": [], "placeholders": []}
    first = steps_without_dead_letters(run.dir)[0]
    assert first["actor/loss"] == pytest.approx(first_loss(student, teacher, 151_665, 151_643), rel=1e-4)


class AnyOf(frozenset[int]):
    """Equal to each of its members: makes the plain rollout, which takes one eos, stop at any of several."""

    __hash__ = frozenset.__hash__

    def __eq__(self, token: object) -> bool:
        return token in self


ENDS = [258, *range(64)]
"""Many ids, so that models with random weights generate one of them."""


def test_a_generation_stops_at_each_eos_of_the_model(tmp_path: Path) -> None:
    student = write_model(tmp_path / "student", rows=288, eos="<|endoftext|>", ends=ENDS)
    loaded, opd = load_model(student), load_minimal_example()
    assert loaded.stop_ids == tuple(sorted([*ENDS, 256]))
    sampling = Sampling(NEW, loaded.stop_ids, usable=UsableIds(278))
    prompts = [np.array([70 + i, 80, 90], np.int32) for i in range(BATCH)]
    engine = loaded.engine(BATCH)
    found = asyncio.run(
        engine.generate([GenerateRequest(str(i), one, sampling, seed=i) for i, one in enumerate(prompts)])
    )
    loaded.model.resize_token_embeddings(278)
    expected = opd.rollout(
        loaded.model, [one.tolist() for one in prompts], range(BATCH), NEW, AnyOf([*ENDS, 256])
    )
    assert [one.tokens.tolist() for one in found] == expected
    assert {one.stop_reason for one in found} == {StopReason.EOS, StopReason.LENGTH}


@pytest.mark.slow
def test_a_rollout_stops_at_each_eos_of_the_student(tmp_path: Path) -> None:
    """The eos list of generation_config.json and the tokenizer's own eos."""
    student = write_model(tmp_path / "student", rows=288, eos="<|endoftext|>", ends=ENDS)
    teacher = write_model(tmp_path / "teacher", rows=288, eos="<|endoftext|>", ends=256, seed=1)
    recipe = table(tmp_path, student, teacher)
    recipe["run"]["rollout_dump_every"] = 1
    run = understudy.train(recipe, progress=False)
    first = steps_without_dead_letters(run.dir)[0]
    assert first["actor/loss"] == pytest.approx(
        first_loss(student, teacher, 278, AnyOf([*ENDS, 256])), rel=1e-4
    )
    rows = [json.loads(line) for line in (run.dir / "rollouts" / "000001.jsonl").read_text().splitlines()]
    assert {row["stop_reason"] for row in rows} == {"eos", "length"}
    assert all(row["tokens"] == NEW for row in rows if row["stop_reason"] == "length")


MINE = "{{ '<mine>' }}"


@pytest.mark.parametrize("template", [CHATML, MINE + CHATML], ids=["a row", "the template"])
def test_check_finds_prompts_with_a_token_that_the_teacher_lacks(tmp_path: Path, template: str) -> None:
    added = (*ADDED, "<mine>")
    student = write_model(
        tmp_path / "student", rows=400, eos="<|endoftext|>", ends=256, added=added, template=template
    )
    teacher = write_model(tmp_path / "teacher", rows=278, eos="<|endoftext|>", ends=256, seed=1)
    recipe = table(tmp_path, student, teacher)
    rows = [{"messages": [{"role": "user", "content": "<mine>" if i == 5 else f"{i}="}]} for i in range(16)]
    Path(recipe["data"]["train"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, count = (1, 16) if template != CHATML else (6, 1)
    line = (
        f"data.train: the prompt of {recipe['data']['train']}, line {first} holds '<mine>' (id 278), which teachers.math lacks, "
        f"so the row cannot be scored ({count} of 16 rows)"
    )
    path = str(write_toml(tmp_path / "recipe.toml", recipe))
    code, output = call_cli("check", path)
    assert code == 2 and f"error: {line}; choose a model that has the token, or leave it out" in output, (
        output
    )
    code, output = call_cli("check", path, "trainer.max_dead_letters=0.1")
    assert (code, f"note       {line}; each becomes a dead letter" in output) == (
        (0, True) if count == 1 else (2, False)
    ), output
    code, output = call_cli(
        "check", path, 'teachers.math.prompt="{{ messages[0].content }}"', "trainer.max_dead_letters=0.1"
    )
    assert "the prompt of teachers.math for" in output, output


def test_a_run_that_ends_over_a_token_the_teacher_lacks_names_the_token_and_teacher(tmp_path: Path) -> None:
    """A custom agent loop may write ids that no check has seen."""
    student = write_model(
        tmp_path / "student", rows=400, eos="<|endoftext|>", ends=256, added=(*ADDED, "<mine>")
    )
    teacher = write_model(tmp_path / "teacher", rows=278, eos="<|endoftext|>", ends=256, seed=1)
    recipe = table(tmp_path, student, teacher)
    loop = "troubled_loop:WritesId"
    recipe["rollout"] |= {"agent": loop, "agent_options": {loop: {"token": 278}}}
    with pytest.raises(
        ClusterError, match=r"token id 278 at position 0 is no token of teachers\.math; leave it out"
    ):
        understudy.train(recipe, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("determinism", ["full", "fast"])
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_prompt_with_an_id_that_the_teacher_lacks_becomes_a_dead_letter(
    tmp_path: Path, mode: str, determinism: str
) -> None:
    student = write_model(
        tmp_path / "student", rows=400, eos="<|endoftext|>", ends=256, added=(*ADDED, "<mine>")
    )
    teacher = write_model(tmp_path / "teacher", rows=278, eos="<|endoftext|>", ends=256, seed=1)
    recipe = table(tmp_path, student, teacher)
    rows = [{"messages": [{"role": "user", "content": "<mine>" if i == 5 else f"{i}="}]} for i in range(16)]
    Path(recipe["data"]["train"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["trainer"] |= {"mode": mode, "max_dead_letters": 0.2}
    if (mode, determinism) == ("fully_async", "full"):
        recipe["trainer"]["max_staleness"] = 0.0
    recipe["run"]["determinism"] = determinism
    run = understudy.train(recipe, progress=False)
    lines = (run.dir / "dataplane" / "dead_letters.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["00000-0000005_0_0"]
    assert "token id 278 at position" in lines[0] and "is no token of teachers.math;" in lines[0]
    report = audit(run.dir)
    assert report.balanced and (report.trained, report.dead, report.in_flight) == (15, 1, 0), str(report)


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
def test_ids_without_a_token_make_no_dead_letters_for_any_signal_or_process_layout(
    tmp_path: Path, loss: dict[str, Any], trainer: dict[str, Any], rollout: dict[str, Any]
) -> None:
    """The student's head has padding and a token of its own; the teacher's head has fewer rows."""
    student = write_model(
        tmp_path / "student", rows=400, eos="<|endoftext|>", ends=256, added=(*ADDED, "<mine>")
    )
    teacher = write_model(tmp_path / "teacher", rows=278, eos="<|im_end|>", ends=[258, 256], seed=1)
    recipe = table(tmp_path, student, teacher, **loss)
    recipe["trainer"] |= trainer
    recipe["rollout"] |= rollout
    run = understudy.train(recipe, progress=False)
    assert read_json(run.dir / "usable_ids.json") == {"limit": 278, "holes": [], "placeholders": []}
    assert len(steps_without_dead_letters(run.dir)) == recipe["trainer"]["steps"]
