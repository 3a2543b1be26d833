"""Wire formats of generation servers: request bodies, and parsing and checking of answers.

    VLLM      POST /inference/v1/generate   token ids in, token ids and logprobs out, nothing detokenised
    SGLANG    POST /generate                the same in SGLang's format
    OPENAI    POST /v1/completions          ids as prompt; the server must return ids (`return_token_ids`)

Pure functions and values only. `continuation.py` sends; `engine.py` retries and balances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from understudy.engines.base import GenerateRequest, Sampling
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

Json = dict[str, Any]

MOST_BIASED = 1024
"""Most ids that a request may ban by `logit_bias`; vLLM's limit."""


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """The result of one HTTP request: a whole generation, or the part before an interruption."""

    tokens: np.ndarray
    """int32 [N]."""
    logprobs: np.ndarray
    """float32 [N]."""
    stop_reason: StopReason
    labels: frozenset[str] = frozenset()
    """The server's names for the weights that drew these tokens; empty if it does not report them."""
    candidates: tuple[list[int], ...] = ()
    """The model's own best ids at each token, if they were asked for."""
    read: list[int] | None = None
    """The prompt's ids as the server read them, if it had to expand placeholders of pictures."""

    def first(self, count: int, reason: StopReason) -> GeneratedPart:
        tokens, logprobs, best = self.tokens[:count], self.logprobs[:count], self.candidates[:count]
        return replace(self, tokens=tokens, logprobs=logprobs, candidates=best, stop_reason=reason)

    @staticmethod
    def nothing() -> GeneratedPart:
        """No token, aborted: the rest has to be asked for."""
        return GeneratedPart(np.empty(0, np.int32), np.empty(0, np.float32), StopReason.ABORTED)


@dataclass(frozen=True, slots=True)
class PieceRequest:
    """One HTTP request for a generation, or for the rest of one."""

    request: GenerateRequest
    tokens: np.ndarray
    """The prompt and the tokens generated before."""
    max_new_tokens: int
    seed: int | None
    """None: the server chooses its own randomness."""
    salt: str
    """Identifies the weights, so that servers do not reuse prefixes computed by other weights."""
    model: str
    shown: Json = field(default_factory=dict)
    """What the request has besides, or instead, if the prompt holds pictures (`media/for_vllm.py`)."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The wire format of one kind of server. Routes that are None do not exist there."""

    name: str
    generate: str
    body: Callable[[PieceRequest], Json]
    read: Callable[[bytes, PieceRequest], GeneratedPart]
    pause: tuple[str, Json] | None = None
    """Path and body. In-flight requests must return the tokens they have."""
    resume: tuple[str, Json] | None = None
    abort: tuple[str, Json] | None = None
    forget: tuple[str, Json] | None = None
    """Drops cached prefixes."""
    forget_pictures: tuple[str, Json] | None = None
    """Drops cached features of pictures; None: prompts with pictures are refused."""
    load: Callable[[str, int], tuple[str, Json]] | None = None
    """(snapshot file, version) → the request that makes the server load it."""
    loaded: Callable[[Json, int], bool] = lambda reply, version: True
    """Whether the answer to `load` says that every worker has this version."""
    label: Callable[[int], tuple[str, Json]] | None = None
    """Sets the server's name for its weights, which its answers report; older servers lack the route."""
    candidates: bool = False
    """Whether answers can name the model's best ids at each token."""


def check_piece(tokens: Any, logprobs: Any, ask: PieceRequest, stop_reason: StopReason) -> GeneratedPart:
    """Refuses answers that would corrupt a row: wrong lengths, invalid ids, invalid log-probabilities."""
    key = ask.request.key
    ids = np.array(tokens) if isinstance(tokens, list) else None
    if ids is None or (len(ids) and (ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 1 << 31)):
        raise EngineError(
            f"{key}: the server returned no token ids; a server that can is needed (return_token_ids)"
        )
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        got = len(logprobs) if isinstance(logprobs, list) else "no"
        raise EngineError(f"{key}: the server returned {got} logprobs for {len(ids)} tokens")
    if len(ids) > ask.max_new_tokens:
        raise EngineError(
            f"{key}: the server returned {len(ids)} tokens, {ask.max_new_tokens} were asked for"
        )
    try:
        values = np.array(logprobs, dtype=np.float64)
    except (TypeError, ValueError):
        raise EngineError(f"{key}: the server returned logprobs that are not numbers") from None
    wrong = ~((values <= 1e-3) & (values > -9000))  # also true of NaN
    if wrong.any():
        place = int(wrong.argmax())
        raise EngineError(f"{key}: logprob {logprobs[place]!r} at new token {place} is not a log-probability")
    return GeneratedPart(ids.astype(np.int32), np.minimum(values, 0.0).astype(np.float32), stop_reason)


def best_ids(entries: Iterable[tuple[Any, Any]], ask: PieceRequest) -> list[int]:
    """The K likeliest of one token's (id, logprob) entries, which may include a drawn token of lower rank."""
    wanted = ask.request.sampling.candidates
    found = {int(i): float(x) for i, x in entries if isinstance(x, (int, float)) and math.isfinite(x)}
    if len(found) < wanted:
        raise EngineError(
            f"{ask.request.key}: the server named {len(found)} different candidates for a token, {wanted} were asked for; "
            "for vLLM the limit is --max-logprobs"
        )
    return sorted(found, key=lambda i: (-found[i], i))[:wanted]


def _no_filters(sampling: Sampling) -> Json:
    """Sampling settings with the same name in vLLM and SGLang."""
    unusable = sampling.unusable_ids()
    # A request must stay small. With more unusable ids, a row that contains one is discarded afterwards.
    bias = {str(number): -100.0 for number in unusable} if 0 < len(unusable) <= MOST_BIASED else None
    return {
        **({} if bias is None else {"logit_bias": bias}),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        # Only the requested ids end a generation, not the end-of-sequence ids of the model folder.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_ids),
    }


def _read_special_tokens(sampling: Sampling) -> Json:
    """Makes vLLM look for stop texts in special tokens too, as SGLang always does."""
    names = ("skip_special_tokens", "spaces_between_special_tokens")
    return dict.fromkeys(names, False) if sampling.stop_strings else {}


def _vllm_body(ask: PieceRequest) -> Json:
    sampling = ask.request.sampling
    params = {
        **_no_filters(sampling),
        "max_tokens": ask.max_new_tokens,
        **({} if ask.seed is None else {"seed": ask.seed}),
        # One more than needed: the drawn token is always listed, whatever its rank.
        "logprobs": sampling.candidates and sampling.candidates + 1,
        "detokenize": bool(sampling.stop_strings),
        "stop": list(sampling.stop_strings),
        **_read_special_tokens(sampling),
    }
    return {
        "token_ids": ask.tokens.tolist(),
        "sampling_params": params,
        "cache_salt": ask.salt,
        "model": ask.model,
        **ask.shown,
    }


class _Candidate(msgspec.Struct, gc=False):
    token: str | None = None
    token_id: int | None = None
    logprob: float | None = None

    @property
    def id(self) -> int:
        """Newer versions of vLLM send `token_id`, older ones the text "token_id:…"."""
        return int(str(self.token).removeprefix("token_id:")) if self.token_id is None else self.token_id


class _Token(msgspec.Struct, gc=False):
    logprob: float | None = None


class _TokenWithCandidates(msgspec.Struct, gc=False):
    logprob: float | None = None
    top_logprobs: list[_Candidate] | None = None


Token = TypeVar("Token", bound=_Token | _TokenWithCandidates)


class _Logprobs(msgspec.Struct, Generic[Token]):
    content: list[Token] | None = None


class _Span(msgspec.Struct):
    version: str | int | None = None


class _Choice(msgspec.Struct, Generic[Token]):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs[Token] | None = None
    weight_versions: list[_Span] | None = None


class _VLLMReply(msgspec.Struct, Generic[Token]):
    """The part of vLLM's answer that we read.

    Decoding a reply of 16k tokens to it takes a third of the time of decoding it to dicts (3 ms, not 11).
    """

    choices: list[_Choice[Token]] = []
    prompt_token_ids: list[int] | None = None


_vllm_reply = msgspec.json.Decoder(_VLLMReply[_Token])
_vllm_reply_with_candidates = msgspec.json.Decoder(_VLLMReply[_TokenWithCandidates])


def _vllm_read(body: bytes, ask: PieceRequest) -> GeneratedPart:
    wanted = ask.request.sampling.candidates
    decoder: Any = _vllm_reply_with_candidates if wanted else _vllm_reply
    reply = _decoded(body, ask, decoder)
    choices = reply.choices
    if not choices:
        raise _without(ask, "choices", body)
    choice = choices[0]
    content = (choice.logprobs and choice.logprobs.content) or []
    stop = _stop_reason(choice.finish_reason, choice.stop_reason, ask)
    piece = check_piece(choice.token_ids or [], [entry.logprob for entry in content], ask, stop)
    labels = frozenset(str(span.version) for span in choice.weight_versions or ())
    candidates: tuple[list[int], ...] = ()
    if wanted:
        try:
            named = [[(one.id, one.logprob) for one in entry.top_logprobs or ()] for entry in content]
        except ValueError:
            raise EngineError(f"{ask.request.key}: the server names candidates by text, not by id") from None
        candidates = tuple(best_ids(entries, ask) for entries in named)
    return replace(piece, labels=labels, candidates=candidates, read=reply.prompt_token_ids)


def _openai_body(ask: PieceRequest) -> Json:
    sampling = ask.request.sampling
    return {
        **_no_filters(sampling),
        "model": ask.model,
        "prompt": ask.tokens.tolist(),
        "max_tokens": ask.max_new_tokens,
        **({} if ask.seed is None else {"seed": ask.seed}),
        "logprobs": 1,
        "return_token_ids": True,
        "stop": list(sampling.stop_strings) or None,
        "include_stop_str_in_output": True,
        **_read_special_tokens(sampling),
        "cache_salt": ask.salt,
    }


def _openai_read(body: bytes, ask: PieceRequest) -> GeneratedPart:
    reply = _decoded(body, ask, _json_object)
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _without(ask, "choices", body)
    choice = choices[0]
    logprobs = choice.get("logprobs") or {}
    tokens = choice.get("token_ids")
    if tokens is None:  # some servers send ids in place of the texts
        names = logprobs.get("tokens") or []
        ids = [
            name.removeprefix("token_id:")
            for name in names
            if isinstance(name, str) and name.startswith("token_id:")
        ]
        tokens = [int(i) for i in ids] if ids and len(ids) == len(names) else None
    stop = _stop_reason(choice.get("finish_reason"), choice.get("stop_reason"), ask)
    return check_piece(tokens, logprobs.get("token_logprobs"), ask, stop)


def _sglang_body(ask: PieceRequest) -> Json:
    sampling = ask.request.sampling
    params = {
        **_no_filters(sampling),
        # With it SGLang ignores `stop_token_ids` too. Without it the model's own ends stop it: see `_sglang_read`.
        "ignore_eos": not sampling.stop_ids,
        "max_new_tokens": ask.max_new_tokens,
        **({} if ask.seed is None else {"sampling_seed": ask.seed & 0x7FFFFFFF}),
        "stop": list(sampling.stop_strings),
        "no_stop_trim": True,
    }
    return {
        "input_ids": ask.tokens.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": sampling.candidates,
        "extra_key": ask.salt,
    }


def _sglang_read(body: bytes, ask: PieceRequest) -> GeneratedPart:
    meta = _decoded(body, ask, _json_object).get("meta_info") or {}
    entries = meta.get("output_token_logprobs") or []
    finish = meta.get("finish_reason") or {}
    matched = finish.get("matched")
    reason = _stop_reason(finish.get("type"), matched, ask)
    if reason is StopReason.EOS and matched not in ask.request.sampling.stop_ids:
        reason = StopReason.ABORTED  # an end that was not asked for: the rest is asked for
    piece = check_piece([entry[1] for entry in entries], [entry[0] for entry in entries], ask, reason)
    if not ask.request.sampling.candidates:
        return piece
    named = [[(one[1], one[0]) for one in top or ()] for top in meta.get("output_top_logprobs") or ()]
    if len(named) != len(entries):
        raise EngineError(
            f"{ask.request.key}: the server named candidates for {len(named)} of {len(entries)} tokens"
        )
    return replace(piece, candidates=tuple(best_ids(one, ask) for one in named))


_json_object = msgspec.json.Decoder(Json)


def _decoded(body: bytes, ask: PieceRequest, decoder: Any) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise EngineError(
            f"{ask.request.key}: the server's answer cannot be read ({error}): {body[:100]!r}"
        ) from error


def _without(ask: PieceRequest, name: str, body: bytes) -> EngineError:
    text = body[:200].decode(errors="replace")
    return EngineError(f"{ask.request.key}: the server's answer has no {name}: {text}")


def _stop_reason(finish: Any, matched: Any, ask: PieceRequest) -> StopReason:
    if finish == "length":
        return StopReason.LENGTH
    if finish == "abort":
        return StopReason.ABORTED
    if finish == "stop":
        return StopReason.STOP_STRING if isinstance(matched, str) else StopReason.EOS
    raise EngineError(f"{ask.request.key}: the server ended with {finish!r}; expected stop, length or abort")


def _vllm_load(path: str, version: int) -> tuple[str, Json]:
    return "/collective_rpc", {"method": "understudy_load_weights", "args": [path, str(version)]}


def _vllm_loaded(reply: Json, version: int) -> bool:
    results = reply.get("results") or []
    return bool(results) and all(
        isinstance(one, dict) and one.get("version") == str(version) for one in results
    )


def _sglang_load(path: str, version: int) -> tuple[str, Json]:
    return "/update_weights_from_disk", {
        "model_path": path.rpartition("/")[0],
        "weight_version": str(version),
    }


DIALECTS: dict[str, Dialect] = {
    "vllm": Dialect(
        name="vllm",
        generate="/inference/v1/generate",
        body=_vllm_body,
        read=_vllm_read,
        pause=("/pause?mode=abort", {}),
        resume=("/resume", {}),
        abort=("/abort_requests", {}),
        forget=("/reset_prefix_cache", {}),
        forget_pictures=("/reset_encoder_cache", {}),
        load=_vllm_load,
        loaded=_vllm_loaded,
        label=lambda version: ("/update_weight_version", {"new_version": str(version)}),
        candidates=True,
    ),
    "sglang": Dialect(
        name="sglang",
        generate="/generate",
        body=_sglang_body,
        read=_sglang_read,
        pause=("/pause_generation", {"mode": "abort"}),
        resume=("/continue_generation", {}),
        abort=("/abort_request", {"abort_all": True}),
        forget=("/flush_cache", {}),
        load=_sglang_load,
        loaded=lambda reply, version: bool(reply.get("success")),
        candidates=True,
    ),
    "openai": Dialect(name="openai", generate="/v1/completions", body=_openai_body, read=_openai_read),
}
