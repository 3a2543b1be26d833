"""A recipe from a configuration of verl (0.8 to 0.10): what is carried over, what verl's defaults make it, what is left out.

`docs/coming-from-verl.md` explains the differences. Keys without a counterpart are in `verl_keys.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from understudy.config.messages.unknown_keys import unknown_key
from understudy.config.tables import RecipeTables
from understudy.errors import ConfigError
from understudy.porting.recipe_draft import Draft, expanded
from understudy.porting.sources import Source
from understudy.porting.verl_gkd import gkd_objective, is_gkd
from understudy.porting.verl_keys import settled
from understudy.porting.verl_objective import objective, teachers, with_task_rewards
from understudy.porting.verl_rollout import machines, rollout
from understudy.porting.verl_schedule import schedule_of
from understudy.porting.verl_trainer import trainer

_MODEL, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OWN_FILE = re.compile(r"(ppo|(fully_async|one_step_off|transfer_queue)_ppo)_(\w+_)?trainer$")
"""Files of verl's own, whose defaults are known."""
_SECTIONS = ("actor_rollout_ref.", "data.", "trainer.", "algorithm.", "distillation.")
_OTHER_PROGRAMS = {
    "sft_trainer": "trains on given answers alone",
    "main_generation": "writes answers without training",
    "main_eval": "scores answers without training",
    "model_merger": "merges checkpoints",
}
_EARLIER = {
    "distillation.teacher_model.n_gpus_per_node": "distillation.n_gpus_per_node",
    "distillation.teacher_model.nnodes": "distillation.nnodes",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "rollout.total_epochs": "trainer.total_epochs",
    "reward_model.overlong_buffer.enable": "reward.reward_kwargs.overlong_buffer_cfg.enable",
    "reward_model.overlong_buffer.len": "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward_model.overlong_buffer.penalty_factor": "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
}
"""Names of earlier versions → today's."""


def from_verl(source: Source) -> Draft:
    other = next((text for name, text in _OTHER_PROGRAMS.items() if name in source.program), None)
    if other is not None:
        raise ConfigError(
            f"{source.program} {other}; import-verl reads RL and on-policy distillation, such as verl.trainer.main_ppo"
        )
    draft = Draft(
        {_today(key): value for key, value in source.keys.items()}, "verl", notes=list(source.notes)
    )
    schedule, gkd = schedule_of(draft, source), is_gkd(draft, source.program)
    _student(draft)
    _data(draft)
    _reward(draft)
    if gkd:
        gkd_objective(draft)
    else:
        teachers(draft)
        objective(draft)
    rollout(draft, machines(draft), schedule)
    trainer(draft, schedule, whole=gkd)
    _the_rest(draft, source)
    written = draft.toml()
    draft.notes += [
        f"{one} is set nowhere; replace it in the recipe" for one in source.unresolved if one in written
    ]
    return draft


def _today(key: str) -> str:
    if key in _EARLIER:
        return _EARLIER[key]
    one = "distillation.teacher_model."
    if key.startswith(one) and not key.endswith("enable_resource_pool"):
        return f"distillation.teacher_models.teacher_model.{key.removeprefix(one)}"
    return key


def _student(draft: Draft) -> None:
    path = draft.get(f"{_MODEL}.path")
    if path is None:
        draft.notes.append(
            "the student's model is not given (actor_rollout_ref.model.path): set student.model"
        )
    else:
        draft.put("student.model", expanded(path), f"{_MODEL}.path")
    if draft.get(f"{_MODEL}.trust_remote_code", False):
        if path and Path(expanded(path)).is_absolute():
            draft.put("student.trust_remote_code", True, f"{_MODEL}.trust_remote_code")
        else:
            draft.unsupported(
                f"{_MODEL}.trust_remote_code",
                "code from the hub is pinned: student.trust_remote_code = true with student.revision",
            )
    draft.not_needed(f"{_MODEL}.trust_remote_code", "it is off here too")
    dtype = f"{_ACTOR}.fsdp_config.dtype"
    given = str(draft.get(dtype, "bfloat16"))
    if _DTYPES.get(given, given) == "float16":
        draft.unsupported(
            dtype, "float16 loses small gradients; student.dtype = 'bfloat16' is written instead"
        )
        given = "bfloat16"
    draft.put("student.dtype", _DTYPES.get(given, given), dtype)
    checkpointing = f"{_MODEL}.enable_gradient_checkpointing"
    draft.put("student.gradient_checkpointing", bool(draft.get(checkpointing, True)), checkpointing)
    tower = f"{_ACTOR}.freeze_vision_tower"
    if draft.get(tower) is not None or draft.get("data.image_key"):  # theirs trains the tower by default
        draft.put("student.freeze_vision", bool(draft.get(tower, False)), tower)
    attention = f"{_MODEL}.override_config.attn_implementation"
    if draft.get(attention) is not None:
        draft.put("student.attention", draft.get(attention), attention)
    _adapters(draft)


def _adapters(draft: Draft) -> None:
    """model.lora_rank, or with Megatron model.lora.rank."""
    rank, alpha, usual = f"{_MODEL}.lora_rank", f"{_MODEL}.lora_alpha", 16
    targets = f"{_MODEL}.target_modules"
    if draft.get(f"{_MODEL}.lora.rank", 0) > 0:
        rank, alpha, usual, targets = (
            f"{_MODEL}.lora.rank",
            f"{_MODEL}.lora.alpha",
            32,
            f"{_MODEL}.lora.target_modules",
        )
        draft.unsupported(
            targets,
            "Megatron's layers have other names; every linear layer of the decoder is the default of student.lora.targets",
        )
    if draft.get(rank, 0) > 0:
        draft.put("student.lora.rank", draft.get(rank), rank)
        draft.put("student.lora.alpha", float(draft.get(alpha, usual)), alpha)
        names = draft.get(targets, "all-linear")
        if names == "all-linear":
            draft.not_needed(
                targets, "every linear layer of the decoder is the default of student.lora.targets"
            )
        elif targets not in draft.entries:
            draft.put("student.lora.targets", [names] if isinstance(names, str) else list(names), targets)
    draft.not_needed(f"{_MODEL}.lora_rank", "no adapters")


def _data(draft: Draft) -> None:
    for ours, theirs in (("data.train", "data.train_files"), ("data.eval", "data.val_files")):
        files = draft.get(theirs)
        if files is not None:
            found = [expanded(one) for one in ([files] if isinstance(files, str) else files)]
            draft.put(ours, found[0] if len(found) == 1 else found, theirs)
    draft.put("data.max_prompt_tokens", draft.get("data.max_prompt_length", 512), "data.max_prompt_length")
    cut = draft.get("data.truncation", "error")
    overlong = {"error": "error", "left": "truncate_left"}.get(cut)
    if draft.get("data.filter_overlong_prompts", False):
        draft.put("data.overlong", "drop", "data.filter_overlong_prompts")
        draft.not_needed("data.truncation", "longer prompts are dropped, so none is cut")
    elif overlong is None:
        draft.unsupported(
            "data.truncation", "data.overlong = 'truncate_left' cuts the beginning; 'error' is the default"
        )
    else:
        draft.put("data.overlong", overlong, "data.truncation", "data.filter_overlong_prompts")
    draft.put("data.shuffle", bool(draft.get("data.shuffle", True)), "data.shuffle")
    if draft.get("data.seed") is not None:
        draft.put("run.seed", int(draft.get("data.seed")), "data.seed")
    options = "data.apply_chat_template_kwargs."
    for key in [key for key in draft.given if key.startswith(options)]:
        draft.put(f"rollout.template_options.{key.removeprefix(options)}", draft.given[key], key)


def _reward(draft: Draft) -> None:
    path, name = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
    if draft.get(path) is not None:
        file = Path(expanded(draft.get(path)))
        draft.put("data.reward", f"{file.stem}:{draft.get(name, 'compute_score')}", path, name)
        draft.put("run.python_path", list(dict.fromkeys([str(file.parent), "."])), path)
    else:
        draft.not_needed(name, "no file is given for it")
        given = " ".join(
            str(value)
            for key, value in draft.given.items()
            if key.startswith(("data.", "distillation.teacher_models."))
        )
        sets = [
            name for name in ("gsm8k", "math", "geo3k", "geometry3k", "code", "dapo") if name in given.lower()
        ]
        if sets == ["gsm8k"]:
            draft.follow(
                "data.reward", "understudy.rollout.rewards.builtin:gsm8k", "its reward for data_source gsm8k"
            )
        elif with_task_rewards(draft) or draft.get("data.val_files") is not None:
            draft.notes.append(
                "verl chooses a reward by data_source; name yours in data.reward: a function with compute_score's arguments, or "
                "'understudy.rollout.rewards.builtin:gsm8k', 'boxed_number', 'exact_match'. Without it nothing is evaluated"
            )
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    if draft.get(f"{buffer}.enable", False) and with_task_rewards(draft):
        draft.put("rollout.overlong_buffer", draft.get(f"{buffer}.len"), f"{buffer}.len", f"{buffer}.enable")
        draft.put(
            "rollout.overlong_penalty",
            float(draft.get(f"{buffer}.penalty_factor", 1.0)),
            f"{buffer}.penalty_factor",
        )
    for key in ("enable", "len", "penalty_factor"):
        draft.not_needed(
            f"{buffer}.{key}", "long answers are not penalised: enable is off, or task rewards are"
        )


def _the_rest(draft: Draft, source: Source) -> None:
    unknown: list[str] = []
    for name in source.not_read:
        if not _OWN_FILE.match(name):
            draft.notes.append(f"{name}: that file was not read; give its YAML, with the overrides behind it")
    for key, value in draft.given.items():
        if key in draft.entries:
            continue
        found = settled(key, value)
        if found is None:
            answer = unknown_key(RecipeTables, key.split("."), None)[0].partition("; ")[2]
            draft.unsupported(key, f"not known; {answer}")
            unknown.append(key)
        elif found[0]:
            draft.unsupported(key, found[1])
        else:
            draft.not_needed(key, found[1])
    if len(unknown) > len(draft.given) // 2 or not any(key.startswith(_SECTIONS) for key in draft.given):
        shown = ", ".join([*unknown, *draft.given][:4])
        raise ConfigError(
            f"{len(unknown)} of {len(draft.given)} keys are none of verl's ({shown}, …); give a whole configuration, with verl's sections "
            "actor_rollout_ref, data, trainer, distillation (TRL's: understudy import-trl)"
        )
