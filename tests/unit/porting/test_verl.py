"""Recipes from verl's configurations: every key gets a verdict, verl's defaults are written out, the recipe is sound."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from understudy.cli.main import main
from understudy.config.base import flatten
from understudy.config.recipe import examine
from understudy.errors import ConfigError
from understudy.porting.recipe_draft import Draft, Verdict
from understudy.porting.sources import Source, read_source
from understudy.porting.verl import from_verl

LOSS = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"

ONE_TEACHER: dict[str, Any] = {
    "actor_rollout_ref.model.path": "org/student",
    "data.train_files": "train.parquet",
    f"{ROLLOUT}.name": "vllm",
    "distillation.enabled": True,
    "distillation.n_gpus_per_node": 4,
    "distillation.nnodes": 1,
    f"{TEACHER}.model_path": "org/teacher",
    f"{LOSS}.use_task_rewards": False,
}

REWARDED: dict[str, Any] = {
    f"{LOSS}.use_task_rewards": True,
    "algorithm.adv_estimator": "grpo",
    f"{ROLLOUT}.n": 4,
    "reward.custom_reward_function.path": "r.py",
}
RATIOS = "algorithm.rollout_correction"

SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
STUDENT=${STUDENT:-org/small}
TEACHERS=2
prompt=700; answer=900
window=$(( prompt + answer + 1 ))
files="['/data/gsm8k/train.parquet', '/data/maths/train.parquet']"
COMMON=(
    algorithm.adv_estimator=grpo
    data.train_files="$files"
    data.val_files=/data/gsm8k/test.parquet
    data.train_batch_size=96
    data.max_prompt_length=${prompt}
    data.max_response_length=${answer}
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path="$STUDENT"
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.temperature=0.8
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.rollout.max_model_len=${window}
)
TEACH=(
    distillation.enabled=True
    distillation.n_gpus_per_node=$((TEACHERS * 2))
    distillation.nnodes=1
    # routed by data_source
    +distillation.teacher_models.school.key="openai/gsm8k"
    +distillation.teacher_models.school.model_path=org/school
    +distillation.teacher_models.school.num_replicas=1
    +distillation.teacher_models.school.inference.tensor_model_parallel_size=2
    +distillation.teacher_models.contest.key=maths
    +distillation.teacher_models.contest.model_path=org/contest
    +distillation.teacher_models.contest.num_replicas=2
    distillation.distillation_loss.loss_mode=forward_kl_topk
    distillation.distillation_loss.topk=48
    distillation.distillation_loss.distillation_loss_coef=0.5
)
python3 -m verl.trainer.main_ppo "${COMMON[@]}" "${ACTOR[@]}" "${TEACH[@]}" \\
    reward.custom_reward_function.path=/code/rewards/judge.py reward.custom_reward_function.name=score \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=3 trainer.test_freq=5 trainer.save_freq=20 \\
    trainer.logger='["console","wandb"]' trainer.experiment_name=two-teachers "$@" 2>&1 | tee log.txt
"""


def draft_of(keys: dict[str, Any], program: str = "") -> Draft:
    return from_verl(Source(keys=flatten(keys), program=program))


def recipe_of(keys: dict[str, Any]) -> dict[str, Any]:
    """The recipe's dotted keys, as read back from its TOML."""
    draft = draft_of(keys)
    assert draft.problems() == []
    return flatten(tomllib.loads(draft.toml()))


def verdict(draft: Draft, key: str) -> Verdict:
    return draft.entries[key].verdict


def test_import_verl_translates_a_script_with_two_teachers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, recipe = tmp_path / "run.sh", tmp_path / "recipe.toml"
    script.write_text(SCRIPT)
    assert main(["import-verl", str(script), "-o", str(recipe)]) == 0
    output = capsys.readouterr().out
    found = flatten(tomllib.loads(recipe.read_text()))
    assert examine(tomllib.loads(recipe.read_text()))[1] == []
    wanted = {
        "student.model": "org/small",
        "teachers.school.key": "openai/gsm8k",
        "teachers.school.tensor_parallel": 2,
        "teachers.contest.replicas": 2,
        "data.train": ["/data/gsm8k/train.parquet", "/data/maths/train.parquet"],
        "data.overlong": "drop",
        "data.max_prompt_tokens": 700,
        "data.reward": "judge:score",
        "run.python_path": ["/code/rewards", "."],
        "loss.topk": 48,
        "loss.tail": "drop",
        "loss.clamp_at_zero": True,
        "loss.task_coef": 1.0,
        "loss.distill_coef": 0.5,
        "loss.student_temperature": 0.8,
        "loss.clip_high": 0.2,
        "loss.dual_clip": 3.0,
        "rollout.n": 4,
        "rollout.replicas": 4,
        "rollout.context_length": 1601,
        "trainer.batch_size": 96,
        "trainer.mini_batch_size": 32,
        "trainer.learning_rate": 2e-6,
        "trainer.weight_decay": 0.01,
        "trainer.offload_optimizer": True,
        "trainer.ranks": 8,
        "trainer.passes": 3.0,
        "trainer.eval_every": 5,
        "trainer.checkpoint_every": 20,
        "run.loggers": ["wandb"],
        "run.name": "two-teachers",
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert "--gpu-memory-utilization=0.4" in found["rollout.engine_args"]
    assert "actor_rollout_ref.actor.optim.lr=2e-06: trainer.learning_rate = 2e-06" in output
    assert "learning_rate = 2e-06  # actor_rollout_ref.actor.optim.lr" in recipe.read_text()


def test_every_given_key_gets_exactly_one_verdict(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    source = read_source([str(script), "trainer.total_epochs=4", "actor_rollout_ref.actor.new_key=7"])
    draft = from_verl(source)
    assert source.keys.keys() <= draft.entries.keys() and source.keys["trainer.total_epochs"] == 4
    others = {key for key, entry in draft.entries.items() if key not in source.keys}
    assert {draft.entries[key].verdict for key in others} == {Verdict.THEIR_DEFAULT}
    assert verdict(draft, "actor_rollout_ref.actor.new_key") is Verdict.UNSUPPORTED
    report = draft.report()
    assert all(f"  {key}" in report for key in source.keys)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, {"loss.kind": "k3", "loss.signal": "sampled", "loss.loss_max_clamp": 10.0}),
        ({f"{LOSS}.loss_max_clamp": 4.0}, {"loss.loss_max_clamp": 4.0}),
        ({f"{LOSS}.loss_mode": "k2"}, {"loss.kind": "k2", "loss.loss_max_clamp": None, "loss.task_coef": None}),
        ({f"{LOSS}.loss_mode": "forward_kl_topk"}, {"loss.kind": None, "loss.topk": 32, "loss.tail": "drop", "loss.clamp_at_zero": True}),
        ({f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": True}, {"loss.policy_gradient": True, "loss.clip_high": 0.2, "loss.dual_clip": 3.0}),
        ({f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": True, f"{LOSS}.clip_ratio_high": 0.3}, {"loss.clip_high": 0.3}),
        ({f"{ROLLOUT}.temperature": 0.6}, {"loss.student_temperature": 0.6, "rollout.temperature": 0.6}),
        ({f"{ROLLOUT}.temperature": 0.6, "distillation.enabled": False, "reward.custom_reward_function.path": "r.py"}, {"loss.student_temperature": 0.6, "loss.distill_coef": 0.0, "run.python_path": ["."]}),
        ({}, {"trainer.learning_rate": 1e-6, "trainer.weight_decay": 0.01, "trainer.batch_size": 1024, "trainer.mini_batch_size": 256}),
        ({}, {"student.dtype": "bfloat16", "student.gradient_checkpointing": True, "data.max_prompt_tokens": 512, "rollout.max_new_tokens": 512}),
        ({}, {"teachers.teacher_model.tensor_parallel": 2, "teachers.teacher_model.replicas": 2, "teachers.teacher_model.key": None}),
        ({"distillation.n_gpus_per_node": 8, f"{TEACHER}.inference.tensor_model_parallel_size": 1}, {"teachers.teacher_model.replicas": 8}),
        ({f"{ROLLOUT}.top_k": -1}, {"rollout.top_k": None}),
        ({f"{ROLLOUT}.top_k": 40}, {"rollout.top_k": 40}),
        ({"data.truncation": "left"}, {"data.overlong": "truncate_left"}),
        ({"actor_rollout_ref.model.lora_rank": 8}, {"student.lora.rank": 8, "student.lora.alpha": 16.0}),
        ({"actor_rollout_ref.model.lora_rank": 16, "actor_rollout_ref.model.lora_alpha": 32}, {"student.lora.rank": 16, "student.lora.alpha": 32.0}),
        ({f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50}, {"trainer.warmup_steps": 5, "trainer.steps": 50, "trainer.passes": None}),
        ({f"{ACTOR}.freeze_vision_tower": False}, {"student.freeze_vision": False}),
        ({f"{ACTOR}.freeze_vision_tower": True, "data.image_key": "images"}, {"student.freeze_vision": None}),
        ({"data.image_key": "images"}, {"student.freeze_vision": False}),
        ({}, {"student.freeze_vision": None}),
        ({f"{ACTOR}.use_kl_loss": True}, {"loss.kl_coef": None}),
        (REWARDED | {f"{ACTOR}.use_kl_loss": True}, {"loss.kl_coef": 0.001, "loss.kl_kind": "low_var_kl"}),
        ({f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_policy_gradient": True, f"{ACTOR}.clip_ratio_c": 10.0}, {"loss.dual_clip": 3.0}),
        (REWARDED | {f"{ACTOR}.clip_ratio_c": 10.0}, {"loss.dual_clip": 10.0}),
        (REWARDED | {f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_low": None}, {"loss.clip_low": 0.1, "loss.clip_high": 0.2}),
        ({"distillation.teacher_models.b.model_path": "org/b", "distillation.teacher_models.b.key": "b"}, {"teachers.b.tensor_parallel": 2, "teachers.b.replicas": None}),
        ({"model_engine": "veomni"}, {"trainer.schedule": "cosine"}),
        ({"model_engine": "veomni", f"{ACTOR}.optim.lr_scheduler_type": "constant"}, {"trainer.schedule": None}),
        ({"model_engine": "torchtitan"}, {"trainer.schedule": "linear"}),
        ({"model_engine": "megatron", f"{ACTOR}.optim.lr_decay_style": "cosine"}, {"trainer.schedule": "cosine"}),
        ({f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": True}, {"trainer.offload_optimizer": True}),
        ({"actor_rollout_ref.model.lora.rank": 4}, {"student.lora.rank": 4, "student.lora.alpha": 32.0}),
        (REWARDED | {f"{RATIOS}.rollout_rs": "token", f"{RATIOS}.rollout_rs_threshold": 1.5, f"{RATIOS}.rollout_rs_threshold_lower": 0.4}, {"loss.correction.low": 0.4, "loss.correction.high": 1.5}),
        ({f"{ROLLOUT}.engine_kwargs.vllm": {"enable_expert_parallel": True, "swap_space": None, "disable_mm_preprocessor_cache": False, "hf_overrides": {"rope": 2}}},
         {"rollout.engine_args": ["--tensor-parallel-size=2", "--gpu-memory-utilization=0.5", "--max-num-batched-tokens=8192", "--enable-expert-parallel", "--hf-overrides.rope=2"]}),
        ({"data.apply_chat_template_kwargs.enable_thinking": False}, {"rollout.template_options.enable_thinking": False}),
    ],
)  # fmt: skip
def test_verl_settings_and_defaults_become_recipe_keys(more: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = recipe_of(ONE_TEACHER | more)
    assert {key: found.get(key) for key in wanted} == wanted


def test_task_rewards_are_used_unless_the_configuration_turns_them_off() -> None:
    keys = {key: value for key, value in ONE_TEACHER.items() if key != f"{LOSS}.use_task_rewards"}
    keys |= {"data.train_files": "gsm8k/train.parquet", "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 8}
    draft = draft_of(keys)
    assert (
        draft.tables["loss"]["task_coef"] == 1.0
        and verdict(draft, f"{LOSS}.use_task_rewards") is Verdict.THEIR_DEFAULT
    )
    assert draft.tables["data"]["reward"] == "understudy.rollout.rewards.builtin:gsm8k"
    assert draft.problems() == []


def test_import_verl_reports_a_missing_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "actor_rollout_ref.model.path=org/s",
        "data.train_files=rows.parquet",
        "algorithm.adv_estimator=grpo",
    ]
    words += ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=vllm"]
    assert (
        main(
            [
                "import-verl",
                "-o",
                str(tmp_path / "r.toml"),
                "--",
                "python3",
                "-m",
                "verl.trainer.main_ppo",
                *words,
            ]
        )
        == 2
    )
    output = capsys.readouterr()
    assert "needs data.reward" in output.err and "name yours in data.reward" in output.out
    assert tomllib.loads((tmp_path / "r.toml").read_text())["loss"] == {
        "distill_coef": 0.0, "task_coef": 1.0, "clip_high": 0.2, "dual_clip": 3.0,
    }  # fmt: skip


def test_the_gae_advantage_gives_a_critic_section() -> None:
    keys = ONE_TEACHER | {f"{LOSS}.use_task_rewards": True, "reward.custom_reward_function.path": "r.py"}
    found = recipe_of(keys | {"critic.optim.lr": 3e-6, "trainer.critic_warmup": 2})
    assert found["loss.advantage"] == "gae" and found["critic.weight_decay"] == 0.01
    assert found["critic.learning_rate"] == 3e-6 and found["critic.only_steps"] == 2


def test_the_default_teacher_entry_is_dropped_when_another_teacher_is_named() -> None:
    """verl's file has one entry `teacher_model`, which verl drops as soon as there is another."""
    draft = draft_of(
        ONE_TEACHER
        | {"distillation.teacher_models.b.model_path": "org/b", "distillation.teacher_models.b.key": "b"}
    )
    assert list(draft.tables["teachers"]) == ["b"]
    assert verdict(draft, f"{TEACHER}.model_path") is Verdict.NOT_NEEDED


def test_keys_of_earlier_verl_versions_are_translated() -> None:
    keys = {key: value for key, value in ONE_TEACHER.items() if not key.startswith("distillation.")}
    old = "distillation.teacher_model"
    keys |= {
        "distillation.enabled": True,
        f"{old}.model_path": "org/teacher",
        f"{old}.enable_resource_pool": True,
        f"{old}.n_gpus_per_node": 2,
        f"{old}.nnodes": 1,
        f"{old}.inference.tensor_model_parallel_size": 1,
        "distillation.stream_teacher_with_rollout": True,
        f"{LOSS}.use_task_rewards": False,
    }
    draft = draft_of(keys)
    assert draft.tables["teachers"]["teacher_model"]["replicas"] == 2 and draft.problems() == []
    assert verdict(draft, f"{old}.enable_resource_pool") is Verdict.NOT_NEEDED


@pytest.mark.parametrize("kind", ["fully_async", "v1"])
def test_settings_of_both_fully_async_trainers_of_verl_are_translated(kind: str) -> None:
    more: dict[str, Any] = {
        "data.train_batch_size": 0,
        f"{ACTOR}.ppo_mini_batch_size": 32,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
    }
    if kind == "v1":
        more |= {
            "trainer.v1.trainer_mode": "separate_async",
            "trainer.v1.separate_async.parameter_sync_step": 3,
            "trainer.v1.separate_async.num_warmup_batches": 2,
            f"{ROLLOUT}.n_gpus_per_node": 2,
            f"{ROLLOUT}.nnodes": 1,
            "trainer.total_training_steps": 200,  # publishes, each after 3 updates
        }
    else:
        more |= {
            "async_training.trigger_parameter_sync_step": 3,
            "async_training.staleness_threshold": 0.5,
            "async_training.require_batches": 3,
            "rollout.n_gpus_per_node": 2,
            "rollout.nnodes": 1,
            "rollout.total_rollout_steps": 19200,
        }
    found = recipe_of(ONE_TEACHER | more)
    size = 32 if kind == "v1" else 96
    assert found["trainer.mode"] == "fully_async" and found["trainer.batch_size"] == size
    assert found["trainer.sync_every"] == 3 and found["trainer.max_staleness"] == (
        2.0 if kind == "v1" else 0.5
    )
    assert found["rollout.replicas"] == 2 and found["trainer.steps"] == (600 if kind == "v1" else 200)
    # verl takes an optimizer step for each mini-batch that an update fetches.
    assert found.get("trainer.mini_batch_size") == (None if kind == "v1" else 32)
    assert "trainer.passes" not in found


@pytest.mark.parametrize(
    ("warm", "threshold", "behind"), [(None, None, None), (None, 8, None), (3, 8, 3.0), (3, 2, None), (0, 8, 0.0), (4, 4, 3.0)]
)  # fmt: skip
def test_max_staleness_follows_from_the_warm_up_batches_and_the_off_policy_threshold_of_v1(
    warm: int | None, threshold: int | None, behind: float | None
) -> None:
    """num_warmup_batches + 1 batches are in flight. Rows of more than max_off_policy_threshold versions are dropped."""
    keys: dict[str, Any] = {
        "trainer.v1.trainer_mode": "separate_async",
        f"{ROLLOUT}.n_gpus_per_node": 2,
        f"{ROLLOUT}.nnodes": 1,
        "trainer.v1.separate_async.num_warmup_batches": warm,
        "trainer.v1.sampler.max_off_policy_threshold": threshold,
    }
    draft = draft_of(ONE_TEACHER | keys)
    assert flatten(tomllib.loads(draft.toml())).get("trainer.max_staleness") == behind
    assert draft.problems() == []


@pytest.mark.parametrize(
    ("keys", "program", "wanted"),
    [
        ({}, "verl.experimental.one_step_off_policy.main_ppo", {"trainer.max_staleness": None, "trainer.batch_size": 1024, "trainer.mini_batch_size": 256}),
        ({"trainer.scheduler": "two_step_off", "data.train_batch_size": 512}, "main_gkd", {"trainer.max_staleness": 2.0, "trainer.batch_size": 512, "trainer.mini_batch_size": None}),
    ],
)  # fmt: skip
def test_one_and_two_step_off_policy_pipelines_become_fully_async_runs_with_own_engines(
    keys: dict[str, Any], program: str, wanted: dict[str, Any]
) -> None:
    gpus = {"rollout.n_gpus_per_node": 4, f"{ROLLOUT}.tensor_model_parallel_size": 1}
    draft = draft_of(ONE_TEACHER | gpus | keys, program)
    found = flatten(tomllib.loads(draft.toml()))
    assert found["trainer.mode"] == "fully_async" and found["trainer.partial_rollouts"] is False
    assert found["rollout.replicas"] == 4 and "rollout.devices" not in found
    assert {key: found.get(key) for key in wanted} == wanted


def test_the_colocated_async_schedule_puts_engines_on_the_training_gpus() -> None:
    keys = {"trainer.v1.trainer_mode": "colocate_async", "trainer.n_gpus_per_node": 4}
    found = recipe_of(ONE_TEACHER | keys)
    assert found["trainer.mode"] == "fully_async" and found["rollout.devices"] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ({}, {"loss.kind": None, "loss.topk": 256, "loss.tail": "drop"}),
        ({"name": "rkl"}, {"loss.kind": "reverse_kl", "loss.tail": "renormalise"}),
        ({"name": "jsd", "beta": 0.3}, {"loss.kind": "jsd", "loss.beta": 0.3, "loss.tail": None}),
        ({"name": "kl_rkl", "rkl_ratio": 0.25}, {"loss.kind": "mixture", "loss.mixture_weight": 0.75}),
    ],
)
def test_the_distill_loss_of_verls_gkd_recipe_is_translated(
    loss: dict[str, Any], wanted: dict[str, Any]
) -> None:
    keys = {
        "actor_rollout_ref.model.path": "org/s",
        "data.train_files": "rows.parquet",
        f"{ACTOR}.distill_loss": loss,
        "actor_rollout_ref.teacher.server_ip": "127.0.0.1",
        f"{ROLLOUT}.name": "vllm",
    }
    draft = draft_of(keys, "main_gkd")
    found = flatten(tomllib.loads(draft.toml()))
    assert {key: found.get(key) for key in wanted} == wanted and "loss.task_coef" not in found
    assert draft.problems() == ["`teachers.teacher.model` is missing; set it in the recipe"]
    assert verdict(draft, "actor_rollout_ref.teacher.server_ip") is Verdict.NOT_NEEDED
    assert any("--ckpt-path" in note for note in draft.notes)


@pytest.mark.parametrize(
    ("keys", "updates"),
    [
        ({"rollout.test_freq": 5, "async_training.trigger_parameter_sync_step": 3}, 3),
        ({"rollout.test_freq": 5, "async_training.partial_rollout": True}, 4),
        ({"trainer.test_freq": 5, "rollout.test_freq": 7, "async_training.trigger_parameter_sync_step": 3}, 3),
        ({"trainer.test_freq": 5, "trainer.v1.trainer_mode": "separate_async"}, 4),
        ({"trainer.test_freq": 5, "trainer.v1.trainer_mode": "colocate_async"}, 1),
    ],
)  # fmt: skip
def test_intervals_that_async_trainers_count_in_publishes_are_converted_to_steps(
    keys: dict[str, Any], updates: int
) -> None:
    """`rollout.test_freq` counts publishes between evaluations; newer releases read `trainer.test_freq` instead."""
    more = {"data.val_files": "v.parquet", "trainer.save_freq": 10, "trainer.total_training_steps": 60}
    rewarded = {"reward.custom_reward_function.path": "/code/judge.py"}
    draft = draft_of(ONE_TEACHER | rewarded | more | keys)
    found = flatten(tomllib.loads(draft.toml()))
    key = "trainer.test_freq" if "trainer.test_freq" in keys else "rollout.test_freq"
    assert draft.problems() == [] and verdict(draft, key) is Verdict.CARRIED
    assert found["trainer.eval_every"] == 5 * updates and found["trainer.checkpoint_every"] == 10 * updates
    assert found["trainer.steps"] == 60 * updates
    if "rollout.test_freq" in keys and key == "trainer.test_freq":
        assert verdict(draft, "rollout.test_freq") is Verdict.NOT_NEEDED


def test_evaluation_without_a_reward_is_unsupported_and_says_what_to_set() -> None:
    keys = {"rollout.test_freq": 5, "async_training.trigger_parameter_sync_step": 3}
    draft = draft_of(ONE_TEACHER | keys)
    assert verdict(draft, "rollout.test_freq") is Verdict.UNSUPPORTED
    assert "trainer.eval_every = 15" in draft.entries["rollout.test_freq"].text


def test_no_key_of_verls_async_trainer_is_unsupported() -> None:
    """The keys are those of the file of verl 0.9.1."""
    keys = {
        "staleness_threshold": 0.1,
        "trigger_parameter_sync_step": 4,
        "require_batches": 1,
        "partial_rollout": True,
        "use_trainer_do_validate": False,
        "use_dynamic_resource_scheduling": False,
        "dynamic_schedule_policy": "default",
        "dynamic_schedule_deactivate_ratio": 0.3,
        "dynamic_schedule_enable_rebalance": True,
        "concurrent_samples_per_replica": 16,
    }
    draft = draft_of(ONE_TEACHER | {f"async_training.{key}": value for key, value in keys.items()})
    assert not [entry for entry in draft.entries.values() if entry.verdict is Verdict.UNSUPPORTED]


def test_a_configuration_for_several_machines_becomes_pools_on_ray() -> None:
    found = recipe_of(
        ONE_TEACHER | {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, "distillation.nnodes": 2}
    )
    assert found["cluster.backend"] == "ray" and found["trainer.ranks"] == 16
    assert found["cluster.pools.student.nodes"] == 2 and found["teachers.teacher_model.pool"] == "teachers"


@pytest.mark.parametrize(
    ("key", "value", "wanted", "text"),
    [
        ("model_engine", "megatron", Verdict.UNSUPPORTED, "FSDP2"),
        (f"{ACTOR}.entropy_coeff", 0, Verdict.NOT_NEEDED, "off"),
        (f"{ACTOR}.entropy_coeff", 0.01, Verdict.NOT_NEEDED, "with task rewards alone"),
        (f"{ACTOR}.loss_agg_mode", "seq-mean-token-sum-norm", Verdict.UNSUPPORTED, "loss.reduction"),
        (f"{ACTOR}.fsdp_config.param_offload", True, Verdict.UNSUPPORTED, "trainer.offload_optimizer"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size", 2, Verdict.UNSUPPORTED, "trainer.ranks"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 4, Verdict.NOT_NEEDED, "tokens"),
        ("data.image_key", "photos", Verdict.UNSUPPORTED, "rename the column to `images`"),
        ("data.truncation", "middle", Verdict.UNSUPPORTED, "truncate_left"),
        (f"{ROLLOUT}.name", "sglang", Verdict.UNSUPPORTED, "rollout.urls"),
        ("trainer.save_freq", -1, Verdict.UNSUPPORTED, "trainer.checkpoint_every"),
        ("trainer.test_freq", 5, Verdict.UNSUPPORTED, "data.reward"),
        ("trainer.project_name", "p", Verdict.UNSUPPORTED, "WANDB_PROJECT"),
        ("trainer.total_epochs", "$EPOCHS", Verdict.UNSUPPORTED, "expected a number"),
        (f"{TEACHER}.inference.expert_parallel_size", 8, Verdict.UNSUPPORTED, "teachers.NAME.tensor_parallel cuts every expert"),
        (f"{TEACHER}.inference.gpu_memory_utilization", 0.5, Verdict.NOT_NEEDED, "only scores"),
        (f"{LOSS}.log_prob_min_clamp", -10.0, Verdict.NOT_NEEDED, "forward_kl_topk"),
        ("distillation.teacher_key", "data_source", Verdict.NOT_NEEDED, "one teacher"),
        (f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent", Verdict.IMPLIED, "single_turn"),
        (f"{ROLLOUT}.name", "trtllm", Verdict.UNSUPPORTED, "no engine trtllm"),
        (f"{ROLLOUT}.name", "hf", Verdict.IMPLIED, "rollout.engine = 'hf'"),
        ("data.video_key", "videos", Verdict.NOT_NEEDED, "what happens here"),
        ("model_engine", "veomni", Verdict.UNSUPPORTED, "FSDP2"),
        (f"{ACTOR}.veomni.ulysses_parallel_size", 2, Verdict.UNSUPPORTED, "FSDP2 alone"),
        (f"{ACTOR}.optim.lr_min", 1e-7, Verdict.NOT_NEEDED, "does not fall"),
        (f"{ACTOR}.optim.lr_warmup_init", 1e-7, Verdict.UNSUPPORTED, "rises from 0"),
        ("actor_rollout_ref.model.override_config.max_position_embeddings", 32768, Verdict.UNSUPPORTED, "config.json"),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch", True, Verdict.UNSUPPORTED, "keep their roles"),
        (f"{ACTOR}.use_kl_loss", True, Verdict.NOT_NEEDED, "with task rewards alone"),
        ("hydra.run.dir", "out", Verdict.NOT_NEEDED, "hydra"),
    ],
)  # fmt: skip
def test_each_key_gets_a_verdict_with_an_explanation(
    key: str, value: Any, wanted: Verdict, text: str
) -> None:
    draft = draft_of(ONE_TEACHER | {key: value})
    assert verdict(draft, key) is wanted and text in draft.entries[key].text
    assert draft.problems() == []


def test_settings_of_sglang_servers_are_reported_as_not_needed() -> None:
    keys = {
        f"{ROLLOUT}.name": "sglang",
        f"{ROLLOUT}.tensor_model_parallel_size": 4,
        f"{ROLLOUT}.enforce_eager": True,
    }
    keys |= {f"{ROLLOUT}.engine_kwargs.sglang.attention_backend": "fa3"}
    draft = draft_of(ONE_TEACHER | keys)
    assert "--tp-size=4" in draft.entries[f"{ROLLOUT}.tensor_model_parallel_size"].text
    assert all(verdict(draft, key) is Verdict.NOT_NEEDED for key in keys if key != f"{ROLLOUT}.name")


def test_sampled_evaluation_with_settings_of_its_own_is_reported() -> None:
    own = f"{ROLLOUT}.val_kwargs"
    keys = REWARDED | {
        "data.val_files": "v.parquet",
        f"{own}.do_sample": True,
        f"{own}.top_p": 0.7,
        f"{own}.temperature": 1.0,
    }
    draft = draft_of(ONE_TEACHER | keys)
    assert draft.tables["trainer"]["eval_k"] == 1 and verdict(draft, f"{own}.do_sample") is Verdict.CARRIED
    assert verdict(draft, f"{own}.top_p") is Verdict.UNSUPPORTED
    assert verdict(draft, f"{own}.temperature") is Verdict.NOT_NEEDED


@pytest.mark.parametrize(
    ("keys", "program", "text"),
    [
        ({"data.train_files": "a.parquet", "model.path": "m"}, "verl.trainer.fsdp_sft_trainer", "given answers"),
        ({"data.path": "a.parquet"}, "verl.trainer.main_generation", "without training"),
        ({"learning_rate": 1e-5, "beta": 0.5, "output_dir": "o", "data.seed": 1}, "", "import-trl"),
        ({"services.web.image": "nginx", "version": 3}, "", "verl's sections"),
        ({"services.web.image": None, "optim.fused": False}, "", "verl's sections"),
    ],
)  # fmt: skip
def test_configurations_of_other_programs_are_refused(keys: dict[str, Any], program: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        draft_of(keys, program)


def test_a_yaml_file_with_interpolations_and_overrides_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "defaults: [ppo_trainer]\n"
        "data: {train_files: rows.parquet, max_prompt_length: 300}\n"
        "actor_rollout_ref:\n"
        "  _target_: verl.X\n"
        "  model: {path: org/s}\n"
        "  actor: {optim: {lr: 3e-6}}\n"
        "  rollout: {name: '???', prompt_length: '${oc.select:data.max_prompt_length,512}', n: '${data.other}'}\n"
        "distillation: {enabled: true, teacher_models: {teacher_model: {model_path: org/t}}}\n"
    )
    source = read_source([str(file), "distillation.nnodes=1", f"{LOSS}.use_task_rewards=false"])
    assert source.keys["actor_rollout_ref.actor.optim.lr"] == 3e-6
    assert source.keys["actor_rollout_ref.rollout.prompt_length"] == 300
    assert f"{ROLLOUT}.n" not in source.keys and not [
        key for key in source.keys if "_target_" in key or "defaults" in key
    ]
    assert from_verl(source).problems() == []


def test_a_command_in_one_quoted_string_is_read() -> None:
    source = read_source(
        ["python3 -m verl.trainer.main_ppo data.train_files=a.parquet trainer.logger=console"]
    )
    assert source.program == "verl.trainer.main_ppo" and source.keys["trainer.logger"] == "console"


def test_a_variable_that_cannot_be_expanded_is_named_in_a_note() -> None:
    source = read_source(["python3 -m verl data.train_files=$NOWHERE/a.parquet data.val_files=b.parquet"])
    assert "$NOWHERE is set nowhere; replace it in the recipe" in from_verl(source).notes


@pytest.mark.parametrize("words", [["missing.yaml"], ["missing.sh"], ["nothing"], ["echo hello there"]])
def test_arguments_that_are_no_source_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"YAML file|nothing to import"):
        read_source(words)


def test_a_file_that_is_not_a_configuration_is_refused(tmp_path: Path) -> None:
    for name, text in (("a.yaml", "[1, 2]"), ("b.yaml", "a: [")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=r"YAML|table of keys"):
            read_source([str(tmp_path / name)])


def test_import_verl_does_not_import_torch() -> None:
    code = "import sys; from understudy.cli.main import main; main(['import-verl', 'a.b=1', 'c.d=2']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_engines_share_the_training_gpus_unless_they_have_their_own() -> None:
    """verl's sync trainer has engines on the trainer's GPUs, its async one does not."""
    keys = ONE_TEACHER | {"trainer.n_gpus_per_node": 4}
    assert recipe_of(keys)["rollout.devices"] == ["0,1", "2,3"]
    assert "rollout.devices" not in recipe_of(keys | {"async_training.partial_rollout": True})
    assert "rollout.devices" not in recipe_of(keys | {"trainer.nnodes": 2})
    assert any("rollout.vllm_python" in note for note in draft_of(keys).notes)
