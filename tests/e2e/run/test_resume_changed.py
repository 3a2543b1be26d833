"""Runs resumed with changed keys (processes, workers, staleness), on another day, or with redacted options."""

import asyncio
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import understudy
from understudy.cli.main import main
from understudy.dataplane.ledger import audit
from understudy.errors import ConfigError
from understudy.observability.metrics import without_clock
from understudy.run.launch import resume

Make = Callable[..., dict[str, Any]]


def bits_of(run: understudy.Run) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run.dir / "checkpoints" / "step-000003" / "model.safetensors")
    lines = [without_clock(line) for line in run.metrics]
    return lines, {name: tensor.tobytes() for name, tensor in weights.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resume_that_adds_an_engine_process_and_a_worker_gives_the_same_bits(recipe: Make) -> None:
    straight = understudy.train(recipe("straight", trainer__steps=3), progress=False)
    first = understudy.train(recipe("changed", trainer__steps=2), progress=False)
    changes = ["trainer.steps=3", "rollout.processes=1", "rollout.workers=1"]
    assert bits_of(asyncio.run(resume(first.dir, changes, progress=False))) == bits_of(straight)


DATED = (
    "{{ bos_token }}<user>{{ strftime_now('%d%m%Y') }}{{ messages[0]['content'] }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_run_resumed_on_another_day_renders_the_date_of_its_start(recipe: Make) -> None:
    """In the trainer, and in worker processes."""
    small = {"trainer__steps": 1, "trainer__batch_size": 2, "run__rollout_dump_every": 1}
    run = understudy.train(
        recipe(**small, rollout__template_options={"chat_template": DATED}), progress=False
    ).dir

    def prompts(step: int) -> list[str]:
        lines = (run / "rollouts" / f"{step:06d}.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    written = json.loads((run / "recipe.json").read_text())
    assert written["rollout"]["template_date"] == date.today().isoformat()
    assert all(f"{date.today():%d%m%Y}" in one for one in prompts(1))
    written["rollout"]["template_date"] = "2020-01-31"  # as if it had begun on that day
    (run / "recipe.json").write_text(json.dumps(written))
    asyncio.run(resume(run, ["trainer.steps=2"], progress=False))
    asyncio.run(resume(run, ["trainer.steps=3", "rollout.workers=1"], progress=False))
    assert all("31012020" in one for step in (2, 3) for one in prompts(step))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resume_may_raise_max_staleness_and_not_lower_it(recipe: Make) -> None:
    asynchronous = {"trainer__mode": "fully_async", "run__determinism": "fast"}
    run = understudy.train(
        recipe("ahead", **asynchronous, trainer__steps=2, trainer__max_staleness=1.0), progress=False
    )
    changes = ["trainer.steps=5", "trainer.max_staleness=2", "trainer.adapt_admission=true"]
    longer = asyncio.run(resume(Path(run.dir), changes, progress=False))
    assert len(longer.metrics) == 5 and audit(run.dir).balanced
    assert audit(run.dir).trained == 5 * 16
    with pytest.raises(ConfigError, match="it may only be raised"):
        asyncio.run(resume(Path(run.dir), ["trainer.steps=6", "trainer.max_staleness=0"], progress=False))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_options_redacted_in_recipe_json_are_restored_by_a_resume(recipe: Make) -> None:
    options = {"rollout__template_options": {"tool_token": "<tool>", "url": "http://me:pw@host/"}}
    run = understudy.train(recipe("hidden", **options, trainer__steps=1), progress=False)
    stored = "".join(path.read_text(errors="replace") for path in run.dir.rglob("*.json*") if path.is_file())
    assert "<tool>" in stored and "<tool>" not in stored.replace((run.dir / "redacted.json").read_text(), "")
    changed = asyncio.run(resume(run.dir, ["trainer.steps=2"], progress=False))
    assert len(changed.metrics) == 2 and "me:pw" in (run.dir / "redacted.json").read_text()
    assert main(["eval", str(run.dir), "--samples", "2", "--data", str(recipe("x")["data"]["train"])]) == 0
    (run.dir / "redacted.json").unlink()
    with pytest.raises(
        ConfigError, match=r"rollout\.template_options\.tool_token = '<redacted>': recipe.json"
    ):
        asyncio.run(resume(run.dir, ["trainer.steps=3"], progress=False))
