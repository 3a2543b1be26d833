"""The `Engine` protocol: token ids in, token ids with logprobs and weight versions out.

Engines take and return ids, never text. So the trainer trains on exactly the ids that the engine drew.
The module needs no torch: rollout workers import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from understudy.errors import EngineError
from understudy.types.trajectory import StopReason
from understudy.types.usable_ids import UsableIds

if TYPE_CHECKING:
    from torch import Tensor

Detokenize = Callable[[Sequence[int]], str]
"""The text of tokens, special tokens included."""

GROWING_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types with keys and values per token as state; other states cannot be padded, merged or cut."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, and when a generation ends.

    Filters apply in this order, on fp32 logits: repetition penalty, temperature, min-p, top-k, top-p.
    `temperature = 0` is greedy: the most likely token, with the model's own logprob at temperature 1.
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
    """The only ids in the softmax, so the only ones drawn or reported; None: every row of the head."""
    head_rows: int = 0
    """Rows of the model's head; needed with `usable`, because servers take a list of forbidden ids."""

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
    """One continuation to generate."""

    key: str
    """Identifies the request in errors and metrics; unique within a batch."""
    tokens: np.ndarray
    """int32 [T]: the whole context."""
    sampling: Sampling
    seed: int
    """63 bits. The drawn tokens depend on (weights, tokens, sampling, seed), not on the rest of the batch."""
    session: str = ""
    """Requests with the same session share a prefix: a server may keep them on one replica."""
    media: tuple[str, ...] = ()
    """Hashes of the pictures in the context, in the order of their placeholders."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens generated for one request, and arrays aligned with them by index."""

    tokens: np.ndarray
    """int32 [N]: includes the stop token, if one ended the generation."""
    logprobs: np.ndarray
    """float32 [N]: under the distribution actually sampled from."""
    weight_versions: np.ndarray
    """int32 [N]: the version of the weights that drew each token; a live update changes it midway."""
    stop_reason: StopReason
    candidate_ids: np.ndarray | None = None
    """int32 [N, K], best first, if `Sampling.candidates` = K asks for them."""

    @staticmethod
    def aborted() -> Generation:
        """A generation that was aborted before its first token."""
        ids = np.empty(0, dtype=np.int32)
        return Generation(ids, np.empty(0, dtype=np.float32), ids, StopReason.ABORTED)

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


class EngineClosed(EngineError):
    """The engine was closed before it answered. Another one may be asked."""


class Engine(Protocol):
    """Generates with the student. The trainer calls it from its event loop.

    `generate` takes one batch composed by the caller and returns generations in the same order. The result
    depends on the batch's composition and the requests' seeds alone: never on the clock or on other calls
    in flight. (Tokens do not even depend on the composition. The last bits of logprobs may, because
    floating-point sums do.) An engine built for throughput may document otherwise and merge calls as they
    arrive.
    """

    @property
    def version(self) -> int:
        """The version of the weights that new tokens are drawn with; −1 before the first publish."""
        ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]: ...

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Publishes weights. Running generations continue under them; each token keeps its own version.

        An empty `tensors` means that the engine shares the trained parameters: only the version changes.
        """
        ...

    async def pause(self) -> None:
        """Returns once no token is being computed. Requests wait; running generations keep their tokens."""
        ...

    async def resume(self) -> None: ...

    async def abort(self) -> None:
        """Ends every running and waiting generation with `StopReason.ABORTED`; drawn tokens are kept."""
        ...

    async def close(self) -> None:
        """Releases memory, connections and processes. Running generations fail. May be called twice."""
        ...
