"""Converts rollouts and scores to columns of the data plane, and columns to a batch for training."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from understudy.config import LossConfig
from understudy.dataplane.frame import check_encodable
from understudy.errors import DataError, DataPlaneError
from understudy.types.batch import Batch
from understudy.types.batch_ref import STREAMS
from understudy.types.jagged import Jagged
from understudy.types.scores import TeacherScores
from understudy.types.trajectory import FEEDBACK, Origin, Trajectory

PARTITION = "train"
"""The data plane's partition of a run's rows."""
SCORED = "teacher"
"""The column with the teacher's name, which a row has once it has scores."""
REPLICA = "replica"
"""The column with the name of the teacher's replica that answered; empty for a mixture."""
VERSION = "teacher_version"
"""The column with the version of the teacher's weights; −1 if they are frozen, the newest for a mixture."""
CANDIDATES = "candidate_ids"
"""The column of the student's top ids, for teachers that score them."""
ORIGIN = "origin"
"""The column that says what wrote a row's tokens (`Origin`)."""
MEDIA = "media"
"""The column with the hashes of a row's pictures; only in runs whose student reads pictures."""
ALIGNED = "aligned"
"""The column with a row's tokens that are aligned one to one with its teacher's, in chains, and left out; only in
runs with a teacher of another tokenizer."""
SIZES = "sizes"
"""The column with a row's lengths and weight versions, for code that does not read the tokens."""
FACTS = (SIZES, ORIGIN, "reward", "stop_reason", "turns", "metrics")
"""Small columns, without per-token data, that the trainer uses for decisions and metrics."""


def own_prompt_column(teacher: str) -> str:
    """The column of the ids that a teacher read in place of the student's prompt."""
    return f"teacher_prompt_{teacher}"


def sizes_of(trajectory: Trajectory) -> dict[str, int]:
    """A row's `SIZES`. Versions are −1 if none of its tokens was generated."""
    versions = trajectory.weight_versions[trajectory.weight_versions >= 0]
    return {
        "tokens": len(trajectory.tokens),
        "loss": int(np.count_nonzero(trajectory.loss_mask)),
        "oldest": int(versions.min()) if len(versions) else -1,
        "newest": int(versions.max()) if len(versions) else -1,
    }


def rollout_columns(trajectory: Trajectory) -> dict[str, Any]:
    """The columns that a rollout writes, by name."""
    own: dict[str, Any] = {}
    if trajectory.candidate_ids is not None:
        own[CANDIDATES] = trajectory.candidate_ids
    if trajectory.media is not None:
        own[MEDIA] = list(trajectory.media)
    return own | {
        "tokens": trajectory.tokens.astype(np.int32, copy=False),  # a column has one dtype in all rows
        "loss_mask": trajectory.loss_mask,
        "behaviour_logprobs": trajectory.behaviour_logprobs,
        "weight_versions": trajectory.weight_versions.astype(np.int32, copy=False),
        SIZES: sizes_of(trajectory),
        ORIGIN: str(trajectory.origin),
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward,
        "turns": trajectory.turns,
        "metrics": dict(trajectory.metrics),
        FEEDBACK: str(trajectory.extra.get(FEEDBACK, "")),
    }


def score_columns(scores: TeacherScores) -> dict[str, Any]:
    """The columns that a teacher's scores add to a row, by name."""
    columns: dict[str, Any] = {
        SCORED: scores.teacher,
        REPLICA: scores.replica,
        VERSION: scores.version,
        "teacher_logprobs": scores.sampled_logprobs,
    }
    if scores.ids is not None:
        columns["teacher_ids"] = scores.ids
        columns["teacher_topk_logprobs"] = scores.logprobs
    if scores.hidden is not None:
        columns["teacher_hidden"] = scores.hidden
    if scores.aligned is not None:
        columns[ALIGNED] = list(scores.aligned)
    return columns


def with_finite_reward(trajectory: Trajectory) -> Trajectory:
    """The trajectory, or a `DataError` if its reward is NaN or infinite."""
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise DataError(
            f"row {trajectory.key} came with reward {trajectory.reward}; expected a finite number"
        )
    return trajectory


def storable(trajectory: Trajectory) -> Trajectory:
    """The trajectory, or a `DataError` if the data plane could not store its row. The put that it would share
    with other rows would fail as a whole. So would the metrics of its step, if one of its metrics were no number."""
    for name, value in trajectory.metrics.items():
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise DataError(
                f"row {trajectory.key} came with the metric {name!r} = {value!r}; expected a string and a number: leave out what is "
                "not known, and put everything else into `extra`"
            )
    try:
        for name, value in rollout_columns(with_finite_reward(trajectory)).items():
            check_encodable(name, value)
    except DataPlaneError as error:
        raise DataError(f"row {trajectory.key} cannot be stored: {error}") from None
    return trajectory


def fact_columns(scored: bool) -> tuple[str, ...]:
    return (*FACTS, SCORED) if scored else FACTS


def token_columns(loss: LossConfig, scored: bool, pictures: bool = False) -> tuple[str, ...]:
    """Columns that the model and the loss read: those with an entry per token, and the pictures."""
    read = (*STREAMS, MEDIA) if pictures else STREAMS
    if not scored:
        return read
    columns = (*read, "teacher_logprobs")
    if loss.signal in ("topk", "at_ids"):
        return (*columns, "teacher_ids", "teacher_topk_logprobs")
    return (*columns, "teacher_hidden") if loss.signal == "hidden" else columns


def training_columns(loss: LossConfig, scored: bool, pictures: bool = False) -> tuple[str, ...]:
    """The columns that a row must have to be trained on."""
    return (*token_columns(loss, scored, pictures), *fact_columns(scored))


def assemble(
    keys: Sequence[str], columns: Mapping[str, Any], hidden_dtype: torch.dtype = torch.bfloat16
) -> Batch:
    """Columns of the data plane as one batch. `hidden_dtype`: the precision of the teacher's head, for its
    hidden states."""
    ids, hidden = columns.get("teacher_ids"), columns.get("teacher_hidden")
    batch = Batch(
        keys=tuple(keys),
        tokens=_cast(columns["tokens"], torch.int64),
        loss_mask=columns["loss_mask"],
        behaviour_logprobs=columns["behaviour_logprobs"],
        rewards=rewards_of(columns),
        stop_reasons=tuple(columns.get("stop_reason", ())),
        teachers=tuple(columns.get(SCORED, ())),
        media=tuple(tuple(names) for names in columns.get(MEDIA, ())),
        origins=tuple(columns.get(ORIGIN, ())),
        teacher_logprobs=columns.get("teacher_logprobs"),
        teacher_ids=None if ids is None else _cast(ids, torch.int64),
        teacher_topk_logprobs=columns.get("teacher_topk_logprobs"),
    )
    if hidden is None:
        return batch
    # bfloat16 is stored as raw bits, because numpy has no bfloat16.
    states = Jagged(hidden.values.view(torch.bfloat16), hidden.offsets)
    return replace(batch, teacher_hidden=_cast(states, hidden_dtype))


def rewards_of(columns: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(float("nan") if reward is None else float(reward) for reward in columns.get("reward", ()))


def rollout_metrics(columns: Mapping[str, Any], given: bool = False) -> dict[str, float]:
    """Metrics of a step's rows from their `FACTS`, under verl's names where it has one. `given`: rows may be
    given answers. Those are counted, and all else is of the rows that the student wrote."""
    if not given:
        return _written_metrics(columns)
    rows = len(columns[ORIGIN])
    own = [row for row, origin in enumerate(columns[ORIGIN]) if origin == Origin.STUDENT]
    written = {name: [columns[name][row] for row in own] for name in FACTS}
    metrics = _written_metrics(written) if own else {}
    return metrics | {"rollout/rows": float(rows), "rollout/given": 1 - len(own) / rows}


def _written_metrics(columns: Mapping[str, Any]) -> dict[str, float]:
    sizes, stops = columns[SIZES], columns["stop_reason"]
    lengths = np.array([row["loss"] for row in sizes])
    metrics = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": sum(reason == "length" for reason in stops) / len(stops),
        "rollout/weight_version/min": float(
            min((row["oldest"] for row in sizes if row["oldest"] >= 0), default=0)
        ),
        "rollout/rows": float(len(stops)),
    }
    rewards = [reward for reward in columns["reward"] if reward is not None]
    if rewards:
        metrics["critic/score/mean"] = float(np.mean(rewards))
    turns = [int(count) for count in columns["turns"]]
    if max(turns) > 1:
        metrics |= {"num_turns/min": float(min(turns)), "num_turns/mean": float(np.mean(turns))}
        metrics["num_turns/max"] = float(max(turns))
    own = [dict(row) for row in columns["metrics"]]
    # Metrics from agent loops and rewards: tool calls, parts of a reward.
    for name in sorted({name for row in own for name in row}):
        metrics[f"rollout/{name}"] = float(np.mean([row[name] for row in own if name in row]))
    return metrics


def alignment_metrics(columns: Mapping[str, Any], teachers: Sequence[str]) -> dict[str, float]:
    """Shares of the tokens that were aligned with those of teachers with another tokenizer."""
    metrics = {}
    for teacher in teachers:
        mine = [row for row, name in enumerate(columns[SCORED]) if name == teacher]
        counts = np.array([columns[ALIGNED][row] for row in mine]).reshape(-1, 3).sum(0)
        if counts.any():
            for name, share in zip(
                ("one_to_one", "in_chains", "left_out"), counts / counts.sum(), strict=True
            ):
                metrics[f"teacher/{teacher}/{name}"] = float(share)
    return metrics


def _cast(column: Jagged, dtype: torch.dtype) -> Jagged:
    return Jagged(column.values.to(dtype), column.offsets)
