"""The peers of benchmarks/losses/losses.py, each as a callable that returns a loss to back-propagate.

TRL and Liger are imported when they are measured: a peer that is not installed is a missing row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from losses_problem import Problem, Run


def verl_topk(problem: Problem, diagnostics: bool = False) -> Run:
    """verl's forward_kl_topk: whole logits, log-softmax in their dtype, gather, Σ p·(log p − log q); with
    `diagnostics` also the metrics it reports beside each loss: masses and the overlap with the student's own
    top-k."""
    log_p, ids = problem.inputs.teacher_logprobs_NK, problem.inputs.teacher_ids_NK
    assert log_p is not None and ids is not None

    def run() -> Tensor:
        log_q_all = torch.log_softmax(problem.hidden @ problem.weight.t(), -1)
        log_q = log_q_all.gather(-1, ids)
        terms = log_p.exp() * (log_p - log_q)
        if diagnostics:
            with torch.no_grad():
                best = log_q_all.topk(ids.shape[1]).indices
                overlap = (ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1)
                (log_q.exp().sum(-1), log_p.exp().sum(-1), overlap.sum(-1), (-terms * overlap).sum(-1))
        return (problem.inputs.weights_N * terms.sum(-1)).sum()

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
    return lambda: module(
        problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight, None
    )


PEERS: dict[str, Callable[[Problem], Run]] = {
    "verl's top-k formula": verl_topk,
    "verl's top-k, diagnostics": lambda problem: verl_topk(problem, diagnostics=True),
    "TRL chunked forward KL": lambda problem: trl_chunked(problem, 0.0),
    "TRL chunked JSD": lambda problem: trl_chunked(problem, 0.5),
    "Liger fused linear JSD": lambda problem: liger_jsd(problem, 0.5),
}
