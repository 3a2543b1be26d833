"""Teacher prompts that show the session's reward, its feedback, and the right answer of a sibling session."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import ASSETS, run_cli, write_toml
from transformers import AutoModelForCausalLM

import understudy
from understudy.dataplane.kept_rows import read_columns
from understudy.errors import ConfigError
from understudy.observability.metrics import without_clock

Make = Callable[..., dict[str, Any]]
PROMPT = (
    "{{ session.feedback }}{% if session.solution is defined %}{{ session.solution }}{% endif %}{{ prompt }}"
)


def recipe_with(recipe: Make, name: str, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "teachers__add__prompt": PROMPT,
        "teachers__sort__prompt": "{{ session.reward | int }}{{ session.text }}{{ prompt }}",
        "data__reward": "hinting_rewards:hinting",
        "rollout__n": 3,
        "rollout__max_batch": 4,
        "trainer__steps": 2,
        "trainer__batch_size": 4,
        "trainer__checkpoint_every": 1,
        "run__keep_rows": 1 << 22,
        "run__rollout_dump_every": 1,
        "run__python_path": [str(Path(__file__).parents[1])],
    }
    table = recipe(name, **{**base, **more})
    rows = (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:32]
    small = Path(table["run"]["dir"]).parent / "rows.jsonl"
    small.write_text("\n".join(rows) + "\n")
    table["data"]["train"] = str(small)
    return table


def kept_rows_of(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


def bits(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / "step-000002" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if not name.startswith("async/")} for line in lines]
    return lines, {name: value.numpy().tobytes() for name, value in weights.items()}


def expected_scores(teacher: str, prompt: np.ndarray, written: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(
        ASSETS / "models" / f"teacher-{teacher}", dtype=torch.float64
    ).eval()
    tokens = torch.from_numpy(np.concatenate([prompt, written]).astype(np.int64))
    with torch.no_grad():
        p_TV = torch.log_softmax(model(tokens[None]).logits[0], -1)
    at = len(prompt) + np.arange(len(written))
    return p_TV[at - 1, tokens[at]].numpy()


def test_teacher_prompts_show_the_reward_the_feedback_and_a_siblings_right_answer(recipe: Make) -> None:
    run = understudy.train(recipe_with(recipe, "run"), progress=False).dir
    whole = [json.loads(line) for line in (run / "rollouts" / "000001.jsonl").open(encoding="utf-8")]
    assert len(whole) == 12, "a few of these rows are kept with all their columns"
    texts = {row["key"]: re.sub("<[a-z]+>", "", row["completion"]) for row in whole}
    rewards = {row["key"]: row["reward"] for row in whole}
    rows, solutions = kept_rows_of(run, 1), 0
    for line, columns in rows:
        teacher, text = line["teacher"], texts[line["key"]]
        read = columns[f"teacher_prompt_{teacher}"]
        prompt = line["teacher_prompts"][teacher]
        if teacher == "add":
            others = sorted(
                (key, other)
                for key, other in texts.items()
                if key.split("_")[0] == line["key"].split("_")[0] and key != line["key"]
            )
            right = next((other for key, other in others if rewards[key] == 1), "")
            solutions += bool(right)
            shown = f"{len(text)}{right}"
        else:
            shown = f"{len(text) % 2}{text}"
        assert shown in prompt, (shown, prompt)
        written = columns["tokens"][int(columns["loss_mask"].argmax()) :]
        plain = expected_scores(teacher, read, written)
        assert np.allclose(plain, columns["teacher_logprobs"], rtol=1e-5, atol=1e-5)
    assert rows and solutions


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"rollout__workers": 2}, id="workers"),
        pytest.param({"trainer__mode": "fully_async", "trainer__max_staleness": 0}, id="async"),
    ],
)
def test_session_prompts_give_the_same_bits_with_workers_and_when_async(
    recipe: Make, more: dict[str, Any]
) -> None:
    one = understudy.train(recipe_with(recipe, "one"), progress=False).dir
    assert bits(one) == bits(understudy.train(recipe_with(recipe, "other", **more), progress=False).dir)


@pytest.mark.slow
def test_a_run_with_session_prompts_finishes_in_fast_mode(recipe: Make) -> None:
    """Sessions are batched by arrival, while the score of a session waits for its siblings: that must not deadlock."""
    table = recipe_with(recipe, "run", run__determinism="fast", rollout__max_batch=2)
    assert understudy.train(table, progress=False).steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["row_journal.after_put:1", "row_journal.after_put:2"])
@pytest.mark.parametrize("determinism", ["full", "fast"])
def test_a_killed_and_resumed_run_shows_the_same_session_prompts(
    recipe: Make, tmp_path: Path, fault: str, determinism: str
) -> None:
    """At the kill, rollouts and their feedback are in the journal; some have scores. The resume scores the rest."""
    table = recipe_with(recipe, "killed", run__determinism=determinism)
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    straight = understudy.train(
        recipe_with(recipe, "straight", run__determinism=determinism), progress=False
    ).dir
    run = Path(table["run"]["dir"])
    if determinism == "full":
        assert bits(run) == bits(straight)
    first, second = ([line["teacher_prompts"] for line, _ in kept_rows_of(one, 1)] for one in (run, straight))
    assert first == second


def test_session_solution_in_a_prompt_is_refused_with_one_session_per_prompt(recipe: Make) -> None:
    with pytest.raises(ConfigError, match=r"shows session.solution.*rollout.n = 1"):
        understudy.train(recipe_with(recipe, "never", rollout__n=1), progress=False)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("{% if session.solution is defined %}{{ session.solution }}{% endif %}{{ prompt }}", "solution"),
        ("{{ session.reward }}{{ prompt }}", "reward"),
        ("{{ session.feedback }}{{ prompt }}", "feedback"),
    ],
)
def test_session_values_in_a_prompt_are_refused_without_a_reward(
    recipe: Make, prompt: str, shown: str
) -> None:
    table = recipe_with(recipe, "never", teachers__add__prompt=prompt, teachers__sort__prompt="{{ prompt }}")
    del table["data"]["reward"]
    with pytest.raises(ConfigError, match=f"teachers.add.prompt shows session.{shown}, .* set data.reward"):
        understudy.train(table, progress=False)
