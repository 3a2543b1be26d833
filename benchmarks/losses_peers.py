"""The peers of benchmarks/losses.py, each as a callable that returns a loss to back-propagate.

TRL and Liger are imported when their turn comes: a peer that is not installed is a missing row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from losses_problem import Problem, Run


def verl_topk(problem: Problem) -> Run:
    """verl's forward_kl_topk: whole logits, log-softmax in their dtype, gather, Σ p·(log p − log q)."""
    log_p = problem.inputs.teacher_logprobs_NK

    def run() -> Tensor:
        log_q = torch.log_softmax(problem.hidden @ problem.weight.t(), -1).gather(
            -1, problem.inputs.teacher_ids_NK
        )
        return (problem.inputs.weights_N * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()

    return run


def trl_chunked(problem: Problem, beta: float) -> Run:
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def run() -> Tensor:
        losses, _ = function.apply(
            problem.hidden, problem.weight, None, problem.teacher_hidden, problem.teacher_weight, None, beta
        )
        return (problem.inputs.weights_N * losses).sum()

    return run


def liger_jsd(problem: Problem, beta: float) -> Run:
    module = importlib.import_module("liger_kernel.transformers").LigerFusedLinearJSD(jsd_beta=beta)
    return lambda: module(problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight)


PEERS: dict[str, Callable[[Problem], Run]] = {
    "verl's top-k formula": verl_topk,
    "TRL chunked forward KL": lambda problem: trl_chunked(problem, 0.0),
    "TRL chunked JSD": lambda problem: trl_chunked(problem, 0.5),
    "Liger fused linear JSD": lambda problem: liger_jsd(problem, 0.5),
}
