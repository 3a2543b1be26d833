"""Bytes of activations, keys and values, and logits, computed from a model's config. Imports no torch.

Legend: H hidden size, I size of the feed-forward part, Q heads · head size, K key heads · head size, w bytes of a number.

| kept for the backward pass, per token and layer | plain layers   | compiled layers |
|-------------------------------------------------|----------------|-----------------|
| two norms: input and output                     | 2 · (4 + 2w)·H | 2 · 2w·H        |
| norms of queries and keys (Qwen3)               | (4 + w)·(Q+K)  | w·(Q+K)         |
| attention: queries, keys, values, output        | w·(2Q + 2K)    | w·(2Q + 2K)     |
| feed-forward: gate, up, their product           | 4w·I           | 3w·I            |

and a float32 per norm and per head. Plain layers keep float32 copies in their norms, and the gate before and after SiLU.
"""

from __future__ import annotations

from dataclasses import dataclass

from understudy.planning.models.folder import ModelFolder

KNOWN = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types with one attention block and one gated feed-forward block per layer."""
_LOSS_BYTES = 1800 << 20
_LOSS_ROWS = 4096
"""The chunk of logits that the loss computes at a time (`losses/fused/chunks.py`)."""
_SCORE_BYTES = 2048 << 20
"""The chunk of float32 logits of a replica on a GPU (`teacher/replica/assemble.py`)."""
_PREFILL_TOKENS = 65_536
"""Prompt tokens that the engine computes at a time (`engines/local/engine.py`)."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder-only model."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int
    vocab: int
    head_norms: bool
    context: int

    @classmethod
    def of(cls, folder: ModelFolder) -> DecoderShape | None:
        """None for a model whose layers are of another kind."""
        config = folder.config
        if config.get("model_type") not in KNOWN:
            return None
        heads = int(config["num_attention_heads"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            inner=int(config["intermediate_size"]),
            heads=heads,
            key_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab=folder.vocab_size,
            head_norms=config["model_type"] == "qwen3",
            context=folder.context or 0,
        )

    def kept_per_token(self, width: int, compiled: bool) -> int:
        """Bytes that one layer keeps of one token for its backward pass."""
        queries, keys = self.heads * self.head, self.key_heads * self.head
        norms = 2 * (2 * width + (0 if compiled else 4)) * self.hidden + 8
        attention = 2 * width * (queries + keys) + 4 * self.heads
        if self.head_norms:
            attention += (width + (0 if compiled else 4)) * (queries + keys) + 4 * (
                self.heads + self.key_heads
            )
        return norms + attention + (3 if compiled else 4) * width * self.inner

    def training(
        self, tokens: int, trained: int, width: int, *, compiled: bool, checkpointed: bool, whole_rows: bool
    ) -> int:
        """Peak bytes of one forward and backward pass of `tokens`, `trained` of them with a loss.

        The peak is at the loss, or where the last layer's backward pass begins. `whole_rows`: the loss reads the
        teacher's whole distribution.
        """
        kept = self.kept_per_token(width, compiled)
        if checkpointed:
            kept_in_all = tokens * (self.layers * width * self.hidden + kept)
        else:
            kept_in_all = tokens * self.layers * kept
        states = 4 * width * self.hidden * tokens
        row = self.vocab * width
        most = _LOSS_BYTES // row // _LOSS_ROWS * _LOSS_ROWS or _LOSS_BYTES // row
        chunk = _LOSS_BYTES if whole_rows else min(trained, most) * row
        slopes = 3 * width * self.inner * tokens
        return kept_in_all + states + row * self.hidden + max(chunk, slopes)

    def keys_and_values(self, slots: int, length: int, width: int, narrow: bool) -> int:
        """Bytes of the engine's pool for `slots` rows of `length` tokens, and one slot more for unused rows."""
        vector = self.head + 4 if narrow else width * self.head
        return (slots + 1) * length * self.layers * 2 * self.key_heads * vector

    def prefill(self, tokens: int, width: int) -> int:
        """Peak bytes of prompts in the engine: gate, up, their product, and a few states."""
        return min(tokens, _PREFILL_TOKENS) * width * (3 * self.inner + 6 * self.hidden)

    def scoring(self, tokens: int, scored: int, width: int) -> int:
        """Peak bytes of one forward of a replica: its last layer, or the head with a chunk of float32 logits."""
        states = 2 * width * self.hidden * tokens
        head = min(scored * 4 * self.vocab, _SCORE_BYTES) + width * self.hidden * scored
        return states + max(3 * width * self.inner * tokens, head)
