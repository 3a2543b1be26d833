"""Names, formulas and refusals of objectives; no torch, so `understudy check` can use it.

p is the teacher's full softmax, q the student's, y the token the student wrote, r = log q(y) − log p(y), sg
= stop-gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from understudy.errors import LossInputError

DIVERGENCE_FORMULAS = {
    "forward_kl": "Σ p·log(p/q)",
    "reverse_kl": "Σ q·log(q/p)",
    "jsd": "β·KL(p‖m) + (1−β)·KL(q‖m),  m = β·p + (1−β)·q",
    "skew_forward_kl": "KL(p ‖ α·p + (1−α)·q)",
    "skew_reverse_kl": "KL(q ‖ α·q + (1−α)·p)",
    "tvd": "½ Σ |p − q|",
    "mixture": "λ·KL(p‖q) + (1−λ)·KL(q‖p)",
}

ESTIMATOR_FORMULAS = {
    "k1": "r",
    "k2": "r²/2",
    "k3": "exp(−r) − 1 + r",
    "abs": "|r|",
    "k1+": "value r, gradient of r²/2 (straight through)",
    "k3+": "value exp(−r) − 1 + r, gradient of r²/2 (straight through)",
}

ESTIMATOR_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Names that other trainers use."""

ESTIMATOR_TRUTH = {
    "k2": "expected gradient: that of reverse KL(q‖p)",
    "k3": "expected gradient: that of FORWARD KL(p‖q), with far larger variance than k2's",
    "abs": "expected gradient: pushes each written token up or down by the sign of r alone; not a KL",
    "k1+": "expected gradient: that of reverse KL(q‖p); the value reported is r",
    "k3+": "expected gradient: that of reverse KL(q‖p); the value reported is k3, which is never negative",
}

SIGNALS = ("sampled", "topk", "at_ids", "hidden")
TAILS = ("bucket", "renormalise", "drop")

SUPPORT_PHRASES = {
    "topk": "the teacher's top-{k}",
    "at_ids": "the student's own top-{k}",
    "hidden": "the full vocabulary",
}

TAIL_PHRASES = {
    "bucket": "plus one exact tail bucket",
    "renormalise": "renormalised over these ids",
    "drop": "tail dropped (verl's forward_kl_topk)",
}


@dataclass(frozen=True)
class ObjectiveDescription:
    """The true objective of a set of loss settings."""

    name: str
    formula: str
    notes: tuple[str, ...] = ()
    """What to know before a run: what the gradient really is, what a setting costs."""

    def __str__(self) -> str:
        return "\n".join([self.name, f"  {self.formula}", *(f"  note: {note}" for note in self.notes)])


def canonical_kind(kind: str) -> str:
    """`kind` without aliases; an unknown one is refused with the nearest name."""
    resolved = ESTIMATOR_ALIASES.get(kind, kind)
    if resolved not in DIVERGENCE_FORMULAS and resolved not in ESTIMATOR_FORMULAS:
        known = [*DIVERGENCE_FORMULAS, *ESTIMATOR_FORMULAS, *ESTIMATOR_ALIASES]
        raise LossInputError(_unknown("loss kind", kind, known))
    return resolved


def describe_objective(
    kind: str,
    signal: str = "topk",
    tail: str = "bucket",
    *,
    topk: int | None = None,
    beta: float = 0.5,
    alpha: float = 0.1,
    mixture_weight: float = 0.5,
    policy_gradient: bool = False,
    distill_coef: float = 1.0,
    task_coef: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    tis_cap: float | None = None,
    discount: float = 0.0,
    per_token_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    log_prob_min_clamp: float | None = None,
    clamp_at_zero: bool = False,
    student_temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    sft_coef: float = 0.0,
) -> ObjectiveDescription:
    """Name and formula of the objective these settings make; LossInputError where they make no sense."""
    resolved = canonical_kind(kind)
    if signal not in SIGNALS:
        raise LossInputError(_unknown("signal", signal, SIGNALS))
    if tail not in TAILS:
        raise LossInputError(_unknown("tail", tail, TAILS))
    _check_numbers(
        beta,
        alpha,
        mixture_weight,
        distill_coef,
        task_coef,
        sft_coef,
        clip_low,
        clip_high,
        dual_clip,
        tis_cap,
    )
    _check_more_numbers(discount, student_temperature, teacher_temperature)
    _check_clamps(per_token_clamp, loss_max_clamp, log_prob_min_clamp)
    if distill_coef == 0:
        notes: list[str] = []
        name, term = "", ""
    elif resolved in DIVERGENCE_FORMULAS:
        _refuse_divergence(resolved, signal, tail, policy_gradient, discount, topk)
        name, term, notes = _describe_divergence(resolved, signal, tail, topk, beta, alpha, mixture_weight)
        if clamp_at_zero:
            term = f"max(0, {term})"
        if loss_max_clamp is not None:
            term = f"clamp({term}, ±{loss_max_clamp:g})"
    else:
        _refuse_estimator(resolved, kind, policy_gradient, discount)
        name, term, notes = _describe_estimator(resolved, signal, policy_gradient, discount, loss_max_clamp)
        if policy_gradient:
            term = _policy_formula(term, clip_low, clip_high, dual_clip, tis_cap)
    drops = distill_coef > 0 and resolved in DIVERGENCE_FORMULAS and signal == "topk" and tail == "drop"
    notes += _candidate_clamp_notes(drops, log_prob_min_clamp, clamp_at_zero)
    if teacher_temperature != 1.0 and distill_coef > 0 and resolved not in DIVERGENCE_FORMULAS:
        raise LossInputError(
            f"teacher_temperature = {teacher_temperature:g} needs a divergence: {kind} compares the log-probabilities of the written "
            "token at temperature 1"
        )
    if teacher_temperature != 1.0 and signal != "hidden":
        raise LossInputError(
            f"teacher_temperature = {teacher_temperature:g} needs signal = 'hidden': the {signal!r} signal carries "
            "log-probabilities of the softmax at temperature 1, and a few of them cannot be computed for another temperature."
        )
    if student_temperature != teacher_temperature and distill_coef > 0:
        notes.append(
            f"student temperature {student_temperature:g} and teacher temperature {teacher_temperature:g} differ: "
            "identical models will show a divergence above 0"
        )
    if loss_max_clamp is not None:
        notes.append(
            "a token beyond ±loss_max_clamp "
            + ("keeps the clamped advantage" if policy_gradient else "gets no gradient")
            + "; actor/distillation/clamped_share counts such tokens"
        )
    if per_token_clamp is not None:
        notes.append(
            f"a token's loss above {per_token_clamp:g} is scaled down to it, gradient included; "
            "actor/distillation/clamped_share counts such tokens"
        )
    composed = _compose(name, term, notes, distill_coef, task_coef, clip_low, clip_high, dual_clip, tis_cap)
    composed = _with_reference(composed, kl_coef, kl_kind) if kl_coef else composed
    return _with_given_answers(composed, sft_coef) if sft_coef else composed


def _describe_divergence(
    kind: str, signal: str, tail: str, topk: int | None, beta: float, alpha: float, mixture_weight: float
) -> tuple[str, str, list[str]]:
    parameter = {
        "jsd": f"(β = {beta:g})",
        "skew_forward_kl": f"(α = {alpha:g})",
        "skew_reverse_kl": f"(α = {alpha:g})",
        "mixture": f"(λ = {mixture_weight:g})",
    }.get(kind, "")
    support = SUPPORT_PHRASES[signal].format(k=topk if topk else "K")
    name = f"{kind}{' ' + parameter if parameter else ''} over {support}"
    notes = []
    if signal != "hidden":
        name += f", {TAIL_PHRASES[tail]}"
        if tail == "drop":
            notes.append(
                "without a tail the sum falls below zero when the student puts all its mass on the K ids"
            )
        if tail == "drop" and kind == "reverse_kl":
            notes.append(
                "the sum is 0 for a student that leaves the K ids, and students do: watch actor/distillation/student_mass, "
                "or set loss.tail = 'bucket'"
            )
        if tail == "renormalise":
            notes.append("mass outside the K ids is invisible to this loss")
    if kind == "jsd" and beta in (0.0, 1.0):
        notes.append(f"β = {beta:g} is {'forward' if beta == 0 else 'reverse'} KL")
    return name, DIVERGENCE_FORMULAS[kind], notes


def _describe_estimator(
    kind: str, signal: str, policy_gradient: bool, discount: float, loss_max_clamp: float | None
) -> tuple[str, str, list[str]]:
    def held(formula: str) -> str:
        return formula if loss_max_clamp is None else f"clamp({formula}, ±{loss_max_clamp:g})"

    notes = (
        []
        if signal == "sampled"
        else [f"only log p(y) of the {signal!r} signal is used; 'sampled' is cheaper"]
    )
    unclamped = "" if loss_max_clamp is None else ", but for clamped tokens"
    if not policy_gradient:
        notes.insert(0, ESTIMATOR_TRUTH[kind] + unclamped)
        return f"{kind}, differentiated through the student", held(ESTIMATOR_FORMULAS[kind]), notes
    if kind == "k1" and discount > 0:
        notes.insert(
            0,
            f"expected gradient: that of reverse KL(q‖p) over the tokens that follow, discounted{unclamped}",
        )
    elif kind == "k1":
        notes.insert(0, f"expected gradient: that of reverse KL(q‖p) at each position{unclamped}")
    else:
        notes.insert(0, f"advantage −sg({kind}) is biased: only k1 gives the gradient of reverse KL")
    value = held(ESTIMATOR_FORMULAS[kind.removesuffix("+")])
    advantage = f"A = −sg({value})"
    if discount > 0:
        advantage = f"A_t = −Σ_s≥t {discount:g}^(s−t)·sg({value})_s"
    return f"policy gradient with advantage −{kind.removesuffix('+')}", advantage, notes


def _refuse_divergence(
    kind: str, signal: str, tail: str, policy_gradient: bool, discount: float, topk: int | None
) -> None:
    if signal == "sampled":
        instead = (
            "k3 (gradient of forward KL, high variance)"
            if "forward" in kind
            else "k2 or k3+ (gradient of reverse KL)"
        )
        raise LossInputError(
            f"{kind} compares whole distributions, but signal = 'sampled' carries log p(y) of one token; "
            f"ask for 'topk', 'at_ids' or 'hidden', or choose {instead}."
        )
    if policy_gradient:
        raise LossInputError(
            f"{kind} as a policy-gradient advantage is refused: it has one value per position whatever token was written, "
            "and an advantage that does not depend on the action has zero expected gradient. "
            "Differentiate it (policy_gradient = false) or use k1."
        )
    if discount > 0:
        raise LossInputError(
            f"discount = {discount:g} belongs to a policy gradient; {kind} is differentiated directly."
        )
    if signal == "at_ids" and tail != "bucket":
        raise LossInputError(
            f"tail = {tail!r} on ids the student chose is refused: the student would lower the loss by choosing "
            "other ids. Use tail = 'bucket'."
        )
    if tail == "renormalise" and topk == 1 and signal != "hidden":
        raise LossInputError(
            "tail = 'renormalise' with K = 1 is identically zero; raise topk or use tail = 'bucket'."
        )


def _refuse_estimator(kind: str, asked: str, policy_gradient: bool, discount: float) -> None:
    if kind == "k1" and not policy_gradient:
        raise LossInputError(
            f"{asked} as a direct loss is refused: the gradient of r = log q(y) − log p(y) is ∇log q(y), which does not "
            "depend on the teacher and is zero in expectation. Set loss.policy_gradient = true (advantage −r), or use k2, "
            "whose gradient is that of reverse KL."
        )
    if discount > 0 and not policy_gradient:
        raise LossInputError(
            f"discount = {discount:g} belongs to a policy gradient; set loss.policy_gradient = true."
        )


def _policy_formula(
    advantage: str, clip_low: float, clip_high: float, dual_clip: float | None, tis_cap: float | None
) -> str:
    clipped = f"−min(ρ·A, clip(ρ, 1−{clip_low:g}, 1+{clip_high:g})·A)"
    if dual_clip is not None:
        clipped += f", at most {dual_clip:g}·|A| where A < 0"
    if tis_cap is None:
        return f"{clipped},  ρ = q(y)/q_anchor(y),  {advantage}"
    return f"min(q_old/q_behaviour, {tis_cap:g})·({clipped}),  ρ = q(y)/q_old(y),  {advantage}"


def _compose(
    name: str, term: str, notes: list[str], distill_coef: float, task_coef: float,
    clip_low: float, clip_high: float, dual_clip: float | None, tis_cap: float | None,
) -> ObjectiveDescription:  # fmt: skip
    parts, names = [], []
    if distill_coef > 0:
        names.append(name)
        parts.append(f"{distill_coef:g} · [{term}]")
    if task_coef > 0:
        task = _policy_formula("A from task rewards", clip_low, clip_high, dual_clip, tis_cap)
        names.append("clipped policy gradient on task rewards")
        parts.append(f"{task_coef:g} · [{task}]")
    return ObjectiveDescription(
        " + ".join(names), "L = Σ_t w_t · ( " + " + ".join(parts) + " )", tuple(notes)
    )


def _with_reference(objective: ObjectiveDescription, coef: float, kind: str) -> ObjectiveDescription:
    """The same objective plus a penalty: an estimate of KL to the reference, differentiated through the
    student."""
    resolved = ESTIMATOR_ALIASES.get(kind, kind)
    if coef < 0:
        raise LossInputError(f"kl_coef must not be negative; got {coef:g}.")
    if resolved not in ESTIMATOR_TRUTH:
        raise LossInputError(
            f"kl_kind = {kind!r} in the loss is refused: expected one of {', '.join(ESTIMATOR_TRUTH)} "
            "(k1, differentiated, has a gradient of zero in expectation; put it into the reward instead)."
        )
    formula = f"{objective.formula.removesuffix(' )')} + {coef:g} · [{ESTIMATOR_FORMULAS[resolved]}, p the reference] )"
    note = f"KL to the reference, {resolved}: {ESTIMATOR_TRUTH[resolved]}"
    return ObjectiveDescription(
        f"{objective.name} + {resolved} to the reference", formula, (*objective.notes, note)
    )


def _with_given_answers(objective: ObjectiveDescription, coef: float) -> ObjectiveDescription:
    term = f"{coef:g} · [−log q(y), y of a given answer] )"
    if not objective.name:
        return ObjectiveDescription(
            "cross-entropy of given answers", f"L = Σ_t w_t · ( {term}", objective.notes
        )
    return ObjectiveDescription(
        f"{objective.name} + cross-entropy of given answers",
        f"{objective.formula.removesuffix(' )')} + {term}",
        objective.notes,
    )


def _check_numbers(
    beta: float, alpha: float, mixture_weight: float, distill_coef: float, task_coef: float, sft_coef: float,
    clip_low: float, clip_high: float, dual_clip: float | None, tis_cap: float | None,
) -> None:  # fmt: skip
    _between("beta", beta, 0.0, 1.0)
    _between("mixture_weight", mixture_weight, 0.0, 1.0)
    if not 0 <= alpha < 1:
        raise LossInputError(
            f"alpha must be at least 0 and below 1 (1 compares a distribution with itself); got {alpha:g}."
        )
    if min(distill_coef, task_coef, sft_coef) < 0 or not distill_coef + task_coef + sft_coef > 0:
        raise LossInputError(
            f"distill_coef = {distill_coef:g}, task_coef = {task_coef:g} and sft_coef = {sft_coef:g}: none may be negative, one "
            "must be above 0."
        )
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise LossInputError(
            f"clip_low must lie in (0, 1] and clip_high above 0; got {clip_low:g} and {clip_high:g}."
        )
    if dual_clip is not None and not dual_clip > 1:
        raise LossInputError(f"dual_clip bounds the ratio from above and must exceed 1; got {dual_clip:g}.")
    if tis_cap is not None and not tis_cap > 0:
        raise LossInputError(f"tis_cap must be above 0; got {tis_cap:g}.")


def _candidate_clamp_notes(drops: bool, log_prob_min_clamp: float | None, clamp_at_zero: bool) -> list[str]:
    """Notes on verl's clamps of a sum over K candidates; `drops` says that the objective is one without a tail."""
    if clamp_at_zero and not drops:
        raise LossInputError(
            "clamp_at_zero changes nothing here: only a divergence over the teacher's K ids without a tail (signal = 'topk', "
            "tail = 'drop') can fall below zero. Set those, or leave clamp_at_zero out."
        )
    if log_prob_min_clamp is not None and not drops:
        raise LossInputError(
            "log_prob_min_clamp exists for parity with verl's forward_kl_topk only (a divergence with signal = 'topk', "
            "tail = 'drop'): it cuts the gradient exactly where the student is furthest from the teacher."
        )
    notes = []
    if log_prob_min_clamp is not None:
        notes.append(
            f"log p and log q below {log_prob_min_clamp:g} count as {log_prob_min_clamp:g}, and such q get no gradient (verl parity)"
        )
    if clamp_at_zero:
        notes.append("a token whose sum is below zero counts as 0 and gets no gradient (verl parity)")
    return notes


def _check_clamps(
    per_token_clamp: float | None, loss_max_clamp: float | None, log_prob_min_clamp: float | None
) -> None:
    for name, limit in (("per_token_clamp", per_token_clamp), ("loss_max_clamp", loss_max_clamp)):
        if limit is not None and not limit > 0:
            raise LossInputError(f"{name} must be above 0; got {limit:g}.")
    if per_token_clamp is not None and loss_max_clamp is not None:
        raise LossInputError(
            "per_token_clamp (scales a token's loss down, gradient included) and loss_max_clamp (verl's: clamps it) both bound "
            "the loss of a token; give one of them."
        )
    if log_prob_min_clamp is not None and not log_prob_min_clamp < 0:
        raise LossInputError(
            f"log_prob_min_clamp is a log-probability and must be below 0; got {log_prob_min_clamp:g}."
        )


def _check_more_numbers(discount: float, student_temperature: float, teacher_temperature: float) -> None:
    _between("discount", discount, 0.0, 1.0)
    if not (student_temperature > 0 and teacher_temperature > 0):
        raise LossInputError(
            f"temperatures must be above 0; got student {student_temperature:g}, teacher {teacher_temperature:g}."
        )


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise LossInputError(f"{name} must lie in [{low:g}, {high:g}]; got {value:g}.")


def _unknown(what: str, value: object, known: tuple[str, ...] | list[str]) -> str:
    near = get_close_matches(str(value), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}; expected one of {', '.join(known)}.{hint}"
