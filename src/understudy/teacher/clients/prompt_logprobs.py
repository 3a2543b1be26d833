"""Parses prompt logprobs from vLLM's, SGLang's and OpenAI's JSON; raises ValueError for a malformed entry.

Legend: P scored positions of one sequence, K candidates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import numpy as np

from understudy.media.for_vllm import other_ids
from understudy.types.scores import ScoreItem, Signal

TOKEN_ID = "token_id:"
"""The prefix by which a server names a token by id."""


class OtherTokens(ValueError):
    """The server cuts a picture into other tokens than the student."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The scores of one sequence."""

    scored_P: np.ndarray
    sampled_P: np.ndarray
    ids_PK: np.ndarray
    logprobs_PK: np.ndarray


def _unfilled(item: ScoreItem) -> Candidates:
    """Arrays for the item's positions; the scored tokens are those that were sent."""
    shape = len(item.positions), item.k if item.signal is Signal.TOPK else 0
    return Candidates(
        item.tokens[item.positions].astype(np.int32),
        np.empty(shape[0], np.float32),
        np.empty(shape, np.int32),
        np.empty(shape, np.float32),
    )


class _Entry(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _PromptAnswer(msgspec.Struct):
    """vLLM puts `prompt_logprobs` at the top level (generate) or in the choice (completions)."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None
    prompt_token_ids: list[int] | None = None
    """The ids that were read, with the placeholders of pictures, if they were asked for."""


def from_prompt_logprobs(body: bytes, item: ScoreItem, hidden: Collection[int] = ()) -> Candidates:
    """Each position has the K likeliest tokens and the prompt's own: K or K + 1 entries in any order. Those of
    `hidden` are no candidates."""
    try:
        answer = msgspec.json.decode(body, type=_PromptAnswer)
    except msgspec.DecodeError as error:
        raise ValueError(f"unreadable answer: {error}") from error
    given = answer.prompt_logprobs or (answer.choices[0].prompt_logprobs if answer.choices else None)
    if given is None:
        raise ValueError("the answer has no prompt_logprobs")
    if item.media and (why := other_ids(answer.prompt_token_ids, item.tokens)):
        raise OtherTokens(why) if answer.prompt_token_ids is not None else ValueError(why)
    if len(given) != len(item.tokens):
        raise ValueError(f"{len(given)} prompt_logprobs for {len(item.tokens)} tokens")
    found = _unfilled(item)
    scored_P, columns = found.scored_P, found.ids_PK.shape[1]
    for p, position in enumerate(item.positions.tolist()):
        entries = given[position]
        own = None if entries is None else entries.get(str(scored_P[p]))
        if entries is None or own is None:
            raise ValueError(f"position {position}: no logprob for token {scored_P[p]}, which was sent there")
        found.sampled_P[p] = own.logprob
        if columns:
            shown = [pair for pair in entries.items() if int(pair[0]) not in hidden]
            best = sorted(shown, key=lambda pair: (-pair[1].logprob, pair[1].rank or 0))[:columns]
            if len(best) < columns:
                raise ValueError(
                    f"position {position}: {len(best)} candidates where {columns} were asked for"
                )
            found.ids_PK[p] = [int(token) for token, _ in best]
            found.logprobs_PK[p] = [entry.logprob for _, entry in best]
    return found


_Scored = tuple[float | None, int, str | None]
"""SGLang's entry of a token: logprob, id, text (null unless asked for)."""


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Scored] | None = None
    input_top_logprobs: list[list[_Scored] | None] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


def first_of(item: ScoreItem) -> int:
    """The position from which SGLang is asked: its first entry never has a logprob."""
    return int(item.positions[0]) - 1 if len(item.positions) else 0


def from_return_logprob(body: bytes, item: ScoreItem) -> Candidates:
    """One entry per token from `first_of` on; candidates are lists of the K likeliest."""
    try:
        meta = msgspec.json.decode(body, type=_Generated).meta_info
    except msgspec.DecodeError as error:
        raise ValueError(f"unreadable answer: {error}") from error
    own, first = meta.input_token_logprobs, first_of(item)
    if own is None:
        raise ValueError("the answer has no input_token_logprobs")
    if len(own) != len(item.tokens) - first:
        raise ValueError(f"{len(own)} input_token_logprobs for {len(item.tokens) - first} tokens")
    found = _unfilled(item)
    scored_P, columns = found.scored_P, found.ids_PK.shape[1]
    for p, position in enumerate(item.positions.tolist()):
        logprob, token, _ = own[position - first]
        # SGLang writes 0 for the last id of the vocabulary and for padding.
        if logprob is None or token not in (int(scored_P[p]), 0):
            raise ValueError(f"position {position}: no logprob for token {scored_P[p]}, which was sent there")
        found.sampled_P[p] = logprob
        if columns:
            top = meta.input_top_logprobs
            entries = top[position - first] if top is not None and position - first < len(top) else None
            best = sorted(
                (one for one in entries or () if one[0] is not None), key=lambda one: -(one[0] or 0)
            )
            if len(best) < columns:
                raise ValueError(
                    f"position {position}: {len(best)} candidates where {columns} were asked for"
                )
            found.ids_PK[p] = [token for _, token, _ in best[:columns]]
            found.logprobs_PK[p] = [logprob for logprob, _, _ in best[:columns]]
    return found


class _Echoed(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _EchoChoice(msgspec.Struct):
    logprobs: _Echoed | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _EchoAnswer(msgspec.Struct):
    choices: list[_EchoChoice]
    usage: _Usage | None = None


def from_echo(body: bytes, item: ScoreItem) -> Candidates:
    """The answer echoes the prompt with a logprob per token, followed by the generated token."""
    try:
        answer = msgspec.json.decode(body, type=_EchoAnswer)
    except msgspec.DecodeError as error:
        raise ValueError(f"unreadable answer: {error}") from error
    echoed = answer.choices[0].logprobs if answer.choices else None
    if echoed is None or len(echoed.token_logprobs) < len(item.tokens):
        count = 0 if echoed is None else len(echoed.token_logprobs)
        raise ValueError(
            f"{count} echoed logprobs for a prompt of {len(item.tokens)} tokens: the server does not echo"
        )
    if not all(token.startswith(TOKEN_ID) for token in echoed.tokens):
        _check_aligned(echoed, answer.usage, len(item.tokens))
    found = _unfilled(item)
    for p, position in enumerate(item.positions.tolist()):
        found.scored_P[p] = _token_id(echoed.tokens[position], int(found.scored_P[p]))
        own = echoed.token_logprobs[position]
        if own is None:
            raise ValueError(f"position {position}: null where a logprob was expected")
        found.sampled_P[p] = own
        if found.ids_PK.shape[1]:
            _fill(found.ids_PK[p], found.logprobs_PK[p], echoed.top_logprobs, position)
    return found


def _check_aligned(echoed: _Echoed, usage: _Usage | None, length: int) -> None:
    """Tokens echoed as text are compared by their number alone: it detects a server that adds or drops BOS, whose scores
    are shifted by one."""
    repair = "serve it so that prompts of token ids are read as they are, or so that it echoes tokens by id"
    counted = None if usage is None else usage.prompt_tokens
    if counted is not None and counted != length:
        raise ValueError(f"the server counts {counted} tokens in a prompt of {length}; {repair}")
    written = None if usage is None else usage.completion_tokens
    answer = 1 if written is None else written  # one token was asked for
    counts = (length + answer,) if counted is None else (length, length + answer)
    count = len(echoed.token_logprobs)
    if count not in counts or len(echoed.tokens) != count:
        raise ValueError(
            f"{len(echoed.tokens)} echoed tokens and {count} logprobs for a prompt of {length} tokens and an answer of {answer}; {repair}"
        )
    nulls = [place for place, one in enumerate(echoed.token_logprobs[:length]) if one is None]
    if nulls != [0]:
        raise ValueError(
            f"logprobs are null at positions {nulls[:4]} of the prompt; expected at its first token alone, which nothing precedes; {repair}"
        )


def _fill(
    ids_K: np.ndarray, logprobs_K: np.ndarray, top: list[dict[str, float] | None] | None, position: int
) -> None:
    entries = top[position] if top is not None and position < len(top) else None
    if entries is None:
        raise ValueError(f"position {position}: no top_logprobs")
    if not all(token.startswith(TOKEN_ID) for token in entries):
        raise ValueError(
            f"position {position}: candidates come as text, not as token ids, and text is ambiguous"
        )
    best = sorted(entries.items(), key=lambda pair: -pair[1])[: len(ids_K)]
    if len(best) < len(ids_K):
        raise ValueError(f"position {position}: {len(best)} candidates where {len(ids_K)} were asked for")
    ids_K[:] = [int(token[len(TOKEN_ID) :]) for token, _ in best]
    logprobs_K[:] = [logprob for _, logprob in best]


def _token_id(token: str, expected: int) -> int:
    """The echoed token's id.

    If the server echoes text, `expected`: then `_check_aligned` compares the number of tokens.
    """
    return int(token[len(TOKEN_ID) :]) if token.startswith(TOKEN_ID) else expected
