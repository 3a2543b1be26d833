"""Teachers and the objective of a verl configuration. The loss is where verl's defaults differ most from ours."""

from __future__ import annotations

from typing import Any

from understudy.porting.recipe_draft import Draft, Verdict, expanded

_LOSS, _ACTOR = "distillation.distillation_loss", "actor_rollout_ref.actor"
_TEACHERS = "distillation.teacher_models."
_SINGLE = "teacher_model"
"""The entry that verl's file has for one teacher; verl drops it if there are others."""
_ESTIMATORS = ("k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs")
_CLAMPED_BY_VERL = {"k3": 10.0, "low_var_kl": 10.0}
_ADVANTAGES = {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce++"}
_RATIOS = ("token", "sequence", "geometric")
_OFF = "distillation is off"


def distils(draft: Draft) -> bool:
    return bool(draft.get("distillation.enabled", any(key.startswith(_TEACHERS) for key in draft.given)))


def with_task_rewards(draft: Draft) -> bool:
    return not distils(draft) or bool(draft.get(f"{_LOSS}.use_task_rewards", True))


def teachers(draft: Draft) -> None:
    names = dict.fromkeys(
        key.removeprefix(_TEACHERS).split(".")[0] for key in draft.given if key.startswith(_TEACHERS)
    )
    if not distils(draft):
        for key in [key for key in draft.given if key.startswith("distillation.")]:
            draft.not_needed(key, _OFF)
        return
    draft.tell("distillation.enabled", Verdict.IMPLIED, "a recipe with [teachers.NAME] distils")
    if len(names) > 1 and _SINGLE in names:
        names.pop(_SINGLE)
        for key in [key for key in draft.given if key.startswith(f"{_TEACHERS}{_SINGLE}.")]:
            draft.not_needed(key, "verl drops the entry `teacher_model` if there are others")
    if not names:
        draft.notes.append("no teacher is given (distillation.teacher_models): add a [teachers.NAME] table")
    for name in names:
        _teacher(draft, name, alone=len(names) == 1)
    column = draft.get("distillation.teacher_key", "data_source")
    if len(names) > 1 or column != "data_source":
        draft.put("data.teacher_key", column, "distillation.teacher_key")
    nodes = draft.get("distillation.nnodes", 0)
    if nodes > 1:
        draft.put("cluster.backend", "ray", "distillation.nnodes")
        draft.put("cluster.pools.teachers.nodes", nodes, "distillation.nnodes")
        draft.put(
            "cluster.pools.teachers.gpus_per_node",
            draft.get("distillation.n_gpus_per_node", 8),
            "distillation.n_gpus_per_node",
        )
        for name in names:
            draft.put(f"teachers.{name}.placement", "pool", "distillation.nnodes")
            draft.put(f"teachers.{name}.pool", "teachers", "distillation.nnodes")


def _teacher(draft: Draft, name: str, alone: bool) -> None:
    theirs, ours = f"{_TEACHERS}{name}", f"teachers.{name}"
    inference = f"{theirs}.inference"
    if draft.get(f"{theirs}.model_path") is None:
        draft.notes.append(f"{theirs}.model_path is missing: set {ours}.model")
    else:
        draft.put(f"{ours}.model", expanded(draft.get(f"{theirs}.model_path")), f"{theirs}.model_path")
    if name == _SINGLE and alone:
        draft.not_needed(f"{theirs}.key", "one teacher scores every row")
    elif draft.get(f"{theirs}.key") is not None:
        draft.put(f"{ours}.key", str(draft.get(f"{theirs}.key")), f"{theirs}.key")
    shards = draft.get(f"{inference}.tensor_model_parallel_size", 2)
    draft.put(f"{ours}.tensor_parallel", shards, f"{inference}.tensor_model_parallel_size")
    if name == _SINGLE and alone:
        # verl gives the whole pool to a single teacher, whatever num_replicas says.
        pool = draft.get("distillation.n_gpus_per_node", 8) * draft.get("distillation.nnodes", 0)
        draft.put(
            f"{ours}.replicas", max(pool // shards, 1), "distillation.n_gpus_per_node", "distillation.nnodes"
        )
        draft.not_needed(f"{theirs}.num_replicas", "verl fills the teachers' pool")
    else:
        draft.put(
            f"{ours}.replicas", max(draft.get(f"{theirs}.num_replicas", 1), 1), f"{theirs}.num_replicas"
        )
    draft.put(
        f"{ours}.dtype",
        _dtype(draft.get(f"{inference}.dtype", draft.get("actor_rollout_ref.rollout.dtype", "bfloat16"))),
        f"{inference}.dtype",
    )
    for key, mine in (("max_model_len", "context_length"), ("max_num_batched_tokens", "max_batch_tokens")):
        if draft.get(f"{inference}.{key}") is not None:
            draft.put(f"{ours}.{mine}", draft.get(f"{inference}.{key}"), f"{inference}.{key}")


def objective(draft: Draft) -> None:
    distilling, task = distils(draft), with_task_rewards(draft)
    pointwise = distilling and _distillation(draft, task)
    if not distilling:
        draft.put("loss.distill_coef", 0.0, "distillation.enabled")
    if task and distilling:
        draft.put("loss.task_coef", 1.0, f"{_LOSS}.use_task_rewards")
    elif task:
        draft.follow("loss.task_coef", 1.0, "without distillation task rewards are trained on")
    if task:
        _advantages(draft)
    else:
        draft.tell(f"{_LOSS}.use_task_rewards", Verdict.IMPLIED, "loss.task_coef = 0.0")
    if task or pointwise:
        _policy_gradient(draft, task, pointwise)
    for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        draft.not_needed(f"{_ACTOR}.{key}", "there is no policy gradient on task rewards")
    for key in ("entropy_coeff", "policy_loss.loss_mode"):
        if not task and draft.get(f"{_ACTOR}.{key}"):
            draft.not_needed(f"{_ACTOR}.{key}", "verl reads it with task rewards alone")
    reduction = draft.get(f"{_ACTOR}.loss_agg_mode", "token-mean")
    if reduction in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        draft.put("loss.reduction", reduction, f"{_ACTOR}.loss_agg_mode")
    else:
        draft.unsupported(
            f"{_ACTOR}.loss_agg_mode",
            "loss.reduction is token-mean, seq-mean-token-sum or seq-mean-token-mean",
        )
    temperature = float(draft.get("actor_rollout_ref.rollout.temperature", 1.0))
    if temperature not in (0.0, 1.0) and (task or distilling):
        draft.follow(
            "loss.student_temperature",
            temperature,
            "the student's logits are divided by rollout.temperature in the loss",
        )
    _reference(draft, task)


def _distillation(draft: Draft, task: bool) -> bool:
    """The distillation term; whether it is a policy gradient."""
    mode = draft.get(f"{_LOSS}.loss_mode", "k3")
    gradient = bool(draft.get(f"{_LOSS}.use_policy_gradient", False))
    clamp = draft.get(f"{_LOSS}.loss_max_clamp")
    if mode == "forward_kl_topk":
        draft.put("loss.kind", "forward_kl", f"{_LOSS}.loss_mode")
        draft.put("loss.topk", draft.get(f"{_LOSS}.topk", 32), f"{_LOSS}.topk")
        draft.follow("loss.tail", "drop", "forward_kl_topk drops the mass outside the K ids")
        draft.follow("loss.clamp_at_zero", True, "forward_kl_topk counts a sum below zero as 0")
        floor = draft.get(f"{_LOSS}.log_prob_min_clamp")
        if floor is not None:
            draft.put("loss.log_prob_min_clamp", float(floor), f"{_LOSS}.log_prob_min_clamp")
        if gradient:
            draft.unsupported(f"{_LOSS}.use_policy_gradient", "a divergence over K ids has one value for every written token: it is differentiated here; "
                              "loss_mode = k1 makes a policy gradient")  # fmt: skip
            gradient = False
    elif mode in _ESTIMATORS:
        draft.put("loss.kind", mode, f"{_LOSS}.loss_mode")
        draft.put("loss.signal", "sampled", f"{_LOSS}.loss_mode")
        if mode in _CLAMPED_BY_VERL:
            clamp = min(clamp or _CLAMPED_BY_VERL[mode], _CLAMPED_BY_VERL[mode])
            if draft.get(f"{_LOSS}.loss_max_clamp") is None:
                draft.follow("loss.loss_max_clamp", clamp, f"{mode} clamps each token at {clamp:g}")
        if mode in ("k1", "kl") and not gradient:
            draft.notes.append(
                f"loss_mode = {mode} without use_policy_gradient has no gradient from the teacher; set loss.policy_gradient = true"
            )
    else:
        draft.unsupported(
            f"{_LOSS}.loss_mode", "`understudy keys loss.kind` lists the kinds; forward_kl is the default"
        )
    if draft.get(f"{_LOSS}.loss_max_clamp") is not None:
        draft.put("loss.loss_max_clamp", float(clamp), f"{_LOSS}.loss_max_clamp")
    draft.put("loss.policy_gradient", gradient, f"{_LOSS}.use_policy_gradient")
    if task:
        draft.put(
            "loss.distill_coef",
            float(draft.get(f"{_LOSS}.distillation_loss_coef", 1.0)),
            f"{_LOSS}.distillation_loss_coef",
        )
    return gradient


def _policy_gradient(draft: Draft, task: bool, pointwise: bool) -> None:
    chosen, other = (_ACTOR, _LOSS) if task else (_LOSS, _ACTOR)
    for ours, theirs in (("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
        key, both = f"{chosen}.{theirs}", f"{chosen}.clip_ratio"
        if key in draft.given and draft.get(key) is None:  # null: clip_ratio counts
            draft.put(f"loss.{ours}", float(draft.get(both, 0.2)), both)
        else:
            draft.put(f"loss.{ours}", float(draft.get(key, 0.2)), key)
    dual = f"{_ACTOR}.clip_ratio_c"
    if task:
        draft.put("loss.dual_clip", float(draft.get(dual, 3.0)), dual)
    else:
        draft.follow("loss.dual_clip", 3.0, "the distillation's policy gradient has the dual clip 3")
        draft.not_needed(
            dual, "verl reads it for task rewards alone: distillation's policy gradient is clipped at 3"
        )
    if task and pointwise:
        if draft.get(dual, 3.0) != 3.0:
            draft.notes.append(
                f"loss.dual_clip = {draft.get(dual):g} holds for task rewards and distillation; verl's is 3 for the second"
            )
        for key in ("clip_ratio_low", "clip_ratio_high"):
            if draft.get(f"{other}.{key}", 0.2) != draft.get(f"{chosen}.{key}", 0.2):
                draft.unsupported(
                    f"{other}.{key}",
                    "task and distillation share loss.clip_low and loss.clip_high; the actor's are written",
                )
    correction = "algorithm.rollout_correction"
    for theirs, ours, limit in (
        ("rollout_is", "weigh", "rollout_is_threshold"),
        ("rollout_rs", "drop", "rollout_rs_threshold"),
    ):
        kind = draft.get(f"{correction}.{theirs}")
        if kind in _RATIOS:
            draft.put(f"loss.correction.{ours}", kind, f"{correction}.{theirs}")
            top = float(draft.get(f"{correction}.{limit}", 2.0))
            draft.put(
                "loss.correction.cap" if ours == "weigh" else "loss.correction.high",
                top,
                f"{correction}.{limit}",
            )
            if ours == "drop":
                lowest = f"{correction}.{limit}_lower"
                draft.put(
                    "loss.correction.low", float(draft.get(lowest, 1 / top)), lowest, f"{correction}.{limit}"
                )
        elif kind is not None:
            draft.unsupported(
                f"{correction}.{theirs}", f"loss.correction.{ours} is one of {', '.join(_RATIOS)}"
            )
        draft.not_needed(f"{correction}.{theirs}", "off")
        draft.not_needed(f"{correction}.{limit}", "off")
        draft.not_needed(f"{correction}.{limit}_lower", "off")


def _advantages(draft: Draft) -> None:
    key, plain = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    kind = draft.get(key, "gae")
    if kind not in _ADVANTAGES:
        draft.unsupported(key, f"loss.advantage is one of {', '.join(_ADVANTAGES.values())}; grpo is written")
        kind = "grpo"
    ours = _ADVANTAGES[kind]
    if kind == "grpo" and draft.get(plain, True) is False:
        draft.put("loss.advantage", "grpo_no_std", key, plain)
    else:
        draft.put("loss.advantage", ours, key)
    draft.not_needed(plain, "advantages are divided by the standard deviation of their group")
    if kind in ("gae", "reinforce_plus_plus"):
        draft.put("loss.gamma", float(draft.get("algorithm.gamma", 1.0)), "algorithm.gamma")
    if kind == "gae":
        draft.put("loss.lam", float(draft.get("algorithm.lam", 1.0)), "algorithm.lam")
        _critic(draft)
    if draft.get("algorithm.filter_groups.enable", False):
        draft.put("rollout.filter_groups", True, "algorithm.filter_groups.enable")
        rounds = draft.get("algorithm.filter_groups.max_num_gen_batches", 0)
        if rounds > 0:
            draft.put("rollout.max_refills", rounds, "algorithm.filter_groups.max_num_gen_batches")


def _critic(draft: Draft) -> None:
    for ours, theirs, default in (
        ("learning_rate", "optim.lr", 1e-5),
        ("weight_decay", "optim.weight_decay", 0.01),
        ("grad_clip", "grad_clip", 1.0),
        ("value_clip", "cliprange_value", 0.5),
    ):
        draft.put(f"critic.{ours}", float(draft.get(f"critic.{theirs}", default)), f"critic.{theirs}")
    draft.put("critic.dtype", "bfloat16", "critic.fsdp.dtype")
    draft.put(
        "critic.gradient_checkpointing",
        bool(draft.get("critic.model.enable_gradient_checkpointing", True)),
        "critic.model.enable_gradient_checkpointing",
    )
    if draft.get("critic.model.path") is not None:
        draft.put("critic.model", expanded(draft.get("critic.model.path")), "critic.model.path")
    draft.put("critic.only_steps", draft.get("trainer.critic_warmup", 0), "trainer.critic_warmup")


def _reference(draft: Draft, task: bool) -> None:
    in_loss, in_reward = (
        draft.get(f"{_ACTOR}.use_kl_loss", False),
        draft.get("algorithm.use_kl_in_reward", False),
    )
    if in_loss and not task:
        for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"):
            draft.not_needed(
                f"{_ACTOR}.{key}",
                "verl has this KL in the policy loss, which runs with task rewards alone; loss.kl_coef would add it",
            )
    elif in_loss:
        draft.put(
            "loss.kl_coef",
            float(draft.get(f"{_ACTOR}.kl_loss_coef", 0.001)),
            f"{_ACTOR}.kl_loss_coef",
            f"{_ACTOR}.use_kl_loss",
        )
        draft.put("loss.kl_kind", draft.get(f"{_ACTOR}.kl_loss_type", "low_var_kl"), f"{_ACTOR}.kl_loss_type")
        draft.unsupported(
            "algorithm.use_kl_in_reward", "one KL to the reference: loss.kl_in is 'loss' here"
        ) if in_reward else None
    elif in_reward and task:
        draft.put(
            "loss.kl_coef",
            float(draft.get("algorithm.kl_ctrl.kl_coef", 0.001)),
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.use_kl_in_reward",
        )
        draft.put("loss.kl_kind", draft.get("algorithm.kl_penalty", "kl"), "algorithm.kl_penalty")
        draft.put("loss.kl_in", "reward", "algorithm.use_kl_in_reward")
    for key in (
        f"{_ACTOR}.use_kl_loss",
        "algorithm.use_kl_in_reward",
        f"{_ACTOR}.kl_loss_coef",
        f"{_ACTOR}.kl_loss_type",
    ):
        draft.not_needed(key, "no KL to a reference is the default")


def _dtype(name: Any) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": "bfloat16"}.get(
        str(name), str(name)
    )
