"""Finds out which kind of teacher server answers at an address, and makes the client for it.

A native replica answers /manifest. Any other server is treated as vLLM, SGLang or OpenAI-compatible, and is probed
for what it supports.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from understudy.media.processor import PictureReader
from understudy.media.store import MediaStore
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.completions import CompletionsClient, Route
from understudy.teacher.clients.http import NoSuchRoute
from understudy.teacher.clients.native import Connect, ReplicaClient, ScoringClient
from understudy.teacher.manifest import Manifest, RequestBatching
from understudy.types.references import ScoreRef, ScoresRef
from understudy.types.usable_ids import UsableIds


class Backend(StrEnum):
    """The kind of server at an address."""

    AUTO = "auto"
    NATIVE = "native"
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"


class DiscoveringClient:
    """Chooses between the native and the completions client at the first call."""

    def __init__(self, native: ReplicaClient, completions: CompletionsClient) -> None:
        self._native = native
        self._completions = completions
        self._chosen: ScoringClient | None = None

    async def _client(self) -> ScoringClient:
        if self._chosen is None:
            try:
                await self._native.manifest()
            except NoSuchRoute:
                self._chosen = self._completions
            else:
                self._chosen = self._native
        return self._chosen

    async def score(self, items: Sequence[ScoreRef], timeout: float | None = None) -> Sequence[ScoresRef]:
        return await (await self._client()).score(items, timeout)

    async def manifest(self) -> Manifest:
        return await (await self._client()).manifest()

    async def health(self) -> bool:
        return await self._native.health()

    async def close(self) -> None:
        await self._native.close()
        await self._completions.close()


_ROUTES = {
    Backend.AUTO: tuple(Route),
    Backend.VLLM: (Route.GENERATE, Route.PROMPT_LOGPROBS),
    Backend.SGLANG: (Route.RETURN_LOGPROB,),
    Backend.OPENAI: (Route.ECHO,),
}


def connect_external(
    vocab_size: int,
    vocab_fingerprint: str = "",
    model: str | None = None,
    backend: Backend = Backend.AUTO,
    *,
    usable: UsableIds | None = None,
    k: int = 0,
    media: MediaStore | None = None,
    batching: RequestBatching = RequestBatching.BY_ARRIVAL,
    pictures: PictureReader | None = None,
    aligned: bool = False,
) -> Connect:
    """For `TeacherPool(connect=…)`: servers of any known kind. Vocabulary and model name are the recipe's.

    `k` is the recipe's K, `usable` the ids it uses. With an explicit `backend` nothing is probed for its
    kind: needed behind a gateway that answers every path alike. `batching`: assumed of servers that do not report how they batch.
    `media`: the run's pictures; `pictures`: how the student reads them. `aligned`: the teacher has another tokenizer.
    """

    def connect(teacher: str, replica: str, endpoint: Endpoint) -> ScoringClient:
        # Users often give the base URL of an OpenAI client, which ends in /v1.
        url = endpoint.url.rstrip("/").removesuffix("/v1")
        native = ReplicaClient(
            url, endpoint.token, teacher=teacher, replica=replica, usable=usable, media=media
        )
        if backend is Backend.NATIVE:
            return native
        completions = CompletionsClient(
            url,
            endpoint.token,
            teacher=teacher,
            replica=replica,
            model=model,
            vocab_size=vocab_size,
            vocab_fingerprint=vocab_fingerprint,
            routes=_ROUTES[backend],
            usable=usable,
            k=k,
            socket=endpoint.socket,
            batching=batching,
            pictures=pictures,
            aligned=aligned,
        )
        return DiscoveringClient(native, completions) if backend is Backend.AUTO else completions

    return connect


class ExternalServer(msgspec.Struct, frozen=True):
    """What a client needs to connect to a teacher server of another project. The trainer sends it to workers that
    ask the server themselves."""

    vocab_size: int
    vocab_fingerprint: str
    model: str
    backend: str
    k: int = 0
    """The recipe's K, tried first when the client probes how many logprobs the server returns."""
    batching: RequestBatching = RequestBatching.BY_ARRIVAL
    aligned: bool = False
    """The teacher has another tokenizer."""

    def connect(
        self,
        usable: UsableIds | None,
        media: MediaStore | None = None,
        pictures: PictureReader | None = None,
    ) -> Connect:
        return connect_external(
            self.vocab_size,
            self.vocab_fingerprint,
            self.model,
            Backend(self.backend),
            usable=usable,
            k=self.k,
            media=media,
            batching=self.batching,
            pictures=pictures,
            aligned=self.aligned,
        )
