"""recipes/seed-scenario, shortened: a rollout process, two training ranks and teachers in processes of their own."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from small_runs import TOKEN_VARIABLE

import understudy
from understudy.dataplane.ledger import Ledger, audit

RECIPE = Path(__file__).parents[3] / "recipes" / "seed-scenario" / "recipe.toml"
STEPS, PROMPTS, SESSIONS = 3, 6, 4


@pytest.fixture
def scenario(teacher_urls: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """The shipped recipe with fewer steps and with the teachers of this test session."""
    table = tomllib.loads(RECIPE.read_text())
    for section in (table["student"], *table["teachers"].values()):
        section["model"] = str((RECIPE.parent / section["model"]).resolve())
    for name, teacher in table["teachers"].items():
        teacher |= {"placement": "external", "urls": [teacher_urls[name]], "token_env": TOKEN_VARIABLE}
    del table["data"]["eval"], table["trainer"]["eval_every"], table["trainer"]["eval_samples"]
    table["data"]["train"] = str((RECIPE.parent / table["data"]["train"]).resolve())
    table["trainer"] |= {"steps": STEPS, "batch_size": PROMPTS, "warmup_steps": 1}
    table["run"] = {"dir": str(tmp_path / "run"), "threads": 1}
    return table


def test_the_shortened_seed_scenario_trains_every_row_once_with_both_teachers(
    scenario: dict[str, Any],
) -> None:
    assert scenario["rollout"]["processes"] == 1 and scenario["trainer"]["ranks"] == 2
    assert scenario["trainer"]["mode"] == "fully_async" and scenario["rollout"]["n"] == SESSIONS
    run = understudy.train(scenario, progress=False)
    report = audit(run.dir)
    assert report.balanced and report.in_flight == 0
    assert report.per_step == dict.fromkeys(range(1, STEPS + 1), PROMPTS * SESSIONS)
    assert {"rank-1.log", "rollout-0.log"} <= {log.name for log in (run.dir / "logs").iterdir()}
    scored_rows = {"add": 0.0, "sort": 0.0}
    for line in run.metrics:
        # Rewards and distillation in one loss, both teachers in one batch.
        assert {"critic/score/mean", "actor/loss", "async/staleness/max"} <= line.keys()
        assert line["async/staleness/max"] <= 1
        for name in scored_rows:
            scored_rows[name] += line.get(f"teacher/{name}/rows", 0.0)
    # Routed by each row's data_source, which the dataset alternates at random.
    keys = [key for _, key in Ledger.read(run.dir).trained_keys("train")]
    assert sum(scored_rows.values()) == len(keys) == STEPS * PROMPTS * SESSIONS
    assert min(scored_rows.values()) > 0
