"""Checks a scorer against the model's own forward, chooses its layout and compiles it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch

from understudy.errors import TeacherError
from understudy.nn.grouped_attention import ROUND
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.probe import is_uniform, probe_item
from understudy.teacher.scoring.scorer import Scorer
from understudy.types.scores import ScoreItem

log = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(scorer: Scorer) -> None:
    """Score a probe and check that the result equals the model's own forward and is not uniform.

    An architecture whose attention cannot be packed is detected here and scored padded from then on.
    """
    items = scorer.probe()
    theirs = scorer.expected()
    wanted = scorer.body.layout
    scorer.body.layout = ScoringLayout.PADDED
    _check_same(scorer, scorer.score(request_of(items)).sampled_P, theirs)
    if wanted is not ScoringLayout.PADDED:
        _try_packing(scorer, wanted, items, theirs)
    if is_uniform(theirs, scorer.vocab):
        raise TeacherError(
            f"teacher {scorer.name}: {scorer.frozen.path} gives every token the same probability (−ln V = "
            f"{-math.log(scorer.vocab):.4f}); its weights look empty or uninitialised"
        )
    if scorer.options.compile_layers:
        scorer.body.compile_layers()
        _check_same(scorer, scorer.score(request_of(items)).sampled_P, theirs, scorer.frozen.rounding)
        rehearse(scorer)


def rehearse(scorer: Scorer) -> None:
    """Score batches of several shapes now, so that no request waits for compilation.

    Long and short sequences, alone, in groups and with a common prefix.
    """
    rng = np.random.default_rng(0)
    most = scorer.options.max_batch_tokens
    large = [(most // 3, 3), (most // 6, 3), (most // 9, 3), (most // 256, 32), (most // 128, 32)]
    small = [(2 * ROUND, 4), (ROUND, 1), (ROUND // 2, 3), (ROUND // 2, 1)]
    for size, count in (*large, *small):
        length = max(2, min(size, scorer.frozen.max_length))
        rows = rng.integers(0, scorer.vocab, (count, length)).astype(np.int32)
        scorer.score(request_of([probe_item(f"rehearsal-{i}", row) for i, row in enumerate(rows)]))
        rows[:, : length // 2] = rows[0, : length // 2]
        scorer.score(request_of([probe_item(f"rehearsal-{i}", row) for i, row in enumerate(rows)]))


def _try_packing(
    scorer: Scorer, wanted: ScoringLayout, items: Sequence[ScoreItem], theirs: np.ndarray
) -> None:
    scorer.body.layout = ScoringLayout.PACKED
    try:
        _check_same(scorer, scorer.score(request_of(items)).sampled_P, theirs)
        scorer.check_windows(theirs)
    except (TeacherError, TypeError, ValueError, RuntimeError) as error:
        if wanted is ScoringLayout.PACKED:
            raise TeacherError(
                f"teacher {scorer.name}: {scorer.frozen.path} cannot be scored packed: {error}"
            ) from error
        log.warning("%s is scored padded, packing fails: %s", scorer.frozen.path, error)
        scorer.body.layout = ScoringLayout.PADDED
    else:
        scorer.body.layout = wanted


def _check_same(scorer: Scorer, ours: np.ndarray, theirs: np.ndarray, more: float = 0.0) -> None:
    """The tolerance grows with the logprob in half precision, where the model's own logits are
    rounded. `more` is added to it."""
    if not np.isfinite(theirs).all():
        raise TeacherError(
            f"teacher {scorer.name}: the log-probabilities of {scorer.frozen.path} are not finite in {scorer.frozen.dtype}: its weights hold NaN or "
            "infinity, or overflow; download or copy the model again, or set another dtype"
        )
    near = more + (1e-3 if scorer.frozen.dtype == "float32" else 0.25 + 0.02 * np.abs(theirs))
    if not (np.abs(ours - theirs) <= near).all():
        raise TeacherError(
            f"teacher {scorer.name}: scores of {scorer.frozen.path} differ from the model's own forward by "
            f"{np.abs(ours - theirs).max():.3g} nats: the native teacher does not know how this architecture computes its logits; serve the model with vLLM "
            "and name its server in teachers.NAME.urls"
        )
