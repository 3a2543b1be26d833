"""Start-up checks of a teacher: not empty, replicas agree, vocabulary shared with the student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from understudy.errors import TeacherError
from understudy.teacher.clients.http import RequestRefused
from understudy.teacher.clients.native import ScoringClient
from understudy.teacher.manifest import Manifest
from understudy.teacher.scoring.probe import ProbePicture, is_uniform, probe_items
from understudy.teacher.vocabulary import Vocabulary, describe_differences, differences
from understudy.types.references import ScoreRef
from understudy.types.scores import Signal

TOLERANCE = {"float32": 1e-4}
"""Nats between replicas on the fixed tokens. Half precision varies with kernels and is allowed more."""
HALF_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Identity:
    """What a replica must match whenever it is admitted again."""

    manifest: Manifest
    probe_logprobs: np.ndarray
    """float32: scores of the fixed tokens."""


def probe_picture_of(manifest: Manifest) -> ProbePicture | None:
    """The picture that goes with the fixed tokens, for a teacher that reads pictures."""
    facts = manifest.pictures
    if facts is None:
        return None
    ids = facts.probe_ids or [facts.image_token_id] * facts.probe_tokens
    return ProbePicture(facts.image_token_id, ids)


async def identify(client: ScoringClient, timeout: float | None = None) -> Identity:
    """Fetch a replica's manifest and its scores of the fixed tokens. Refuses an empty (uniform) model."""
    manifest = await client.manifest()
    scores = await client.score(
        probe_items(
            manifest.vocab_size, manifest.limits.max_length, manifest.unused_ids, probe_picture_of(manifest)
        ),
        timeout,
    )
    logprobs = (await scores[0].fetch()).sampled_logprobs
    if is_uniform(logprobs, manifest.vocab_size):
        raise TeacherError(
            f"teacher {manifest.teacher}: every token gets the same probability (−ln V); its weights look lost"
        )
    return Identity(manifest, np.array(logprobs))


def check_same(expected: Identity, found: Identity, replica: str) -> None:
    """Raise unless `found` is the same teacher as `expected`."""
    teacher = expected.manifest.teacher
    names = (
        "backend",
        "weights",
        "vocabulary",
        "vocabulary size",
        "dtype",
        "version of the weights",
        "processor of pictures",
    )
    for name, ours, theirs in zip(names, expected.manifest.identity, found.manifest.identity, strict=True):
        if ours != theirs:
            raise TeacherError(
                f"teacher {teacher}, replica {replica}: {name} is {theirs}; the other replicas have {ours}. "
                "All replicas of a teacher must serve the same model"
            )
    _check_limits(expected.manifest, found.manifest, replica)
    allowed = TOLERANCE.get(expected.manifest.dtype, HALF_TOLERANCE)
    apart = float(np.abs(expected.probe_logprobs - found.probe_logprobs).max())
    if not apart <= allowed:
        raise TeacherError(
            f"teacher {teacher}, replica {replica}: scores of the fixed tokens differ by {apart:.3g} nats from the "
            f"other replicas' (at most {allowed} is allowed)"
        )


def _check_limits(ours: Manifest, theirs: Manifest, replica: str) -> None:
    """A row that the other replicas take must not be lost because this one was idle."""
    place = f"teacher {ours.teacher}, replica {replica}"
    if theirs.limits.max_length < ours.limits.max_length:
        raise TeacherError(
            f"{place}: a sequence may have {theirs.limits.max_length} tokens; the other replicas take {ours.limits.max_length}. "
            "Start all of its servers with the same --max-length (vLLM: --max-model-len, SGLang: --context-length)"
        )
    if theirs.limits.max_k < ours.limits.max_k:
        raise TeacherError(
            f"{place}: gives at most {theirs.limits.max_k} candidates; the other replicas give {ours.limits.max_k}. "
            "Start all of its servers with the same --max-k (vLLM: --max-logprobs)"
        )


def check_signals(manifest: Manifest, signals: Sequence[Signal], k: int, length: int, mixed: int = 1) -> None:
    """Raise before the run if a teacher does not support a signal, a K, or a context of `length` tokens. `mixed`: the
    most teachers of a mixture that it is part of."""
    problems = []
    missing = [signal.value for signal in signals if signal not in manifest.signals]
    if missing:
        offered = ", ".join(signal.value for signal in manifest.signals)
        problems.append(f"cannot give {', '.join(missing)}; its {manifest.backend} backend offers {offered}")
    if k > manifest.limits.max_k and Signal.TOPK in manifest.signals:
        problems.append(f"gives at most {manifest.limits.max_k} candidates; the loss asks for {k}")
    elif Signal.TOPK in signals and (mixed - 1) * k > manifest.limits.max_k:
        problems.append(
            f"gives at most {manifest.limits.max_k} candidates; in a mixture of {mixed} teachers it is asked at the "
            f"{mixed - 1} · {k} of the others: set loss.topk to at most {manifest.limits.max_k // (mixed - 1)}, or mix fewer teachers"
        )
    if length > manifest.limits.max_length:
        problems.append(
            f"holds {manifest.limits.max_length} tokens; prompt + response + 1 needs {length}: "
            "shorten them, or serve a model with a longer context"
        )
    if problems:
        raise TeacherError(f"teacher {manifest.teacher}: " + "; and ".join(problems))


def check_row(manifest: Manifest, row: ScoreRef) -> None:
    """Raise for a row that every replica of this teacher would refuse, so that the rest of its request is not
    lost. Of a remote row only the length is known; its replica checks the ids."""
    what = f"teacher {manifest.teacher}: row {row.key!r}"
    if row.length > manifest.limits.max_length:
        raise RequestRefused(
            f"{what} has {row.length} tokens; a sequence may have {manifest.limits.max_length}"
        )
    item = row.here
    if item is None:
        return
    if item.media and manifest.pictures is None:
        raise RequestRefused(
            f"{what} holds {len(item.media)} picture(s), and this teacher reads text only; route rows with pictures to a "
            "vision-language teacher"
        )
    outside = (item.tokens < 0) | (item.tokens >= manifest.vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise RequestRefused(
            f"{what}: token id {item.tokens[at]} at position {at} is outside this teacher's vocabulary of {manifest.vocab_size}"
        )
    if item.ids is not None and ((item.ids < 0) | (item.ids >= manifest.vocab_size)).any():
        named = item.ids[(item.ids < 0) | (item.ids >= manifest.vocab_size)][0]
        raise RequestRefused(
            f"{what}: id {named} named for 'at_ids' is outside this teacher's vocabulary of {manifest.vocab_size}"
        )


def check_vocabulary(
    student: Vocabulary,
    teacher: Vocabulary,
    name: str,
    rows: tuple[int | None, int | None] = (None, None),
) -> None:
    """Each id that both have (`rows`: in their heads) must be the same token for both.

    Special ids and the number of tokens may differ.
    """
    if differing := differences(student, teacher, rows):
        raise TeacherError(
            f"teacher {name} and the student do not share a vocabulary: {describe_differences(differing)}. "
            "Token ids are sent as they are, so an id must be the same token for both: use a teacher of the student's family, or set "
            f"teachers.{name}.vocabulary = 'align'"
        )


def check_manifest_unchanged(stored: Manifest, found: Manifest) -> None:
    """On resume: raise unless the teacher is the one the run began with."""
    # Without the number of ids: weights and tokenizer determine it, earlier versions counted padding rows.
    if _but_the_size(stored) != _but_the_size(found):
        raise TeacherError(
            f"teacher {stored.teacher} changed since this run began: {stored.model} ({stored.dtype}, weights "
            f"{stored.weights_sha256[:12]}) then, {found.model} ({found.dtype}, weights {found.weights_sha256[:12]}) now; "
            "resume with the same teacher, or start a new run"
        )


def _but_the_size(manifest: Manifest) -> tuple[object, ...]:
    return (manifest.backend, manifest.weights_sha256, manifest.vocab_fingerprint, manifest.dtype)


def check_scores_unchanged(manifest: Manifest, stored: Sequence[float], found: Sequence[float]) -> None:
    """On resume: raise if the scores of the fixed tokens changed.

    For servers that do not show their weights this is the only check.
    """
    if len(stored) != len(found):
        return
    apart = float(np.abs(np.array(stored) - np.array(found)).max(initial=0.0))
    allowed = TOLERANCE.get(manifest.dtype, HALF_TOLERANCE)
    if not apart <= allowed:
        raise TeacherError(
            f"teacher {manifest.teacher} changed since this run began: its scores of the fixed tokens moved by {apart:.3g} "
            f"nats (at most {allowed} is allowed); resume with the same teacher, or start a new run"
        )
