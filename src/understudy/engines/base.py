"""What an engine is: token ids in, token ids with logprobs and weight versions out.

Text never crosses this line. A request carries the ids the model must see, a generation carries the ids it wrote,
so what the trainer trains on is what the engine produced. The module needs no torch: rollout workers import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from understudy.errors import EngineError
from understudy.types.trajectory import StopReason
from understudy.types.usable_ids import UsableIds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, and when a generation ends.

    Filters apply in this order, on fp32 logits: repetition penalty, temperature, min-p, top-k, top-p.
    `temperature = 0` is greedy: the most likely token, whose reported logprob is the model's own at temperature 1.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    """Ids that end a generation; the id itself is kept, with its logprob."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    """Tokens less likely than `min_p` times the likeliest are never drawn."""
    repetition_penalty: float = 1.0
    """Above 1 makes every token of the prompt and of the generation so far less likely."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends a generation; the token that completes it is kept."""
    candidates: int = 0
    """How many of the model's own best ids to report at every new token, before any of the filters above."""
    usable: UsableIds | None = None
    """The only ids that are ever drawn or reported, and the only ones in the softmax; None: every row of the head."""
    head_rows: int = 0
    """Of the model, where `usable` is given: servers must be told one by one which ids they may not draw."""

    def unusable_ids(self) -> list[int]:
        """The ids of the head that are never drawn."""
        if self.usable is None:
            return []
        return [*self.usable.holes, *range(self.usable.limit, self.head_rows)]

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {value}, expected {expected}"
            for name, value, right, expected in (
                ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
                ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
                ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
                ("top_k", self.top_k, self.top_k >= 0, "0 (all) or more"),
                ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
                ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
                ("candidates", self.candidates, self.candidates >= 0, "0 (none) or more"),
            )
            if not right
        ]
        if any(not text for text in self.stop_strings):
            problems.append("stop_strings holds an empty string, which would end every generation at once")
        if problems:
            raise EngineError("sampling: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One continuation to write."""

    key: str
    """Names the request in errors and metrics; unique within a batch."""
    tokens: np.ndarray
    """int32 [T]: everything the model must see."""
    sampling: Sampling
    seed: int
    """63 bits. The tokens drawn depend on (weights, tokens, sampling, seed) and not on the neighbours in the batch."""
    session: str = ""
    """Requests with the same session share a prefix: a server may keep them on one replica."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was written for one request; the streams of a token share an index."""

    tokens: np.ndarray
    """int32 [N]: stop token included where one ended it."""
    logprobs: np.ndarray
    """float32 [N]: under the distribution actually sampled from."""
    weight_versions: np.ndarray
    """int32 [N]: the weights that wrote each token; they differ within one generation after a live update."""
    stop_reason: StopReason
    candidate_ids: np.ndarray | None = None
    """int32 [N, K], best first, where `Sampling.candidates` = K asked for them."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.weight_versions):
            raise EngineError(
                f"a generation has {len(self.tokens)} tokens, {len(self.logprobs)} logprobs "
                f"and {len(self.weight_versions)} weight versions; expected as many of each"
            )
        if self.candidate_ids is not None and len(self.candidate_ids) != len(self.tokens):
            raise EngineError(
                f"a generation has {len(self.tokens)} tokens and {len(self.candidate_ids)} rows of candidates; "
                "expected as many of each"
            )


class Engine(Protocol):
    """A student that writes.

    `generate` takes ONE batch composed by the caller and answers in the same order. Its results depend on the
    batch's composition and the requests' seeds alone: never on the clock, nor on other calls under way. (Tokens do
    not even depend on the composition; the last bits of logprobs may, because floating-point sums do.) An engine
    built for throughput may say otherwise and merge calls as they arrive.
    """

    @property
    def version(self) -> int:
        """The weights new tokens are written with; −1 before any were published."""
        ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Publishes weights. Running generations go on under the new ones; each token keeps its own version.

        No tensors at all means the engine already holds them (shared parameters): only the version changes.
        """
        ...

    async def pause(self) -> None:
        """Returns once no token is being computed. Requests wait, running generations keep what they have."""
        ...

    async def resume(self) -> None: ...

    async def abort(self) -> None:
        """Ends every running and waiting generation with `StopReason.ABORTED`, what was written so far kept."""
        ...

    async def close(self) -> None:
        """Frees what the engine holds. Running generations fail; closing twice is fine."""
        ...
