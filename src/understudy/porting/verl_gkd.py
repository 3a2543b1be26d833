"""The objective of verl's recipe `gkd`: a teacher's server sends its K best ids, and nothing else is trained on."""

from __future__ import annotations

from understudy.porting.recipe_draft import Draft

_LOSS = "actor_rollout_ref.actor.distill_loss"
_SERVERS = ("actor_rollout_ref.teacher.", "teacher.")
_TEACHER = "teachers.teacher"
_K = 256
"""`--n-logprobs` in the recipe's script that starts the server."""


def is_gkd(draft: Draft, program: str) -> bool:
    return "gkd" in program or any(key.startswith((*_SERVERS, f"{_LOSS}.")) for key in draft.given)


def gkd_objective(draft: Draft) -> None:
    name, beta = f"{_LOSS}.name", f"{_LOSS}.beta"
    kind = draft.get(name, "kl")
    draft.follow("loss.topk", _K, "the teacher's server sends 256 ids (--n-logprobs)")
    if kind == "kl":
        draft.put("loss.kind", "forward_kl", name)
        draft.follow("loss.tail", "drop", "kl drops the mass outside the K ids")
    elif kind == "rkl":
        draft.put("loss.kind", "reverse_kl", name)
        draft.put("loss.signal", "topk", name)
        draft.follow("loss.tail", "renormalise", "rkl divides both by their sum over the K ids")
    elif kind == "jsd":
        draft.put("loss.kind", "jsd", name)
        draft.put("loss.beta", float(draft.get(beta, 0.5)), beta)
    elif kind == "kl_rkl":
        ratio = f"{_LOSS}.rkl_ratio"
        draft.put("loss.kind", "mixture", name)
        draft.put("loss.mixture_weight", round(1.0 - float(draft.get(ratio, 0.1)), 6), ratio)
    else:
        draft.unsupported(name, "`understudy keys loss.kind` lists the kinds; forward_kl is the default")
    draft.not_needed(beta, "distill_loss.name is not jsd")
    draft.notes.append(
        f"the recipe gkd asks a server of its own for the teacher's scores: set {_TEACHER}.model to the checkpoint "
        "that it serves (--ckpt-path), and loss.topk to its --n-logprobs"
    )
    for key in draft.given:
        if key.startswith(_SERVERS):
            draft.not_needed(key, f"the run starts the teacher's replicas itself ({_TEACHER}.replicas)")
    draft.put(f"{_TEACHER}.dtype", "bfloat16", "actor_rollout_ref.rollout.dtype")
    draft.not_needed("algorithm.adv_estimator", "nothing is trained on rewards")
