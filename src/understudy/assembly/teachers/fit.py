"""Checks that a started teacher fits the recipe and the student."""

from __future__ import annotations

import logging

from understudy.assembly.teachers.student_facts import StudentFacts
from understudy.errors import TeacherError
from understudy.media.processor import PictureReader, patching_difference
from understudy.planning.resolved import TeacherSettings
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.manifest import Manifest, RequestBatching
from understudy.teacher.mixture import needed_signals
from understudy.teacher.pool.integrity import check_signals, check_vocabulary
from understudy.teacher.vocabulary import differences
from understudy.types.scores import Signal

logger = logging.getLogger(__name__)


async def check_fit(name: str, manifest: Manifest, settings: TeacherSettings, student: StudentFacts) -> None:
    """Raises if the teacher's manifest rules this run out. The vocabulary is checked by `check_tokens`."""
    signal = Signal(settings.signal)
    signals = [signal]
    if name in student.mixed:
        signals = list(dict.fromkeys([*signals, *needed_signals(signal)]))
    length = await _length(name, settings, student, manifest)
    check_signals(manifest, signals, settings.k, length, student.mixed.get(name, 1))
    check_patching(name, student.pictures, manifest)
    if settings.deterministic and manifest.batching is RequestBatching.BY_ARRIVAL:
        logger.warning(
            "teacher %s batches by arrival: its scores, and so this run, may differ in the last bits from time to time; "
            "serve it with --batching by_request for determinism = 'full'",
            name,
        )
    if manifest.quantization is not None:
        logger.info("teacher %s has weights in %s: %s", name, manifest.dtype, manifest.quantization)


async def _length(name: str, settings: TeacherSettings, student: StudentFacts, manifest: Manifest) -> int:
    """The length that a teacher must hold: prompt + response + 1. The student's prompts are measured only if
    the teacher's context is not longer than the longest rollout."""
    answer = settings.max_new_tokens + 1
    if settings.teachers[name].reads_own_prompt or name in student.aligned:
        measure = student.longest_own_prompt.get(name)
        return answer + (await measure() if measure else 0)
    holds_all = manifest.limits.max_length > student.context
    return answer + (0 if holds_all else await student.longest_prompt(name))


def check_patching(name: str, student: PictureReader | None, manifest: Manifest) -> None:
    """Raises if student and teacher cut the same picture into different tokens."""
    if student is None or manifest.pictures is None:
        return
    if differs := patching_difference(student.processor.patching, manifest.pictures.patching):
        raise TeacherError(
            f"teacher {name} cuts pictures into other tokens than the student ({differs}); ids are sent as they are, so save "
            "both models with the same preprocessor_config.json"
        )


async def check_tokens(
    name: str, model: str, manifest: Manifest, client: ReplicaClient, student: StudentFacts
) -> None:
    """Raises if a native teacher reads an id as another token than the student does; than the files of `model` say, if it
    has another tokenizer."""
    expected = student.vocabulary_of(name)
    if manifest.vocab_fingerprint == expected.fingerprint:
        return
    found = await client.vocabulary()
    if name not in student.aligned:
        check_vocabulary(expected, found, name, (student.head_rows, manifest.vocab_size))
    elif differing := differences(expected, found, (None, manifest.vocab_size)):
        number, (token, served) = next(iter(differing.items()))
        raise TeacherError(
            f"teachers.{name}.model = {model!r} has other tokens than its server: id {number} is {token!r} in its tokenizer and {served!r} "
            "at the server. Completions are tokenized by the files of `model`; name the model that is served"
        )


def warn_of_unseen(name: str, manifest: Manifest) -> None:
    """Names what cannot be compared, because another project's server does not show it."""
    logger.warning(
        "teacher %s is served by %s: it shows neither its token→id map nor its weights, so these were not compared (only the files of "
        "its model, where they can be read here); "
        "its signals (%s), largest K (%d), context (%d) and scores of the fixed tokens were",
        name,
        manifest.backend,
        ", ".join(manifest.signals),
        manifest.limits.max_k,
        manifest.limits.max_length,
    )
