"""Client of one native replica: sends items, returns scores that have passed every check."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

import msgspec

from understudy.errors import TeacherReplyError
from understudy.media.store import MediaStore
from understudy.serving.client import Reply
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.http import MediaMissing, RequestRefused, ScoringFailed, TeacherChannel
from understudy.teacher.clients.validate import Sender, check_candidates_usable, check_reply, check_usable
from understudy.teacher.head_frame import WireHead, decode_head
from understudy.teacher.manifest import Manifest
from understudy.teacher.protocol import (
    CONTENT_TYPE,
    ProtocolError,
    ScoreRequest,
    decode_reply,
    encode_request,
    request_of,
)
from understudy.teacher.scoring.probe import PROBE_HASH
from understudy.teacher.vocabulary import Vocabulary
from understudy.types.references import ScoreRef, ScoresRef, fetched
from understudy.types.scores import TeacherScores
from understudy.types.usable_ids import UsableIds

_MEDIA_ATTEMPTS = 3


class ScoringClient(Protocol):
    """The interface a pool uses for a replica of any kind: native, vLLM or an OpenAI-compatible server.

    Items are references. A client fetches what is not in this process before it sends the request.
    `score` raises TeacherReplyError (a wrong reply), TeacherUnavailable (no reply, or not served now; ReplicaTimeout:
    not in time), RequestRefused (4xx) or ScoringFailed (5xx).
    """

    async def score(self, items: Sequence[ScoreRef], timeout: float | None = None) -> Sequence[ScoresRef]: ...

    async def manifest(self) -> Manifest: ...

    async def health(self) -> bool: ...

    async def close(self) -> None: ...


class ReplicaClient:
    """Client of a native replica; caches its manifest. The pool calls it on its event loop."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        teacher: str = "",
        replica: str = "",
        usable: UsableIds | None = None,
        media: MediaStore | None = None,
    ) -> None:
        """`teacher`: its name in the recipe, which scores and manifest carry instead of the server's own.
        `usable`: the ids that its softmax may run over; None: all ids with a token in its vocabulary.
        `media`: the run's pictures, for a teacher that reads them."""
        self._channel = TeacherChannel(url, token, teacher, replica)
        self._usable = usable
        self._manifest: Manifest | None = None
        self._media = media
        self._pictures: dict[str, asyncio.Task[None]] = {}
        """By hash: pictures that this replica has, or that are on their way to it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def score(self, items: Sequence[ScoreRef], timeout: float | None = None) -> list[TeacherScores]:
        """Sends all items in one request; returns their scores in the same order."""
        if not items:
            return []
        items = await fetched(items)
        if self._manifest is None:
            await self.manifest()
        manifest = self._manifest
        assert manifest is not None
        usable = self._usable.within(manifest.vocab_size) if self._usable is not None else None
        request = request_of(items, usable if manifest.leaves_out_ids else None)
        if usable is not None:
            check_usable(items, usable, self._channel.name)
        answer = await self._ask(request, timeout)
        try:
            reply = decode_reply(answer.body)
        except ProtocolError as error:
            raise TeacherReplyError(f"{self._channel.name}, row {items[0].key!r} …: {error}") from error
        vocab = manifest.vocab_size if request.usable is None else request.usable.limit
        reply = replace(reply, teacher=self._channel.teacher or reply.teacher)
        sender = Sender(reply.teacher, self._channel.replica, vocab)
        check_reply(request, reply, sender)
        scores = reply.split()
        if usable is not None and not manifest.leaves_out_ids:
            check_candidates_usable(scores, usable, self._channel.name)
        return scores

    async def _ask(self, request: ScoreRequest, timeout: float | None) -> Reply:
        frame = encode_request(request)
        names = [name for own in request.media for name in own]
        for attempt in range(_MEDIA_ATTEMPTS):
            await self._send_pictures(names)
            try:
                return await self._channel.ask("/v1/score", frame, CONTENT_TYPE, timeout_s=timeout)
            except MediaMissing as error:  # the replica was restarted, or dropped a picture
                for name in names:
                    self._pictures.pop(name, None)
                if attempt + 1 == _MEDIA_ATTEMPTS:
                    raise ScoringFailed(str(error)) from error
        raise AssertionError("unreachable")

    async def _send_pictures(self, names: Sequence[str]) -> None:
        """Sends the pictures that this client has not sent yet and the replica does not have."""
        new = [name for name in dict.fromkeys(names) if name not in self._pictures and name != PROBE_HASH]
        if new:
            body = await self._channel.ask_json("/v1/media/missing", {"hashes": new})
            missing = set(json.loads(body)["missing"])
            for name in new:
                if name not in self._pictures:
                    self._pictures[name] = asyncio.create_task(self._send_picture(name, name in missing))
        for name in dict.fromkeys(names):
            task = self._pictures.get(name)
            if task is None:
                continue
            try:
                await asyncio.shield(task)
            except BaseException:
                if task.done():
                    self._pictures.pop(name, None)
                raise

    async def _send_picture(self, name: str, is_missing: bool) -> None:
        if not is_missing:
            return
        if self._media is None:
            raise RequestRefused(f"{self._channel.name}: the picture {name[:12]}… is not known here")
        data = await asyncio.to_thread(self._media.get, name)
        await self._channel.ask("/v1/media", data, "application/octet-stream")

    async def manifest(self) -> Manifest:
        body = await self._channel.get("/manifest")
        try:
            given = msgspec.json.decode(body, type=Manifest)
        except msgspec.DecodeError as error:
            raise TeacherReplyError(f"{self._channel.name}: unreadable manifest: {error}") from error
        self._manifest = msgspec.structs.replace(given, teacher=self._channel.teacher or given.teacher)
        return self._manifest.cut_to(self._usable)

    async def vocabulary(self) -> Vocabulary:
        try:
            answer = json.loads(await self._channel.get("/v1/vocabulary"))
            return Vocabulary(answer["ids"], answer["special"])
        except (ValueError, KeyError, TypeError) as error:
            raise TeacherReplyError(f"{self._channel.name}: unreadable vocabulary: {error}") from error

    async def head(self) -> WireHead:
        """The output projection, needed for `hidden` scores; fetch it once per teacher."""
        return decode_head(await self._channel.get("/v1/head"))

    async def metrics(self) -> str:
        return (await self._channel.get("/metrics")).decode()

    async def health(self) -> bool:
        return await self._channel.healthy()


Connect = Callable[[str, str, Endpoint], ScoringClient]
"""(teacher, replica, endpoint) → a client."""


def connect_native(
    teacher: str,
    replica: str,
    endpoint: Endpoint,
    usable: UsableIds | None = None,
    media: MediaStore | None = None,
) -> ScoringClient:
    return ReplicaClient(
        endpoint.url, endpoint.token, teacher=teacher, replica=replica, usable=usable, media=media
    )
