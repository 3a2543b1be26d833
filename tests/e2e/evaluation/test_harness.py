"""`understudy eval --harness`: the real lm-evaluation-harness on a task defined in a folder of the test."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from small_runs import ASSETS, call_cli
from transformers import AutoModelForCausalLM, AutoTokenizer

STUDENT = ASSETS / "models" / "student"
ROWS = [("12+34=", "46"), ("5+6=", "11"), ("70+8=", "78"), ("1+1=", "3")]
TASK = """
task: own_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "own_sums.yaml").write_text(TASK.format(data=data))
    return folder


def expected_perplexity() -> float:
    """exp of the mean negative log-likelihood of the answers, by a plain forward."""
    tokenizer, model = AutoTokenizer.from_pretrained(STUDENT), AutoModelForCausalLM.from_pretrained(STUDENT)
    total = 0.0
    for question, answer in ROWS:
        whole = tokenizer(question + answer, add_special_tokens=False)["input_ids"]
        known = len(tokenizer(question, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        total += sum(float(logprobs[at - 1, whole[at]]) for at in range(known, len(whole)))
    return float(torch.tensor(-total / len(ROWS)).exp())


@pytest.mark.harness
def test_the_harness_perplexity_equals_that_of_a_plain_forward_pass(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    code, output = call_cli("eval", str(STUDENT), "--harness", "own_sums", "--harness-tasks", str(tasks))
    assert code == 0, output
    found = dict(line.rsplit(maxsplit=1) for line in output.splitlines() if line.startswith("own_sums/"))
    assert float(found["own_sums/perplexity,none"]) == pytest.approx(expected_perplexity(), rel=1e-3)


@pytest.mark.harness
def test_a_harness_task_that_does_not_exist_is_refused(tasks: Path) -> None:
    code, output = call_cli("eval", str(STUDENT), "--harness", "no_such_task", "--harness-tasks", str(tasks))
    assert code == 2 and "has no task no_such_task" in output


def test_flags_that_contradict_harness_and_a_missing_package_are_refused() -> None:
    code, output = call_cli("eval", str(STUDENT), "--harness-tasks", "x")
    assert code == 2 and "--harness-tasks is for --harness" in output
    code, output = call_cli("eval", str(STUDENT), "--harness", "a", "--k", "2")
    assert code == 2 and "leave out --k" in output
    if importlib.util.find_spec("lm_eval") is None:
        code, output = call_cli("eval", str(STUDENT), "--harness", "a")
        assert code == 2 and 'pip install "understudy[harness]"' in output
