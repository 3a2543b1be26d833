"""Chooses the client of a teacher's replicas, and finds the bearer tokens of its servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

import msgspec

from understudy.assembly.teachers.student_facts import StudentFacts
from understudy.config import TeacherConfig
from understudy.errors import ConfigError
from understudy.teacher.clients.discover import ExternalServer
from understudy.teacher.clients.native import Connect, connect_native
from understudy.teacher.manifest import RequestBatching
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.types.usable_ids import UsableIds


def connect_of(
    name: str,
    teacher: TeacherConfig,
    student: StudentFacts,
    topk: int,
    batching: RequestBatching,
    remote: RemoteScoring | None,
) -> Connect:
    """What makes the pool's client of a replica. With `remote`, workers send the requests for remote rows."""
    usable = None if name in student.aligned else student.usable
    server: ExternalServer | None = None
    connect: Connect = partial(connect_native, usable=usable, media=student.media)
    if teacher.placement == "external" or teacher.starts_vllm:
        server = _server(name, teacher, student, usable, topk, batching)
        # A teacher with another tokenizer has other placeholder ids for pictures.
        pictures = None if name in student.aligned else student.pictures
        connect = server.connect(usable, student.media, pictures)
    return connect if remote is None else remote.connect(connect, server, usable)


def _server(
    name: str,
    teacher: TeacherConfig,
    student: StudentFacts,
    usable: UsableIds | None,
    topk: int,
    batching: RequestBatching,
) -> ExternalServer:
    vocabulary = student.vocabulary_of(name)
    ids = student.head_rows if usable is None else min(usable.limit, student.head_rows)
    if name in student.aligned:
        ids = max(vocabulary.ids.values()) + 1
    server = ExternalServer(
        ids,
        vocabulary.fingerprint,
        teacher.model,
        teacher.backend,
        topk,
        aligned=name in student.aligned,
    )
    if teacher.starts_vllm:  # it serves the teacher's name, and one sequence at a time if asked to
        server = msgspec.structs.replace(server, model=name, batching=batching)
    return server


def teacher_tokens(teachers: Mapping[str, TeacherConfig]) -> dict[str, str | None]:
    """The bearer token of each external teacher's servers."""
    external = {name: one for name, one in teachers.items() if one.placement == "external"}
    return {name: token_of(name, one) for name, one in external.items()}


def token_of(name: str, teacher: TeacherConfig) -> str | None:
    token = os.environ.get(teacher.token_env) if teacher.token_env else None
    if teacher.token_env and not token:
        raise ConfigError(
            f"teachers.{name}.token_env = {teacher.token_env!r}: that environment variable is empty; export the token"
        )
    return token
