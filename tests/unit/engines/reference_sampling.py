"""An independent implementation of the sampling rule, in numpy, one row at a time and without a cache."""

from typing import Any

import numpy as np
import torch

from understudy.engines.base import GenerateRequest, Sampling


def distribution(logits: np.ndarray, sampling: Sampling, seen: set[int]) -> np.ndarray:
    """float64 [V]: probabilities after penalty, temperature, min-p, top-k and top-p."""
    logits = logits.astype(np.float64).copy()
    for token in seen:
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    logits /= sampling.temperature or 1.0
    if sampling.temperature == 0:
        return _softmax(logits)
    probabilities = _softmax(logits)
    keep = probabilities >= sampling.min_p * probabilities.max() * (1 - 1e-12)
    probabilities = np.where(keep, probabilities, 0) / probabilities[keep].sum()
    ranked = np.argsort(-probabilities, kind="stable")
    if sampling.top_k:
        probabilities[ranked[sampling.top_k :]] = 0
        probabilities /= probabilities.sum()
    total = 0.0
    for token in ranked:
        if total >= sampling.top_p:
            probabilities[token] = 0
        else:
            total += probabilities[token]
    return probabilities / probabilities.sum()


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def generate_plainly(model: Any, request: GenerateRequest) -> tuple[list[int], list[float]]:
    """One row, the whole sequence through the model for every token."""
    sampling = request.sampling
    randomness = np.random.default_rng(request.seed).random(sampling.max_new_tokens)
    ids = request.tokens.tolist()
    tokens: list[int] = []
    logprobs: list[float] = []
    for u in randomness:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float().numpy()
        probabilities = distribution(logits, sampling, set(ids))
        if sampling.temperature == 0:
            token = int(probabilities.argmax())
        else:
            cdf = np.cumsum(probabilities)
            token = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
        ids.append(token)
        tokens.append(token)
        logprobs.append(float(np.log(probabilities[token])))
        if token in sampling.stop_ids:
            break
    return tokens, logprobs
