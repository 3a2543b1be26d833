"""Every objective from its recipe: rewards with and without teachers, a critic, several updates per batch, filters."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import ASSETS, run_cli, write_toml

import understudy
from understudy.config import parse_recipe
from understudy.dataplane.ledger import audit
from understudy.errors import ClusterError, ConfigError, DataError, UnderstudyError
from understudy.observability.metrics import without_clock
from understudy.observability.rundir import read_json
from understudy.run.launch import resume

Make = Callable[..., dict[str, Any]]
REWARDS = "small_rewards:varied"
REWARDS_ONLY = {"task_coef": 1.0, "distill_coef": 0.0}
TEACHER = str(ASSETS / "models" / "teacher-add")


@pytest.fixture(autouse=True)
def _rewards_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def small(recipe: Make, name: str = "run", **overrides: Any) -> dict[str, Any]:
    """A recipe with seven prompts of three sessions per step and, unless overridden, rewards only."""
    settings = {
        "loss": REWARDS_ONLY,
        "teachers": {},
        "rollout__n": 3,
        "trainer__batch_size": 7,
        "trainer__steps": 2,
        "data__reward": REWARDS,
    }
    table = recipe(name, **{**settings, **overrides})
    # 300 of the ten thousand problems, because every run reads all of its rows before it starts.
    rows = Path(table["run"]["dir"]).parent / "rows.jsonl"
    rows.write_text("".join(Path(table["data"]["train"]).read_text().splitlines(keepends=True)[:300]))
    table["data"]["train"] = str(rows)
    return table


def weights(run: understudy.Run, step: int) -> dict[str, Any]:
    return load_file(run.dir / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {
            "loss": REWARDS_ONLY,
            "rollout__overlong": "drop",
            "rollout__overlong_buffer": 3,
            "rollout__max_new_tokens": 4,
        },
        {"loss": {"task_coef": 1.0, "topk": 8, "distill_coef": 0.3}, "teachers": None},
        {
            "loss": {**REWARDS_ONLY, "advantage": "gae", "lam": 0.95, "kl_coef": 0.1, "kl_in": "reward"},
            "critic": {"model": TEACHER, "learning_rate": 1e-3, "only_steps": 1},
            "reference": {"model": TEACHER},
        },
        {"loss": {**REWARDS_ONLY, "advantage": "rloo", "kl_coef": 0.05, "kl_kind": "k3"}},
        {
            "loss": {**REWARDS_ONLY, "advantage": "reinforce++", "gamma": 0.99},
            "trainer__epochs": 2,
            "trainer__mini_batch_size": 3,
        },
    ],
    ids=[
        "grpo without long answers",
        "grpo and distillation",
        "ppo with a critic",
        "rloo with a KL penalty",
        "reinforce++, 2 x 3 updates",
    ],
)
def test_each_objective_trains_every_row_once_and_reports_its_metrics(
    recipe: Make, changes: dict[str, Any]
) -> None:
    table = small(recipe, **changes)
    if table["teachers"] is None:
        table["teachers"] = recipe()["teachers"]
    run = understudy.train(table, progress=False)
    line = run.last
    assert line["actor/grad_norm"] > 0 and line["critic/score/mean"] > 0 and line["step"] == 2
    assert audit(run.dir).per_step == {1: 21, 2: 21} and audit(run.dir).balanced
    updates = 6 if "trainer__epochs" in changes else 1
    assert line.get("actor/updates", 1) == updates
    assert line["rollout/weight_version/min"] == 1, "versions count steps, however many updates each takes"
    if "rollout__overlong" in changes:
        assert 0 < line["response_length/clip_ratio"] < 1
        assert line["critic/rewards/mean"] < line["critic/score/mean"]
    if table["teachers"]:
        kl = [line[f"teacher/{name}/kl"] for name in table["teachers"] if f"teacher/{name}/kl" in line]
        assert min(kl) - 1e-6 <= line["actor/distillation/loss"] <= max(kl) + 1e-6, (
            "actor/distillation/loss is the term before its coefficient"
        )
    if updates > 1:
        # Engine and trainer differ only by rounding.
        assert 0 <= line["rollout_corr/k3_kl"] < 1e-6 and line["rollout_corr/abs_diff_max"] < 1e-2
    if "critic" in changes:
        assert line["critic/vf_loss"] > 0 and "actor/loss" not in run.metrics[0]
        assert set(weights(run, 2)) == set(load_file(Path(table["student"]["model"]) / "model.safetensors"))
        assert line["actor/reward_kl_penalty"] > 0.1, "the reference is another model"
        assert line["critic/rewards/mean"] < line["critic/score/mean"]
    elif "kl_coef" in changes["loss"]:
        assert run.metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and line["actor/kl_loss"] > 0


EVERYTHING: dict[str, Any] = {
    "loss": {**REWARDS_ONLY, "advantage": "gae", "correction": {"weigh": "token"}},
    "critic": {"learning_rate": 1e-3},
    "trainer__epochs": 2,
    "trainer__mini_batch_size": 2,
    "trainer__batch_size": 5,
    "trainer__steps": 4,
    "trainer__optimizer": "adamw_8bit",
    "trainer__ema_decay": 0.9,
    "trainer__schedule": "cosine",
    "rollout__filter_groups": True,
    "rollout__max_refills": 50,
    "data__reward": "small_rewards:coarse",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_ppo_run_with_filters_and_8bit_moments_resumes_to_the_same_bits(
    recipe: Make, tmp_path: Path
) -> None:
    """Critic, epochs of mini-batches, filtered groups, 8-bit moments and the weight average all continue to the bit."""
    straight = understudy.train(small(recipe, "straight", **EVERYTHING), progress=False)
    table = small(recipe, "killed", **EVERYTHING)
    code, output = run_cli(
        "train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault="sync.after_update:3"
    )
    assert code == -signal.SIGKILL, output
    asyncio.run(resume(Path(table["run"]["dir"]), progress=False))
    lines = [
        [without_clock(json.loads(line)) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (straight.dir, Path(table["run"]["dir"]))
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 4
    assert sum(line["rollout/filtered_prompts"] for line in lines[0]) > 0
    for name in ("model", "optimizer"):
        one, other = (
            load_file(path / "checkpoints" / "step-000004" / f"{name}.safetensors")
            for path in (straight.dir, Path(table["run"]["dir"]))
        )
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)
    kinds = Counter(name.split("/")[0] for name in one)
    assert {"critic.model", "critic.optimizer", "ema", "exp_avg_codes"} <= kinds.keys()
    reports = [audit(straight.dir), audit(Path(table["run"]["dir"]))]
    assert all(report.balanced and report.in_flight == 0 for report in reports)
    assert reports[0].evicted == reports[1].evicted > 0 and reports[0].trained == reports[1].trained
    assert all(reason.startswith("no signal") for reason in reports[0].reasons)
    assert reports[0].per_step == dict.fromkeys(range(1, 5), 15), (
        "filtered prompts are replaced in every step"
    )
    assert reports[0].evicted == 3 * sum(line["rollout/filtered_prompts"] for line in lines[0])
    scores = [line["critic/score/mean"] for line in lines[0]]
    assert all(1 / 3 <= score <= 2 / 3 for score in scores), "no group of equal rewards was trained on"


def test_a_run_whose_groups_all_have_equal_rewards_ends_with_an_error(recipe: Make) -> None:
    table = small(
        recipe,
        rollout__filter_groups=True,
        rollout__max_refills=1,
        data__reward="understudy.rollout.rewards.builtin:exact_match",
    )
    table["rollout"]["max_new_tokens"] = 1
    with pytest.raises(DataError, match="nothing to learn from"):
        understudy.train(table, progress=False)


def test_max_dead_letters_counts_the_failed_rows_of_all_launches_of_a_run(
    recipe: Make, tmp_path: Path
) -> None:
    """One row in each step fails; two may. The third fails in the second launch."""
    lines = (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:40]
    rows = [{**json.loads(line), "trouble": 2 * (i in (0, 4, 8))} for i, line in enumerate(lines)]
    table = recipe(
        data__train=rows,
        data__shuffle=False,
        data__reward="small_rewards:broken_held_out",
        trainer__batch_size=4,
        trainer__steps=2,
        trainer__max_dead_letters=0.25,
    )
    run = understudy.train(table, progress=False)
    assert read_json(run.dir / "state.json")["dead_letters"] == 2
    with pytest.raises(ClusterError, match=r"^3 rows failed, more than trainer.max_dead_letters = 0.2 "):
        run.resume(progress=False, trainer__steps=3, trainer__max_dead_letters=0.2)
    assert run.resume(progress=False, trainer__max_dead_letters=0.25).steps == 3
    assert read_json(run.dir / "state.json")["dead_letters"] == audit(run.dir).dead == 3


def test_a_nan_reward_makes_a_dead_letter_and_drops_its_group(recipe: Make) -> None:
    """A sibling may still be in its rollout, or failing itself, when its group is dropped; it must be counted once."""
    table = small(
        recipe,
        rollout__group_failure="drop_group",
        data__reward="small_rewards:broken_for_some",
        trainer__max_dead_letters=1.0,
        loss={"task_coef": 1.0, "topk": 8},
        teachers=recipe()["teachers"],
    )
    run = understudy.train(table, progress=False)
    report = audit(run.dir)
    assert report.balanced and report.issued == 42 and report.dead > 0 and report.in_flight == 0
    letters = (run.dir / "dataplane" / "dead_letters.jsonl").read_text()
    assert "gave nan for row" in letters
    assert report.trained % 3 == 0 and report.evicted > 0
    assert any("its group lost" in reason for reason in report.reasons)
    for name, kind, count in (
        ("evicted", "group_failed", report.evicted),
        ("dead_letters", "dataerror", report.dead),
    ):
        assert sum(line[f"rows/{name}"] for line in run.metrics) == count
        assert sum(line.get(f"rows/{name}/{kind}", 0) for line in run.metrics) == count


@pytest.fixture(scope="module")
def plain() -> dict[str, understudy.Run]:
    """Holds the small run without any of the options below, trained once for all tests."""
    return {}


def train_plain_and_changed(
    plain: dict[str, understudy.Run], recipe: Make, **changes: Any
) -> tuple[understudy.Run, understudy.Run]:
    settings = {"trainer__batch_size": 3, "trainer__checkpoint_every": 1}
    if "run" not in plain:
        plain["run"] = understudy.train(small(recipe, "plain", **settings), progress=False)
    return plain["run"], understudy.train(small(recipe, "other", **settings, **changes), progress=False)


def test_adamw_8bit_takes_nearly_the_same_step_with_a_smaller_optimizer_file(
    recipe: Make, plain: dict[str, understudy.Run]
) -> None:
    expected, run = train_plain_and_changed(plain, recipe, trainer__optimizer="adamw_8bit")
    for name, mine in weights(run, 1).items():
        assert mine == pytest.approx(weights(expected, 1)[name], abs=2e-4), "a fifth of the learning rate"
    sizes = [
        (one.dir / "checkpoints" / "step-000002" / "optimizer.safetensors").stat().st_size
        for one in (run, expected)
    ]
    assert sizes[0] < 0.35 * sizes[1]


@pytest.mark.slow
def test_offload_ema_and_gradient_checkpointing_change_weights_only_by_rounding(
    recipe: Make, tmp_path: Path, plain: dict[str, understudy.Run]
) -> None:
    expected, run = train_plain_and_changed(
        plain,
        recipe,
        trainer__offload_optimizer=True,
        trainer__ema_decay=0.5,
        student__gradient_checkpointing=True,
    )
    found, before = weights(run, 2), weights(run, 1)
    for name, mine in found.items():
        # Gradient checkpointing uses transformers' layers, whose gradients differ from ours by rounding. AdamW
        # enlarges that where a gradient is near zero: seldom, and by less than a twentieth of the learning rate.
        distance = np.abs(mine - weights(expected, 2)[name])
        assert distance.mean() < 1e-7 and distance.max() < 5e-5, name
    state = load_file(run.dir / "checkpoints" / "step-000002" / "optimizer.safetensors")
    started = load_file(Path(small(recipe)["student"]["model"]) / "model.safetensors")
    for name in found:
        average = 0.5 * (0.5 * started[name] + 0.5 * before[name]) + 0.5 * found[name]
        assert state[f"ema/{name}"] == pytest.approx(average, abs=1e-6)


def test_a_lora_run_checkpoints_only_adapters_and_exports_merged_weights(
    recipe: Make, tmp_path: Path, plain: dict[str, understudy.Run]
) -> None:
    pytest.importorskip("peft")
    expected, run = train_plain_and_changed(plain, recipe, student__lora={"rank": 4, "alpha": 8})
    assert all("lora_" in name for name in weights(run, 2)), "checkpoints hold the adapters alone"
    assert run.metrics[0]["actor/loss"] == pytest.approx(expected.metrics[0]["actor/loss"], abs=1e-6)
    assert run.metrics[1]["rollout/weight_version/min"] == 1
    merged = load_file(run.export(tmp_path / "merged") / "model.safetensors")
    started = load_file(Path(small(recipe)["student"]["model"]) / "model.safetensors")
    moved = [name for name in started if (merged[name] != started[name]).any()]
    assert moved and all("proj" in name for name in moved)


def test_rows_that_break_a_step_are_named_and_written_to_refused_jsonl(recipe: Make) -> None:
    table = small(
        recipe, loss={**REWARDS_ONLY, "advantage": "grpo_no_std"}, data__reward="small_rewards:immense"
    )
    with pytest.raises(
        UnderstudyError, match=r"gradient norm (inf|nan); .* row\(s\): 00000-.* were not touched"
    ):
        understudy.train(table, progress=False)
    run = Path(table["run"]["dir"])
    kept = [json.loads(line) for line in (run / "refused.jsonl").read_text().splitlines()]
    assert kept and all(line["tokens"] and "gradient norm" in line["reason"] for line in kept)
    assert not list((run / "checkpoints").glob("step-*")), "the refused step left a checkpoint"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"advantage": "gae", "topk": 8}}, "set loss.task_coef above 0"),
        ({"critic": {}}, r"\[critic\] is only used by loss.advantage = 'gae'"),
        ({"reference": {}}, r"\[reference\] is only used with loss.kl_coef"),
        (
            {"loss": {**REWARDS_ONLY, "tis_cap": 2.0, "correction": {"weigh": "token"}}},
            "instead of loss.tis_cap",
        ),
        ({"loss": {**REWARDS_ONLY, "correction": {"drop": "token", "low": 3.0}}}, "must lie below"),
        ({"rollout__n": 1, "rollout__filter_groups": True}, "set rollout.n above 1"),
        ({"rollout__overlong_buffer": 9}, "longer than rollout.max_new_tokens"),
        ({"rollout__overlong_buffer": 3, "rollout__agent": "tool"}, "set rollout.max_trajectory_tokens"),
        (
            {"rollout__overlong_buffer": 9, "rollout__agent": "tool", "rollout__max_trajectory_tokens": 8},
            "longer than rollout.max_trajectory_tokens",
        ),
        (
            {"loss": {"topk": 8, "correction": {"weigh": "token"}}, "teachers": {"t": {"model": "t"}}},
            "has none",
        ),
    ],
)
def test_contradictory_objective_settings_are_refused(
    recipe: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(small(recipe, **changes))
