"""Given answers (off-policy rows): answers that come with the data, scored and trained like the student's own."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import ASSETS, call_cli, run_cli, write_toml
from transformers import AutoModelForCausalLM, AutoTokenizer

import understudy
from understudy.config import parse_recipe
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
    """Makes recipes over 32 rows only, because every prompt is measured before a run starts."""

    def make(name: str, **more: Any) -> dict[str, Any]:
        rows = (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:32]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
        return recipe(name, **{**SMALL, "data__train": str(tmp_path / "rows.jsonl"), **more})

    return make


def kept_rows_of(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


def logprobs(model: str, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [P, V] of a plain forward pass."""
    loaded = AutoModelForCausalLM.from_pretrained(ASSETS / "models" / model, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = loaded(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits, -1).numpy()[positions - 1]


def origins(run: Path) -> dict[str, str]:
    return {line["key"]: line["origin"] for step in (1, 2) for line, _ in kept_rows_of(run, step)}


def bits(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / "step-000002" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, {name: value.numpy().tobytes() for name, value in weights.items()}


def test_given_answers_add_cross_entropy_to_the_distillation_loss(small: Make) -> None:
    """Recomputes the first step's loss by plain forward passes: forward KL at every token, cross-entropy at
    given ones."""
    run = understudy.train(small("run"), progress=False)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "models" / "student")
    data = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()]
    answers = {row["messages"][0]["content"]: row["answer"] for row in data}
    losses, supervised, labels = [], [], []
    rows = kept_rows_of(run.dir, 1)
    assert len(rows) == 4
    for summary, columns in rows:
        tokens, at = columns["tokens"], np.flatnonzero(columns["loss_mask"])
        given = columns["origin"] == "data"
        labels.append(given)
        assert summary["origin"] == columns["origin"] and (summary["kl"] is None) == given
        assert np.isnan(columns["behaviour_logprobs"][at]).any() == given
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
    assert run.metrics[0]["rollout/given"] == pytest.approx(np.mean(labels))
    assert run.metrics[0]["actor/loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert run.metrics[0]["actor/sft_loss"] == pytest.approx(np.mean(supervised), abs=1e-5)


GIVEN_ONLY: dict[str, Any] = {
    "teachers": {}, "loss": {"distill_coef": 0.0, "sft_coef": 2.0}, "rollout__off_policy": 1.0,
    "data__reward": "understudy.rollout.rewards.builtin:exact_match",
}  # fmt: skip


def test_given_answers_without_a_teacher_are_trained_with_mean_cross_entropy(
    small: Make, tmp_path: Path
) -> None:
    """The reference is a plain forward pass. A killed and resumed run ends with the same bits."""
    run = understudy.train(small("run", **GIVEN_ONLY), progress=False)
    losses: list[float] = []
    for summary, columns in kept_rows_of(run.dir, 1):
        tokens, at = columns["tokens"], np.flatnonzero(columns["loss_mask"])
        assert summary["origin"] == "data"
        losses += (-logprobs("student", tokens, at)[np.arange(len(at)), tokens[at]]).tolist()
    assert run.metrics[0]["rollout/given"] == 1
    assert run.metrics[0]["actor/sft_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert run.metrics[0]["actor/loss"] == pytest.approx(2 * np.mean(losses), abs=2e-5)
    table = small("killed", **GIVEN_ONLY)
    fault = "row_journal.after_put:2"
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0 and "teachers" not in output, output
    assert bits(Path(table["run"]["dir"])) == bits(run.dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout__off_policy": 0.5}, "the student's own answers would teach it nothing; set rollout.off_policy = 1"),
        ({"loss": {"distill_coef": 0.0}}, "both 0: nothing would be learnt"),
        ({"teachers": {"add": {"model": "x"}}}, "no loss uses a teacher's scores"),
        ({"loss__kl_coef": 0.1, "reference": {}}, "the penalty is estimated on the student's own rows"),
    ],
)  # fmt: skip
def test_settings_that_contradict_a_run_of_given_answers_only_are_refused(
    small: Make, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(small("never", **{**GIVEN_ONLY, **change}))


@pytest.mark.slow
def test_a_killed_and_resumed_run_with_given_answers_gives_the_same_bits(small: Make, tmp_path: Path) -> None:
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
def test_a_killed_and_resumed_async_run_has_the_same_given_answers(small: Make, tmp_path: Path) -> None:
    """With staleness 0 all bits are equal. With staleness 1 the same prompts still get given answers, because that is
    decided by their keys alone."""
    reward = {"data__reward": "understudy.rollout.rewards.builtin:exact_match"}
    for staleness, fault in ((0, "row_journal.after_put:2"), (1.0, "async.after_claim:2")):
        pace = {"trainer__mode": "fully_async", "trainer__max_staleness": staleness}
        table = small(f"killed-{staleness:g}", **reward, **pace)
        code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
        assert code == -signal.SIGKILL, output
        code, output = run_cli("resume", table["run"]["dir"], "--quiet")
        assert code == 0, output
        killed = Path(table["run"]["dir"])
        straight = understudy.train(small(f"straight-{staleness:g}", **reward, **pace), progress=False).dir
        assert origins(killed) == origins(straight)
        assert set(origins(straight).values()) == {"student", "data"}
        if staleness == 0:
            assert bits(killed) == bits(straight)


@pytest.mark.slow
def test_workers_and_an_async_run_without_staleness_give_the_same_bits(small: Make) -> None:
    one = understudy.train(small("one"), progress=False).dir
    assert bits(one) == bits(understudy.train(small("other", rollout__workers=2), progress=False).dir)
    pace = {"trainer__mode": "fully_async", "trainer__max_staleness": 0}
    other = understudy.train(small("async", **pace), progress=False).dir
    assert bits(one)[1] == bits(other)[1] and origins(one) == origins(other)


@pytest.mark.slow
def test_given_answers_in_trls_formats_give_the_same_bits(small: Make, tmp_path: Path) -> None:
    """The answer as a column, as the chat's last message and as TRL's conversational completion."""
    (tmp_path / "trl").mkdir()
    plain = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:32]]
    answers = [[{"role": "assistant", "content": row["answer"]}] for row in plain]
    formats = {
        "messages": [
            {"messages": row["messages"] + end, "data_source": row["data_source"]}
            for row, end in zip(plain, answers, strict=True)
        ],
        "conversational": [
            {"prompt": row["messages"], "completion": end, "data_source": row["data_source"]}
            for row, end in zip(plain, answers, strict=True)
        ],
    }
    expected = bits(understudy.train(small("plain"), progress=False).dir)
    for name, rows in formats.items():
        path = tmp_path / "trl" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = small(name, data__train=str(path), rollout__answer_column="completion")
        assert bits(understudy.train(table, progress=False).dir) == expected


@pytest.mark.slow
def test_the_score_metric_counts_only_the_students_own_answers(small: Make) -> None:
    """A policy gradient beside given answers: they get no importance ratio, and critic/score leaves out their
    rewards."""
    more = {"data__reward": "understudy.rollout.rewards.builtin:exact_match", "loss__task_coef": 0.5, "rollout__n": 4,
            "loss__correction__weigh": "token"}  # fmt: skip
    run = understudy.train(small("run", **more), progress=False)
    rewards = [
        summary["reward"]
        for step in (1, 2)
        for summary, _ in kept_rows_of(run.dir, step)
        if summary["origin"] == "data"
    ]
    assert rewards and set(rewards) == {1.0}
    assert all(0 < line["rollout/given"] < 1 and line["critic/score/mean"] < 0.9 for line in run.metrics)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"loss__kind": "k2", "loss__signal": "sampled", "loss__sft_coef": 0.0},
            "would learn nothing from given answers: loss.kind = 'k2'",
        ),
        ({"loss__signal": "at_ids", "loss__kind": "reverse_kl"}, "given answers have none"),
        ({"rollout__answer_column": "demonstration"}, "no text in the column 'demonstration'"),
        ({"rollout__off_policy": 0.0}, "loss.sft_coef = 0.5 changes nothing .* rollout.off_policy above 0"),
        ({"rollout__agent": "tool"}, "a given answer is one turn"),
    ],
)
def test_settings_that_cannot_train_on_given_answers_are_refused(
    small: Make, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        understudy.train(small("never", **change), progress=False)


def test_answers_that_eval_wrote_can_be_trained_on(small: Make, tmp_path: Path) -> None:
    """`eval --answers` keeps every column of a row and leaves out rows whose answer was cut off."""
    rows = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()]
    sums = [row for row in rows if row["data_source"] == "add"][:24]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    teacher, written = str(ASSETS / "models" / "teacher-add"), tmp_path / "written.jsonl"
    arguments = ["--reward", "understudy.rollout.rewards.builtin:exact_match", "--answers", str(written)]
    code, output = call_cli(
        "eval", teacher, "--data", str(tmp_path / "sums.jsonl"), "--max-new-tokens", "8", *arguments
    )
    assert code == 0, output
    found = [json.loads(line) for line in written.read_text().splitlines()]
    assert [{key: row[key] for key in sums[0]} for row in found] == sums
    assert {(row["written"] == row["answer"]) == (row["written_reward"] == 1.0) for row in found} == {True}
    assert np.mean([row["written_reward"] for row in found]) > 0.9
    code, output = call_cli(
        "eval", teacher, "--data", str(tmp_path / "sums.jsonl"), "--max-new-tokens", "3", *arguments
    )
    assert code == 0 and len(written.read_text().splitlines()) < 24, output
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    more = {
        "data__train": str(tmp_path / "all.jsonl"),
        "rollout__off_policy": 1.0,
        "rollout__answer_column": "written",
    }
    run = understudy.train(small("run", trainer__steps=1, **more), progress=False)
    assert run.last["rollout/given"] == 1.0 and run.last["actor/sft_loss"] > 0
