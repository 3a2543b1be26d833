"""Finds the token ids that a run may use, once at its start, for all its models.

    tokenizer files of student, teachers, critic, reference ─┐
    /v1/vocabulary of external native teachers ──────────────┴─> UsableIds ─> Sampling, policy, clients

They are stored in `usable_ids.json` in the run directory for ranks and for a replay.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils import cached_file

from understudy.config import TeacherConfig
from understudy.errors import ConfigError, TeacherError
from understudy.observability.rundir import RunDir, read_json, write_atomically
from understudy.planning.models.aligned import aligned_sides
from understudy.planning.models.folder import ModelFolder
from understudy.planning.models.hub_files import may_ask_hub
from understudy.planning.models.pairs import Side, pair_notes, pair_problems, usable_ids
from understudy.planning.resolved import ModelSource
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.scoring.model import vocabulary_of
from understudy.trainers.models import LoadedModel
from understudy.types.usable_ids import UsableIds

_ASK_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """What the vocabularies of a run's models have in common."""

    usable: UsableIds | None
    """The ids that the student and all other models have a token for, less the aligned teachers. None if the
    student's vocabulary is unknown."""
    aligned: Mapping[str, Side] = field(default_factory=dict)
    """By name: teachers with another tokenizer (`vocabulary = "align"`)."""


async def find_usable_ids(
    source: ModelSource,
    student: LoadedModel,
    teachers: Mapping[str, TeacherConfig],
    beside: Mapping[str, str],
    tokens: Mapping[str, str | None],
    note: Callable[[str], None],
) -> Vocabularies:
    """Compares the vocabularies of a run's models.

    `ConfigError` if two models read one id as different tokens. `source`: the student's files. `beside`: the
    models of critic and reference, if they are not the student's. `tokens`: the bearer token of each external
    teacher."""
    own = Side(
        "student",
        vocabulary_of(source.model, source.revision),
        student.model.get_output_embeddings().weight.shape[0],
        student.stop_ids,
        _template(student),
    )
    others = await asyncio.gather(
        *(_teacher(name, one, tokens.get(name)) for name, one in teachers.items()),
        *(asyncio.to_thread(_beside, role, model, None) for role, model in beside.items()),
    )
    known = [side for side in others if side is not None]
    aligned = aligned_sides(teachers, own, known)
    known = [side for side in known if side not in aligned.values()]
    if problems := [problem for side in known for problem in pair_problems(own, side)]:
        raise ConfigError(problems)
    for side in known:
        for message in pair_notes(own, side):
            note(message)
    usable = usable_ids(own, known) if own.tokens else None
    if student.pictures is not None:
        placeholders = student.pictures.processor.placeholder_ids
        usable = (usable or UsableIds(own.rows or 1 << 31)).without(placeholders)
    return Vocabularies(usable, aligned)


def _template(student: LoadedModel) -> str | None:
    template = student.tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


async def _teacher(name: str, teacher: TeacherConfig, token: str | None) -> Side | None:
    """What is known of a teacher before it runs: from an external native server, or from the files of its
    model. Completions are aligned by those files, so there a server is compared with them (`check_tokens`)."""
    place, aligned = f"teachers.{name}", teacher.vocabulary == "align"
    if teacher.placement == "external" and teacher.backend in ("auto", "native") and not aligned:
        url = teacher.urls[0].rstrip("/").removesuffix("/v1")
        try:
            async with asyncio.timeout(_ASK_SECONDS), ReplicaClient(url, token, teacher=name) as client:
                manifest = await client.manifest()
                return Side(place, await client.vocabulary(), manifest.vocab_size)
        except (TeacherError, TimeoutError):
            pass  # a server of another kind, or unreachable, which the pool reports when it starts
    return await asyncio.to_thread(_beside, place, teacher.model, teacher.revision)


def _beside(place: str, model: str, revision: str | None) -> Side | None:
    """A model's `Side` from its files. None if they are not on this machine, as for an external server's
    model."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            found = cached_file(
                model,
                "config.json",
                revision=revision,
                local_files_only=not may_ask_hub(),
                _raise_exceptions_for_missing_entries=False,
            )
        except (OSError, ValueError):
            return None
        if found is None:
            return None
        folder = Path(found).parent
    try:
        return Side.of(ModelFolder(folder), place)
    except TeacherError:
        pass
    try:  # no tokenizer.json: transformers builds the map
        return Side(place, vocabulary_of(model, revision), ModelFolder(folder).vocab_size)
    except (TeacherError, OSError, ValueError, KeyError):
        return None


def keep_usable_ids(run: RunDir, usable: UsableIds | None) -> None:
    path = run.path / "usable_ids.json"
    if usable is None:
        path.unlink(missing_ok=True)
    else:
        stored = {
            "limit": usable.limit,
            "holes": list(usable.holes),
            "placeholders": list(usable.placeholders),
        }
        write_atomically(path, json.dumps(stored) + "\n")


def kept_usable_ids(run: RunDir) -> UsableIds | None:
    path = run.path / "usable_ids.json"
    if not path.is_file():
        return None
    found = read_json(path)
    holes, placeholders = (
        tuple(int(one) for one in found.get(name, ())) for name in ("holes", "placeholders")
    )
    return UsableIds(int(found["limit"]), holes, placeholders)
