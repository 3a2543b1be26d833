"""Checks `[loss]`, `[rollout]`, `[critic]` and `[reference]` against each other."""

from __future__ import annotations

from understudy.config.tables import RecipeTables

GROUP_ADVANTAGES = ("grpo", "grpo_no_std", "rloo")
"""Kinds of `loss.advantage` that compare the rows of one prompt."""
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd", "mixture")


def objective_problems(recipe: RecipeTables) -> list[str]:
    return [
        *_roles(recipe),
        *_correction(recipe),
        *_filters(recipe),
        *_optimizer(recipe),
        *_given_answers(recipe),
    ]


def _given_answers(recipe: RecipeTables) -> list[str]:
    """What cannot be learnt from answers that the student did not draw."""
    rollout, loss = recipe.rollout, recipe.loss
    if rollout.off_policy == 0:
        return []
    share, problems = f"rollout.off_policy = {rollout.off_policy:g}", []
    estimated = loss.distill_coef > 0 and loss.kind not in DIVERGENCES
    if loss.sft_coef == 0 and (estimated or loss.distill_coef == 0):
        why = (
            f"loss.kind = {loss.kind!r} is right for tokens that the student drew only"
            if estimated
            else "policy gradients are for drawn tokens only"
        )
        problems.append(
            f"{share} would learn nothing from given answers: {why}; set loss.sft_coef above 0, or use a divergence, such as "
            "'forward_kl' or 'jsd'"
        )
    if rollout.off_policy == 1 and (estimated or loss.task_coef > 0):
        term = f"loss.kind = {loss.kind!r}" if estimated else "loss.task_coef > 0"
        problems.append(f"{share} with {term}: the student would draw no row for it; lower off_policy")
    if rollout.off_policy == 1 and loss.kl_coef > 0:
        problems.append(
            f"{share} with loss.kl_coef > 0: the penalty is estimated on the student's own rows, and there would be none; lower "
            "off_policy, or set kl_coef = 0"
        )
    if loss.signal == "at_ids":
        problems.append(
            f"{share} with loss.signal = 'at_ids': the engine names the student's candidates while it writes, and given answers "
            "have none; use 'topk' or 'hidden'"
        )
    if loss.advantage == "gae" and loss.task_coef > 0:
        problems.append(
            f"{share} with loss.advantage = 'gae': the critic would learn values of answers that are not the student's; use another "
            "advantage, or off_policy = 0"
        )
    if rollout.agent != "single_turn":
        problems.append(
            f"{share} with rollout.agent = {rollout.agent!r}: a given answer is one turn; use 'single_turn', or off_policy = 0"
        )
    if rollout.filter_groups:
        problems.append(
            f"{share} with rollout.filter_groups: rewards of given answers say nothing about the student; use one of them"
        )
    return problems


def _optimizer(recipe: RecipeTables) -> list[str]:
    trainer, problems = recipe.trainer, []
    if recipe.student.lora is not None and trainer.ema_decay is not None:
        problems.append(
            "trainer.ema_decay with [student.lora] would average adapters, which no engine can load by themselves; use one"
        )
    if recipe.student.lora is not None and recipe.student.lora.publish == "adapter":
        rollout = recipe.rollout
        if rollout.engine != "hf":
            problems.append(
                f"student.lora.publish = 'adapter' is for our own engine processes, which merge adapters themselves; {rollout.engine} "
                "servers get merged weights: leave it out, or set rollout.engine = 'hf' and rollout.processes"
            )
        elif not rollout.processes:
            problems.append(
                "student.lora.publish = 'adapter': the engine is in the trainer's process, where no weights travel; set "
                "rollout.processes, or leave it out"
            )
    return problems


def _roles(recipe: RecipeTables) -> list[str]:
    loss, problems = recipe.loss, []
    if loss.advantage == "gae" and loss.task_coef == 0:
        problems.append("loss.advantage = 'gae' needs task rewards: set loss.task_coef above 0")
    problems += _groups(recipe)
    if recipe.teachers and loss.distill_coef == 0 and (loss.task_coef > 0 or loss.sft_coef > 0):
        problems.append(
            f"loss.distill_coef = 0 with [teachers.{next(iter(recipe.teachers))}]: no loss uses a teacher's scores, and every row would be "
            "scored; set loss.distill_coef above 0 (1e-9 only measures), or take the teachers out (teachers={} as an override)"
        )
    if recipe.critic is not None and loss.advantage != "gae":
        problems.append(
            f"[critic] is only used by loss.advantage = 'gae', and it is {loss.advantage!r}; change it, or leave [critic] out"
        )
    if "critic" in recipe.cluster.roles and loss.advantage != "gae":
        problems.append(
            f"cluster.roles.critic = {recipe.cluster.roles['critic']!r} changes nothing in this recipe: a critic needs loss.advantage = "
            f"'gae', and it is {loss.advantage!r}; change it, or take the role out"
        )
    problems += _critic_device(recipe)
    if recipe.reference is not None and loss.kl_coef == 0:
        problems.append(
            "[reference] is only used with loss.kl_coef above 0; set it, or leave [reference] out"
        )
    if loss.kl_in == "reward" and loss.kl_coef > 0 and loss.task_coef == 0:
        problems.append(
            "loss.kl_in = 'reward' takes the penalty off task rewards, and loss.task_coef is 0; use kl_in = 'loss'"
        )
    return problems


def _groups(recipe: RecipeTables) -> list[str]:
    """A group of one row has no advantage. A user's own agent loop may return several rows for one session."""
    loss, rollout = recipe.loss, recipe.rollout
    own_loops = any(":" in name for name in (rollout.agent, *rollout.agent_options))
    if loss.task_coef == 0 or rollout.n > 1 or loss.advantage not in GROUP_ADVANTAGES or own_loops:
        return []
    return [
        f"loss.advantage = {loss.advantage!r} compares the sessions of a prompt, and rollout.n = 1 makes one: every advantage would be 0 "
        "and loss.task_coef without effect; set rollout.n to 4 or more, or loss.advantage = 'reinforce++' or 'gae'"
    ]


def _critic_device(recipe: RecipeTables) -> list[str]:
    critic = recipe.critic
    if critic is None or critic.device is None or critic.process or "critic" in recipe.cluster.roles:
        return []
    return [
        f"critic.device = {critic.device!r} is for a critic in its own process, and this one runs in the trainer's process, on the "
        "student's device; set critic.process = true (or cluster.roles.critic), or leave device out"
    ]


def _correction(recipe: RecipeTables) -> list[str]:
    loss, correction, problems = recipe.loss, recipe.loss.correction, []
    if correction.weigh == correction.drop == "off":
        return []
    if loss.task_coef == 0 and not loss.policy_gradient:
        problems.append(
            "loss.correction weighs policy gradients, and this loss has none: a divergence is right on any token, however it was "
            "written. Leave it out, or set loss.task_coef or loss.policy_gradient"
        )
    if loss.tis_cap is not None:
        problems.append(
            "loss.tis_cap and loss.correction both make up for the engine; use loss.correction.weigh = 'token' and "
            f"loss.correction.cap = {loss.tis_cap:g} instead of loss.tis_cap"
        )
    if recipe.rollout.temperature == 0:
        problems.append(
            "loss.correction needs sampled tokens: at rollout.temperature = 0 every ratio is 0 or 1"
        )
    if correction.low >= correction.high:
        problems.append(
            f"loss.correction.low = {correction.low:g} must lie below loss.correction.high = {correction.high:g}"
        )
    return problems


def _filters(recipe: RecipeTables) -> list[str]:
    rollout, problems = recipe.rollout, []
    if rollout.filter_groups and rollout.n == 1:
        problems.append("rollout.filter_groups compares the sessions of a prompt: set rollout.n above 1")
    if rollout.filter_groups and recipe.data.reward is None:
        problems.append("rollout.filter_groups looks at rewards: set data.reward")
    if rollout.filter_groups and recipe.loss.task_coef == 0:
        problems.append(
            "rollout.filter_groups throws away prompts without a reward signal, and loss.task_coef = 0 uses none"
        )
    if rollout.overlong_buffer is not None:
        budget = rollout.trajectory_budget
        named = "max_new_tokens" if rollout.agent == "single_turn" else "max_trajectory_tokens"
        if budget is None:
            problems.append(
                f"rollout.overlong_buffer with rollout.agent = {rollout.agent!r}: it is the last stretch of what all turns may have "
                "together; set rollout.max_trajectory_tokens"
            )
        elif rollout.overlong_buffer > budget:
            problems.append(
                f"rollout.overlong_buffer = {rollout.overlong_buffer} is longer than rollout.{named} = {budget}; it is the last "
                "stretch of it"
            )
        if recipe.loss.task_coef == 0:
            problems.append("rollout.overlong_buffer lowers task rewards, and loss.task_coef = 0 uses none")
    return problems
