"""Off-policy rows: answers that come with the data, scored and trained like the student's own, each labelled."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import ASSETS, run_cli, write_toml
from transformers import AutoModelForCausalLM, AutoTokenizer

import understudy
from understudy.dataplane.kept_rows import read_columns
from understudy.errors import ConfigError
from understudy.observability.metrics import without_clock

Make = Callable[..., dict[str, Any]]
VOCABULARY = json.loads((ASSETS / "models" / "student" / "config.json").read_text())["vocab_size"]
SMALL: dict[str, Any] = {
    "trainer__steps": 2,
    "trainer__batch_size": 4,
    "trainer__checkpoint_every": 1,
    "run__keep_rows": 1 << 22,
    "data__reward": None,
    "loss__topk": VOCABULARY,
    "loss__sft_coef": 0.5,
    "rollout__off_policy": 0.5,
    "rollout__max_new_tokens": 8,
}


@pytest.fixture
def small(recipe: Make, tmp_path: Path) -> Make:
    """A run over few rows: prompts are measured before it starts."""

    def make(name: str, **more: Any) -> dict[str, Any]:
        rows = (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:32]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
        return recipe(name, **{**SMALL, "data__train": str(tmp_path / "rows.jsonl"), **more})

    return make


def kept(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


def logprobs(model: str, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [P, V] of a plain forward pass."""
    loaded = AutoModelForCausalLM.from_pretrained(ASSETS / "models" / model, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = loaded(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits, -1).numpy()[positions - 1]


def bits(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / "step-000002" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, {name: value.numpy().tobytes() for name, value in weights.items()}


def test_given_answers_are_scored_and_trained_by_their_ids(small: Make) -> None:
    """The loss of the first step by enumeration: forward KL at every token, and cross-entropy at given ones."""
    run = understudy.train(small("run"), progress=False)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "models" / "student")
    data = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()]
    answers = {row["messages"][0]["content"]: row["answer"] for row in data}
    losses, supervised, labels = [], [], []
    rows = kept(run.dir, 1)
    assert len(rows) == 4
    for summary, columns in rows:
        tokens, at = columns["tokens"], np.flatnonzero(columns["loss_mask"])
        given = columns["metrics"]["off_policy"] == 1.0
        labels.append(given)
        if given:
            answer = next(
                text for question, text in answers.items() if f"<user>{question}<" in summary["prompt"]
            )
            expected = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            assert tokens[at].tolist() == expected and set(columns["weight_versions"]) == {-1}
        q_PV, p_PV = (logprobs(model, tokens, at) for model in ("student", f"teacher-{summary['teacher']}"))
        assert np.allclose(p_PV[np.arange(len(at)), tokens[at]], columns["teacher_logprobs"], atol=1e-5)
        cross = -q_PV[np.arange(len(at)), tokens[at]] * given
        supervised += cross[cross > 0].tolist()
        losses += ((np.exp(p_PV) * (p_PV - q_PV)).sum(1) + 0.5 * cross).tolist()
    assert any(labels) and not all(labels)
    assert run.metrics[0]["rollout/off_policy"] == pytest.approx(np.mean(labels))
    assert run.metrics[0]["actor/loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert run.metrics[0]["actor/sft_loss"] == pytest.approx(np.mean(supervised), abs=1e-5)


@pytest.mark.slow
def test_kill_and_resume_is_bit_identical(small: Make, tmp_path: Path) -> None:
    reward = {"data__reward": "understudy.rollout.rewards.builtin:exact_match"}
    table = small("killed", **reward)
    fault = "row_journal.after_put:2"
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    straight = understudy.train(small("straight", **reward), progress=False).dir
    assert bits(Path(table["run"]["dir"])) == bits(straight)


@pytest.mark.slow
def test_async_runs_and_workers_give_the_same_bits(small: Make) -> None:
    one = understudy.train(small("one"), progress=False).dir
    other = understudy.train(small("other", rollout__workers=2), progress=False).dir
    assert bits(one) == bits(other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss__kind": "k2", "loss__signal": "sampled"}, "biased for given ones"),
        ({"loss__signal": "at_ids", "loss__kind": "reverse_kl"}, "given answers have none"),
        ({"rollout__answer_column": "demonstration"}, "no text in the column 'demonstration'"),
        ({"rollout__off_policy": 0.0}, "set rollout.off_policy above 0"),
    ],
)
def test_what_cannot_be_learnt_is_refused(small: Make, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        understudy.train(small("never", **change), progress=False)
