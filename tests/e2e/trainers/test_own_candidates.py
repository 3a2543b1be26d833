"""`loss.signal = "at_ids"`: the teacher scores the student's own candidates; from the engine to the loss."""

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import ASSETS
from transformers import AutoModelForCausalLM, AutoTokenizer

import understudy
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.engines.base import Sampling
from understudy.observability.spans import Spans
from understudy.rollout.timing import BatchTimings
from understudy.trainers.produce.rollouts import LocalRollouts
from understudy.trainers.row_columns import CANDIDATES, PARTITION, rollout_columns
from understudy.types.trajectory import StopReason, Trajectory

EXAMPLE = Path(__file__).parents[3] / "examples" / "minimal_opd.py"
K, BATCH = 3, 8
OWN_CANDIDATES = {
    "loss__kind": "reverse_kl",
    "loss__signal": "at_ids",
    "loss__topk": K,
    "data__shuffle": False,
}


def load_minimal_example() -> ModuleType:
    """The one-file example's functions: rollouts and forward passes without the framework."""
    spec = importlib.util.spec_from_file_location("minimal_opd", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_step() -> tuple[float, float]:
    """Expected loss and gradient norm: reverse KL over the student's top K ids and one bucket for the rest."""
    opd = load_minimal_example()
    load = AutoModelForCausalLM.from_pretrained
    student = load(ASSETS / "models" / "student", dtype=torch.float32).eval()
    teachers = {
        name: load(ASSETS / "models" / f"teacher-{name}", dtype=torch.float32).eval()
        for name in ("add", "sort")
    }
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "models" / "student")
    rows = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:BATCH]]
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        for row in rows
    ]
    seeds = [opd.seed_of(0, 0, f"{0:05d}-{i:07d}", 0, 0) for i in range(BATCH)]
    answers = opd.rollout(student, prompts, seeds, 8, student.generation_config.eos_token_id)
    count, loss = sum(map(len, answers)), torch.zeros(())
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        with torch.no_grad():
            p_TV = opd.predictions(teachers[row["data_source"]], prompt, answer)
        q_TV = opd.predictions(student, prompt, answer)
        ids_TK = q_TV.detach().topk(K).indices
        q_TK, p_TK = q_TV.gather(-1, ids_TK), p_TV.gather(-1, ids_TK)
        q_tail = q_TV.scatter(-1, ids_TK, -torch.inf).logsumexp(-1)
        p_tail = p_TV.scatter(-1, ids_TK, -torch.inf).logsumexp(-1)
        kl_T = (q_TK.exp() * (q_TK - p_TK)).sum(-1) + q_tail.exp() * (q_tail - p_tail)
        loss = loss + kl_T.sum() / count
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    return float(loss.detach()), float(norm)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_with_the_student_s_own_candidates_equals_a_plain_computation(
    recipe: Callable[..., dict[str, Any]], workers: int
) -> None:
    """With workers, candidates also cross a process boundary in both directions."""
    table = recipe(trainer__steps=1, trainer__batch_size=BATCH, rollout__workers=workers, **OWN_CANDIDATES)
    run = understudy.train(table, progress=False)
    loss, norm = first_step()
    assert run.last["actor/loss"] == pytest.approx(loss, rel=1e-4)
    assert run.last["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_a_rollout_read_back_from_the_data_plane_has_its_candidates(tmp_path: Path) -> None:
    """So a run that ends between rollout and score asks the teacher about the same ids after a resume."""
    ids = np.array([[5, 1], [7, 3]], np.int32)
    one = Trajectory(
        "00000-0000000_0_0",
        np.array([1, 2, 3], np.int32),
        np.array([False, True, True]),
        np.array([np.nan, -1, -2], np.float32),
        np.array([-1, 0, 0], np.int32),
        StopReason.EOS,
        candidate_ids=ids,
    )

    async def scenario() -> Trajectory:
        plane = EmbeddedDataPlane.open(
            tmp_path / "plane", max_rows=10, max_bytes=1 << 20, spill_bytes=1 << 20
        )
        try:
            await plane.issue(PARTITION, [one.key], step=1)
            await plane.put(PARTITION, {one.key: rollout_columns(one)})
            unused: Any = None
            sampling = Sampling(4, candidates=2)
            rollouts = LocalRollouts(unused, unused, plane, sampling, Spans(None), BatchTimings())
            return await rollouts.stored(one.key)
        finally:
            await plane.close()

    back = asyncio.run(scenario())
    assert CANDIDATES in rollout_columns(one)
    assert back.candidate_ids is not None and back.candidate_ids.tolist() == ids.tolist()
    assert back.tokens.tolist() == one.tokens.tolist()
