"""Client for teachers on a third-party server: vLLM, SGLang, or any OpenAI-compatible completion server.

Token ids go in, prompt logprobs come out; nothing is detokenised on our side. At start the client probes what
the server supports and keeps the server's error for what it does not (`Capabilities.missing`).

    vLLM      POST /inference/v1/generate, or /v1/completions where that is missing, with `prompt_logprobs`
    SGLang    POST /generate with `return_logprob`, from the token before the first scored one on
    OpenAI    POST /v1/completions with `echo` and `logprobs`; candidates need their ids ("token_id:17")

Rows with pictures go to vLLM's first route, as ids with one placeholder per picture and the pictures beside them. vLLM
expands the placeholders, and the ids that it read are compared with the row's.

Legend: P scored positions of one sequence, K candidates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from understudy.errors import TeacherError, TeacherReplyError
from understudy.media.for_vllm import vllm_parts
from understudy.media.processor import PictureReader
from understudy.teacher.clients.http import NotServing, RequestRefused, ScoringFailed, TeacherChannel
from understudy.teacher.clients.prompt_logprobs import (
    Candidates,
    OtherTokens,
    first_of,
    from_echo,
    from_prompt_logprobs,
    from_return_logprob,
)
from understudy.teacher.clients.validate import Sender, check_candidates_usable, check_reply, check_usable
from understudy.teacher.manifest import Limits, Manifest, RequestBatching, picture_facts
from understudy.teacher.pool.gather import gather_or_cancel
from understudy.teacher.protocol import ScoreReply, request_of
from understudy.teacher.scoring.probe import PROBE_HASH, PROBE_PICTURE, ProbePicture, probe_items
from understudy.types.references import ScoreRef, fetched
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

MANY_K = (1024, 512, 256, 128, 64, 32, 20, 16, 10, 8, 5, 4, 2, 1)
"""Candidate counts tried at start, largest first, if the recipe's own K is refused or not known."""


class Route(StrEnum):
    GENERATE = "/inference/v1/generate"
    """vLLM, tokens in and tokens out, no detokenising."""
    PROMPT_LOGPROBS = "/v1/completions (prompt_logprobs)"
    """vLLM's extension of the completion API."""
    RETURN_LOGPROB = "/generate (return_logprob)"
    """SGLang's own route."""
    ECHO = "/v1/completions (echo, logprobs)"
    """The completion API as OpenAI published it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the probes found that a server supports."""

    route: Route | None
    max_k: int
    missing: Mapping[str, str]
    """What does not work → the server's error."""
    pictures: bool = False

    @property
    def signals(self) -> list[Signal]:
        if self.route is None:
            return []
        return [Signal.SAMPLED, Signal.TOPK] if self.max_k else [Signal.SAMPLED]


class _Served(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None

    def answers_to(self, name: str) -> bool:
        """Matches the served name, or the model it was loaded from, in any folder."""
        return name in (self.id, self.root) or (
            self.root is not None and PurePath(name).name == PurePath(self.root).name
        )


class _Models(msgspec.Struct):
    data: list[_Served]


class CompletionsClient:
    """Scores through prompt logprobs; called by the pool on its event loop.

    The vocabulary is the student's: such servers do not report theirs.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        teacher: str = "",
        replica: str = "",
        model: str | None = None,
        vocab_size: int,
        vocab_fingerprint: str = "",
        routes: Sequence[Route] = tuple(Route),
        in_flight: int = 16,
        usable: UsableIds | None = None,
        k: int = 0,
        socket: str | None = None,
        batching: RequestBatching = RequestBatching.BY_ARRIVAL,
        pictures: PictureReader | None = None,
        aligned: bool = False,
    ) -> None:
        """`k`: the recipe's K, probed first; `usable`: the ids that candidates may have. `batching`: by request if
        the server is known to compute one sequence at a time. `pictures`: the student's, if it reads any. `aligned`:
        the teacher has another tokenizer, and a candidate may be any row of its head."""
        self._channel = TeacherChannel(url, token, teacher, replica, socket=socket)
        self._batching = batching
        self._model = model
        self._vocab_size = vocab_size
        self._vocab_fingerprint = vocab_fingerprint
        self._routes = tuple(routes)
        self._slots = asyncio.Semaphore(in_flight)
        self._usable, self._k, self._pictures = usable, k, pictures
        self._candidate_limit = 0 if aligned or usable is not None else vocab_size
        self._hidden = pictures.processor.placeholder_ids if pictures is not None else ()
        self._unused = sorted({*self._hidden, *(usable.holes if usable is not None else ())})
        self._capabilities: Capabilities | None = None

    async def close(self) -> None:
        await self._channel.close()

    async def health(self) -> bool:
        return await self._channel.healthy()

    async def manifest(self) -> Manifest:
        served = await self._served()
        found = await self.capabilities()
        return Manifest(
            teacher=self._channel.teacher,
            backend=_BACKENDS.get(found.route, "vllm"),
            model=served.root or served.id,
            weights_sha256="",
            vocab_fingerprint=self._vocab_fingerprint,
            vocab_size=self._vocab_size,
            hidden_size=0,
            dtype="unknown",
            signals=found.signals,
            limits=Limits(max_length=served.max_model_len or Limits().max_length, max_k=found.max_k),
            batching=self._batching,
            unused_ids=self._unused,
            pictures=picture_facts(self._pictures) if self._pictures is not None and found.pictures else None,
        )

    async def _served(self) -> _Served:
        try:
            models = msgspec.json.decode(await self._channel.get("/v1/models"), type=_Models).data
        except msgspec.DecodeError as error:
            raise TeacherReplyError(f"{self._channel.name}: unreadable /v1/models: {error}") from error
        named = [served for served in models if self._model is None or served.answers_to(self._model)]
        if not named:
            offered = ", ".join(served.id for served in models) or "none"
            raise TeacherError(
                f"{self._channel.name}: serves no model {self._model!r}; it serves {offered}. Set `model` to one of these"
            )
        self._model = named[0].id
        return named[0]

    async def capabilities(self) -> Capabilities:
        """Probe each route once and cache the result.

        Raises if the server gives no prompt logprobs at all.
        """
        if self._capabilities is None:
            if self._model is None:
                await self._served()
            self._capabilities = await self._find_out()
        if self._capabilities.route is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._capabilities.missing.items())
            raise TeacherError(
                f"{self._channel.name}: this server gives no prompt logprobs for token ids, so it cannot be a teacher ({reasons})"
            )
        return self._capabilities

    async def _find_out(self) -> Capabilities:
        missing: dict[str, str] = {}
        item = _probe(Signal.SAMPLED, 0)
        failed: ScoringFailed | NotServing | None = None
        for route in self._routes:
            try:
                await self._ask(route, item, None)
            except (RequestRefused, TeacherReplyError, ScoringFailed, NotServing) as error:
                if isinstance(error, NotServing) and error.overloaded:
                    raise  # that says nothing of the route
                missing[route.value] = str(error)
                failed = error if isinstance(error, (ScoringFailed, NotServing)) else failed
                continue
            most, sees = await self._largest_k(route, missing), await self._reads_pictures(route, missing)
            return Capabilities(route, most, missing, sees)
        if failed is not None:  # the server may only be out of order
            raise failed
        return Capabilities(None, 0, missing)

    async def _reads_pictures(self, route: Route, missing: dict[str, str]) -> bool:
        """Asks about the picture of the fixed tokens; an error if the server cuts it into other tokens."""
        if self._pictures is None:
            return False
        if route is not Route.GENERATE:
            missing["pictures"] = (
                f"they need vLLM's {Route.GENERATE} (vllm serve --enable-scale-out); this is {route}"
            )
            return False
        own = self._pictures.processor
        self._pictures.store.put(PROBE_PICTURE)
        shown = ProbePicture(own.image_token_id, own.ids_of(self._pictures.size(PROBE_HASH)))
        (item,) = probe_items(self._vocab_size, 1 << 30, self._unused, shown)
        try:
            await self._ask(route, item, None)
        except (RequestRefused, TeacherReplyError) as error:
            if isinstance(error.__cause__, OtherTokens):
                raise TeacherError(f"{error}; save both with the same preprocessor_config.json") from error
            missing["pictures"] = str(error)
            return False
        return True

    async def _largest_k(self, route: Route, missing: dict[str, str]) -> int:
        for k in dict.fromkeys((self._k, *MANY_K)):
            if 0 < k <= self._vocab_size:
                try:
                    await self._ask(route, _probe(Signal.TOPK, k), None)
                except (RequestRefused, TeacherReplyError) as error:
                    missing[f"topk {k}"] = str(error)
                else:
                    return k
        return 0

    async def score(self, items: Sequence[ScoreRef], timeout: float | None = None) -> list[TeacherScores]:
        """Sends one request per sequence, concurrently: these servers batch what arrives together."""
        if not items:
            return []
        items = await fetched(items)
        found = await self.capabilities()
        for item in items:
            if item.media and not found.pictures:
                raise RequestRefused(
                    f"{self._channel.name}, row {item.key!r} holds pictures, and this server reads text only: "
                    f"{found.missing.get('pictures', 'the student reads none')}"
                )
            if item.signal not in found.signals or item.k > found.max_k:
                raise RequestRefused(
                    f"{self._channel.name}, row {item.key!r}: cannot give {item.signal.value} with k = {item.k}; this server "
                    f"gives {', '.join(found.signals)} with k ≤ {found.max_k} through {found.route}"
                )
        assert found.route is not None
        if self._usable is not None:
            check_usable(items, self._usable, self._channel.name)
        request = request_of(items)
        answers = await gather_or_cancel(self._one(found.route, item, timeout) for item in items)
        reply = ScoreReply(
            teacher=self._channel.teacher,
            keys=request.keys,
            signals=request.signals,
            k_N=request.k_N,
            position_counts_N=request.position_counts_N,
            digests_N=request.digests_N,
            scored_P=np.concatenate([answer.scored_P for answer in answers]),
            sampled_P=np.concatenate([answer.sampled_P for answer in answers]),
            ids=np.concatenate([answer.ids_PK.reshape(-1) for answer in answers]),
            logprobs=np.concatenate([answer.logprobs_PK.reshape(-1) for answer in answers]),
            hidden=np.empty(0, np.uint16),
        )
        sender = Sender(self._channel.teacher, self._channel.replica, self._candidate_limit)
        check_reply(request, reply, sender)
        scores = reply.split()
        if self._usable is not None:
            check_candidates_usable(scores, self._usable, self._channel.name)
        return scores

    async def _one(self, route: Route, item: ScoreItem, timeout: float | None) -> Candidates:
        async with self._slots:
            return await self._ask(route, item, timeout)

    async def _ask(self, route: Route, item: ScoreItem, timeout: float | None) -> Candidates:
        question = self._question(route, item)
        if item.media:
            assert self._pictures is not None
            question |= await asyncio.to_thread(vllm_parts, self._pictures, item.key, item.tokens, item.media)
        body = await self._channel.ask_json(_path(route), question, timeout)
        try:
            if route in (Route.GENERATE, Route.PROMPT_LOGPROBS):
                return from_prompt_logprobs(body, item, self._hidden)
            return _READERS[route](body, item)
        except ValueError as error:
            raise TeacherReplyError(f"{self._channel.name}, row {item.key!r}: {error}") from error

    def _question(self, route: Route, item: ScoreItem) -> dict[str, Any]:
        tokens, k = item.tokens.tolist(), item.k
        if route in (Route.GENERATE, Route.PROMPT_LOGPROBS) and k:
            k += len(self._hidden)  # they are left out of the answer
        if route is Route.RETURN_LOGPROB:
            return {
                "input_ids": tokens,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": first_of(item),
                "top_logprobs_num": k,
            }
        if route is Route.GENERATE:
            sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k, "detokenize": False}
            return {"model": self._model, "token_ids": tokens, "sampling_params": sampling}
        question: dict[str, Any] = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        if route is Route.PROMPT_LOGPROBS:
            return question | {"prompt_logprobs": k}
        return question | {"echo": True, "logprobs": max(k, 1), "return_tokens_as_token_ids": True}


_READERS: Mapping[Route, Callable[[bytes, ScoreItem], Candidates]] = {
    Route.RETURN_LOGPROB: from_return_logprob,
    Route.ECHO: from_echo,
}
_BACKENDS: Mapping[Route | None, str] = {Route.ECHO: "openai", Route.RETURN_LOGPROB: "sglang"}


def _path(route: Route) -> str:
    return route.value.split(" ")[0]


def _probe(signal: Signal, k: int) -> ScoreItem:
    return ScoreItem("probe", np.array([1, 2, 1], np.int32), np.array([1, 2], np.int32), signal, k)
