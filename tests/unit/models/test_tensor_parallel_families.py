"""Which families a teacher's `tensor_parallel` can split: two processes compared with the whole model, or a refusal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from families import FAMILIES

SPLITTABLE = {
    "qwen2", "qwen3", "llama", "llama3-rope", "llama-yarn", "llama-linear", "llama-dynamic", "mistral-window", "gemma", "gemma2",
    "gemma3", "phi", "gpt-neox", "cohere", "cohere2", "granite", "smollm3", "starcoder2", "nemotron", "exaone4", "seed-oss", "ernie4.5",
    "qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "olmo2", "olmo3", "deepseek-v3", "qwen3-next",
}  # fmt: skip
"""docs/models.md says the same."""


@pytest.mark.slow
def test_families_split_by_tensor_parallel_score_the_same_and_others_are_refused(tmp_path: Path) -> None:
    child = Path(__file__).with_name("cut_child.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(child), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={"GLOO_SOCKET_IFNAME": "lo", "PATH": ""},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=170)[0] for rank in ranks]
    found = json.loads(outputs[0].splitlines()[-1])
    assert found.keys() == FAMILIES.keys()
    for name, result in found.items():
        if name in SPLITTABLE:
            assert isinstance(result, float) and result < 2e-5, f"{name}: {result}"
        else:
            assert "serve it with one device per replica" in str(result), f"{name}: {result}"
