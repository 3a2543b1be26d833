"""Rules on what the student learns: divergence, entropy, lengths, rewards, and who its tokens come from."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from understudy.observability.advisories.facts import WINDOW, Advisory, Rule, RunFacts, steps_of
from understudy.observability.advisories.history import History, Series
from understudy.observability.report import is_share, mean_reward

LOSS_FELL, KL_ROSE = 0.9, 1.2
"""Last over first: the loss fell by a tenth while a KL rose by a fifth."""
KL_ABOVE_START = 1.5
"""Last steps over the first step: the student is half as far again from the teachers as before training."""
TRUNCATED = 0.25
"""Share of answers cut at `rollout.max_new_tokens`."""
LENGTH_GREW, SOME_TRUNCATED = 1.5, 0.05
"""Answers half as long again as at the start, and a twentieth of them cut."""
ENTROPY_FELL, STILL_APART = 0.25, 0.75
"""Entropy fell to a quarter while the KL is still above three quarters of its start."""
AGREED, REWARD_FELL = 0.1, 0.5
"""Last steps over the first step: the KL to a teacher that follows the student fell to a tenth, the reward to a half."""
LENGTH_FELL = 1 / 3
"""Last steps over the first step: answers under a teacher that follows the student."""
MASS_FELL = 0.1
"""Fall of the student's probability on the teacher's candidates, or of the teacher's on the student's; absolute."""
TEACHER_BELOW = 0.05
"""A student this much above its teacher."""
SAME_REWARD_STEPS = 10
"""Steps in a row with the same mean reward."""
PARSED = 0.5
"""Share of answers in which a reward found a result (`rollout/reward/NAME/parsed`)."""
NO_SIGNAL = 0.5
"""Share of a step's prompts whose sessions all got the same reward."""
CLAMPED, CLIPPED = 0.05, 0.3
"""Share of tokens whose loss was clamped; share of ratios outside PPO's clip range."""
ENGINE_APART = 0.05
"""Mean |log-probability of the trainer − of the engine| per token, without staleness."""
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Keys of `[rollout]` and the values at which tokens are drawn from the student's own distribution."""


def kl_rises_while_loss_falls(facts: RunFacts) -> Iterator[Advisory]:
    loss = facts.history.get("actor/loss").ends(WINDOW)
    if loss is None or not 0 < loss[1] < LOSS_FELL * loss[0]:
        return
    keys = {"the teachers": "actor/distillation/loss"}
    if len(named := facts.history.named("teacher/", "/kl")) > 1:
        keys |= {f"teacher {name}": f"teacher/{name}/kl" for name in named}
    for who, key in keys.items():
        kl = facts.history.get(key).ends(WINDOW)
        if kl is not None and kl[0] > 0 and kl[1] > KL_ROSE * kl[0]:
            yield Advisory(
                "kl_rises_while_loss_falls", "warning",
                f"The student moves away from {who} although the loss falls",
                f"KL {kl[0]:.3g} → {kl[1]:.3g}, loss {loss[0]:.3g} → {loss[1]:.3g}, {steps_of(facts, key)}",
                "Raise loss.distill_coef or lower loss.task_coef; with one teacher alone, see its share of the rows.",
                (key, "actor/loss"),
            )  # fmt: skip


def kl_above_start(facts: RunFacts) -> Iterator[Advisory]:
    """Against the first step, whose rows the untrained student wrote: a learning rate that is too high spoils the
    student within a few steps, so that medians of ten steps already begin high."""
    key = "actor/distillation/loss"
    kl = facts.history.get(key)
    if len(kl) < 2 * WINDOW or (ends := kl.ends(WINDOW)) is None or kl.values[0] <= 0:
        return
    if ends[1] > KL_ABOVE_START * kl.values[0]:
        paid = bool(facts.key("loss.task_coef", 0.0))
        yield Advisory(
            "kl_above_start", "warning", "The student is further from the teachers than before training",
            f"KL {kl.values[0]:.3g} at step {kl.steps[0]}, {ends[1]:.3g} in the last {WINDOW} steps",
            "The reward pulls it away: raise loss.distill_coef or lower loss.task_coef, and read some answers."
            if paid
            else "Lower trainer.learning_rate, or raise trainer.warmup_steps.",
            (key,),
        )  # fmt: skip


def truncation(facts: RunFacts) -> Iterator[Advisory]:
    key, limit = "response_length/clip_ratio", facts.key("rollout.max_new_tokens", "?")
    cut = facts.history.get(key)
    if len(cut) >= WINDOW and (share := mean(cut.last(WINDOW))) >= TRUNCATED:
        yield Advisory(
            "truncation", "warning", f"{share:.0%} of the answers are cut at rollout.max_new_tokens = {limit}",
            f"mean of the last {WINDOW} steps",
            "Raise rollout.max_new_tokens, or shorten the answers with rollout.overlong_buffer.", (key,),
        )  # fmt: skip
        return
    length = facts.history.get("response_length/mean").ends(WINDOW)
    if length and length[1] > LENGTH_GREW * length[0] and mean(cut.last(WINDOW) or [0]) >= SOME_TRUNCATED:
        yield Advisory(
            "length_inflation", "warning",
            f"Answers grow longer, and {mean(cut.last(WINDOW)):.0%} are cut at rollout.max_new_tokens = {limit}",
            f"mean length {length[0]:.0f} → {length[1]:.0f} tokens, {steps_of(facts, 'response_length/mean')}",
            "Set rollout.overlong_buffer or loss.reduction = \"seq-mean-token-mean\"; read the longest answers.",
            ("response_length/mean", key),
        )  # fmt: skip


def entropy_collapse(facts: RunFacts) -> Iterator[Advisory]:
    """A student that has learnt a task with one right answer has no entropy either, so the KL must be high."""
    entropy = facts.history.get("actor/entropy").ends(WINDOW)
    apart = facts.history.get("actor/distillation/loss").ends(WINDOW)
    if entropy is None or apart is None or entropy[0] <= 0 or apart[0] <= 0:
        return
    if entropy[1] < ENTROPY_FELL * entropy[0] and apart[1] > STILL_APART * apart[0]:
        yield Advisory(
            "entropy_collapse", "warning", "The student's entropy collapses before it has learnt from the teachers",
            f"entropy {entropy[0]:.3g} → {entropy[1]:.3g} nats, KL {apart[0]:.3g} → {apart[1]:.3g}, {steps_of(facts, 'actor/entropy')}",
            "Lower trainer.learning_rate, or use loss.kind = \"forward_kl\", which covers all the teacher's answers.",
            ("actor/entropy", "actor/distillation/loss"),
        )  # fmt: skip


def agreed_on_nothing(facts: RunFacts) -> Iterator[Advisory]:
    """A student and a teacher with its own weights can agree by forgetting what the teacher's prompt says. Against the first
    step: it happens within ten."""
    keys = ("actor/distillation/loss", "critic/score/mean")
    if not _teacher_follows(facts) or not all(map(facts.history.get, keys)):
        return
    (apart, agreed), (reward, got) = (
        (one.values[0], median(one.last(WINDOW))) for one in map(facts.history.get, keys)
    )
    was_better = max(facts.history.get(keys[1]).values) > got  # the first step may have 0 by chance
    if agreed < AGREED * apart and was_better and got <= reward - REWARD_FELL * abs(reward):
        yield Advisory(
            "agreed_on_nothing", "warning", "The student and the teacher that follows it agree on answers without a reward",
            f"KL {apart:.3g} → {agreed:.3g}, reward {reward:.3g} → {got:.3g}, {steps_of(facts, keys[0])}",
            "Set teachers.NAME.version = \"start\", whose target does not move, or lower trainer.learning_rate; read some answers.",
            keys,
        )  # fmt: skip


def answers_vanish(facts: RunFacts) -> Iterator[Advisory]:
    """A teacher that is asked for brevity and follows the student asks for more of it with each publish. A frozen one does not."""
    key = "response_length/mean"
    lengths = facts.history.get(key)
    if not _teacher_follows(facts) or not lengths:
        return
    first, last = lengths.values[0], median(lengths.last(WINDOW))
    if last < LENGTH_FELL * first:
        yield Advisory(
            "answers_vanish", "warning", "Answers shrink under a teacher that follows the student",
            f"mean length {first:.0f} → {last:.0f} tokens, {steps_of(facts, key)}",
            "Read some answers; set teachers.NAME.version = \"start\", whose target does not move, or lower trainer.learning_rate.",
            (key,),
        )  # fmt: skip


def overlap_falls(facts: RunFacts) -> Iterator[Advisory]:
    """Candidates are the teacher's, or the student's (`signal = "at_ids"`): the other side's mass on them counts."""
    for who, whose in (("student", "teacher"), ("teacher", "student")):
        key = f"actor/distillation/{who}_mass"
        mass = facts.history.get(key).ends(WINDOW)
        if mass and mass[0] - mass[1] > MASS_FELL:
            yield Advisory(
                "overlap_falls", "warning", "Student and teacher agree less and less on the likely next tokens",
                f"probability of the {who} on the {whose}'s candidates {mass[0]:.0%} → {mass[1]:.0%}, {steps_of(facts, key)}",
                "Lower trainer.learning_rate; check in the token view whether the teacher reads the same template.",
                (key,),
            )  # fmt: skip


def teacher_accuracy(facts: RunFacts) -> Iterator[Advisory]:
    for source, teacher in facts.history.named("val/teacher_accuracy/").items():
        level, own = teacher.values[-1], facts.history.get(f"val/accuracy/{source}")
        keys = (f"val/teacher_accuracy/{source}", f"val/accuracy/{source}")
        if level == 0:
            yield Advisory(
                "teacher_solves_nothing", "warning", f"The teacher solves none of the held-out problems of {source!r}",
                f"{keys[0]} = 0",
                "Check that it is the right teacher for this data_source, its chat template and what data.reward expects.",
                keys,
            )  # fmt: skip
        elif own and own.values[-1] > level + TEACHER_BELOW:
            yield Advisory(
                "teacher_below_student", "note", f"The student is better than its teacher on {source!r}",
                " against ".join(mean_reward(one, is_share(own.values[-1], level)) for one in (own.values[-1], level))
                + f" at step {own.steps[-1]}",
                "More of this teacher may cost accuracy: stop, choose another teacher, or add loss.task_coef.", keys,
            )  # fmt: skip


def reward_is_constant(facts: RunFacts) -> Iterator[Advisory]:
    key = "critic/score/mean"
    last = facts.history.get(key).last(SAME_REWARD_STEPS)
    learns = bool(facts.key("loss.task_coef", 0.0))
    if len(last) == SAME_REWARD_STEPS and len(set(last)) == 1 and (learns or last[0] <= 0):
        none = last[0] <= 0
        yield Advisory(
            "reward_is_constant", "warning" if learns else "note",
            "No answer gets a reward" if none else "Every answer gets the same reward: it no longer teaches anything",
            f"{key} = {last[0]:g} in each of the last {SAME_REWARD_STEPS} steps",
            "Read some answers: the format that data.reward expects may never be written; see rollout.max_new_tokens."
            if none
            else "Choose harder prompts, or set rollout.filter_groups = true.",
            (key,),
        )  # fmt: skip
    for name, parsed in _parsed(facts.history).items():
        if len(parsed) >= WINDOW and (share := mean(parsed.last(WINDOW))) < PARSED:
            yield Advisory(
                "no_parsable_result", "warning", f"{1 - share:.0%} of the answers have no result that reward {name} can read",
                _unread(facts.history, share),
                "Say the expected format in the prompt, or raise rollout.max_new_tokens if the end is cut.",
                (f"rollout/reward/{name}/parsed",),
            )  # fmt: skip
    silent, rows = facts.history.get("rollout/filtered_prompts"), facts.key("trainer.batch_size")
    if rows and len(silent) >= WINDOW:
        lost = mean(silent.last(WINDOW))
        if lost / (lost + rows) >= NO_SIGNAL:
            yield Advisory(
                "groups_without_signal", "warning",
                f"{lost / (lost + rows):.0%} of the prompts give groups without signal: all sessions got the same reward",
                f"{lost:.1f} filtered prompts a step beside {rows} trained, last {WINDOW} steps",
                "Raise rollout.n or rollout.temperature, or choose prompts of another difficulty.",
                ("rollout/filtered_prompts",),
            )  # fmt: skip


def clamped_or_clipped(facts: RunFacts) -> Iterator[Advisory]:
    for key, limit, what, turn in (
        ("actor/distillation/clamped_share", CLAMPED, "have their loss clamped", "Raise loss.per_token_clamp or loss.loss_max_clamp."),
        ("actor/pg_clipfrac", CLIPPED, "have a ratio outside the clip range", "Lower trainer.learning_rate, trainer.epochs or trainer.max_staleness."),
        ("actor/distillation/pg_clipfrac", CLIPPED, "have a ratio outside the clip range", "Lower trainer.learning_rate, trainer.epochs or trainer.max_staleness."),
    ):  # fmt: skip
        seen = facts.history.get(key)
        if len(seen) >= WINDOW and (share := mean(seen.last(WINDOW))) >= limit:
            yield Advisory(
                "clamped_or_clipped", "warning", f"{share:.0%} of the tokens {what} and teach less or nothing",
                f"{key}, mean of the last {WINDOW} steps", turn, (key,),
            )  # fmt: skip


def engine_disagrees(facts: RunFacts) -> Iterator[Advisory]:
    """Every run records `actor/engine_diff`. It measures the engine only if each token is drawn from the distribution
    that the loss reads, by the weights that it trains."""
    key = "rollout_corr/abs_diff_mean"
    if key not in facts.history.series:
        key = "actor/engine_diff"
        alike = facts.key("rollout.temperature", 1.0) == facts.key("loss.student_temperature", 1.0)
        if not alike or "actor/updates" in facts.history.series:
            return
        if any(facts.key(f"rollout.{name}", value) != value for name, value in _NEUTRAL.items()):
            return
    apart, stale = facts.history.get(key), facts.history.get("async/staleness/mean")
    if len(apart) < WINDOW or any(stale.last(WINDOW)):
        return
    if (distance := mean(apart.last(WINDOW))) >= ENGINE_APART:
        yield Advisory(
            "engine_disagrees", "warning", "Engine and trainer give the same tokens different probabilities",
            f"mean |δ| = {distance:.3g} nats a token over the last {WINDOW} steps, with no staleness",
            "Set rollout.temperature, rollout.top_p and loss.student_temperature alike; use the same dtype; else loss.correction.weigh.",
            (key,),
        )  # fmt: skip


def _parsed(history: History) -> dict[str, Series]:
    return history.named("rollout/reward/", "/parsed")


def _unread(history: History, share: float) -> str:
    rows = sum(history.get("rollout/rows").last(WINDOW))
    counted = f"{(1 - share) * rows:.0f} of {rows:.0f} answers, " if rows else "mean of "
    return f"{counted}the last {WINDOW} steps"


def _teacher_follows(facts: RunFacts) -> bool:
    versions = facts.history.get("rollout/teacher_version/max").values
    return len(versions) >= 2 * WINDOW and versions[-1] > versions[0]


RULES: tuple[Rule, ...] = (
    kl_rises_while_loss_falls,
    kl_above_start,
    truncation,
    entropy_collapse,
    agreed_on_nothing,
    answers_vanish,
    overlap_falls,
    teacher_accuracy,
    reward_is_constant,
    clamped_or_clipped,
    engine_disagrees,
)
