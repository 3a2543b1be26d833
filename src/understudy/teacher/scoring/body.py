"""Runs the transformer body over a micro-batch and returns the requested hidden states.

Two layouts give the same states: padded rows (fast for small models on CPU), and one packed row (no padding, shared
prefixes read once). The choice depends on the device and on how many tokens sharing saves; see `plan`.

Legend: B sequences of a micro-batch, L its longest, T packed tokens, P scored positions, H hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from understudy.errors import TeacherError
from understudy.nn.compiled_layers import compile_layers
from understudy.nn.cpu_forward import CpuForward, cpu_forward
from understudy.nn.grouped_attention import rounded_lengths, takes_groups
from understudy.nn.prefix_tree import prefix_tree
from understudy.nn.vision import is_vision, vision_rows
from understudy.nn.vision_features import features_for
from understudy.teacher.protocol import ScoreRequest
from understudy.teacher.scoring import varlen
from understudy.teacher.scoring.device_work import to_device
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.scoring.packing import pack, pack_in_groups, pad_right, padded_plan
from understudy.teacher.scoring.shared_prefixes import (
    PrefixGroup,
    prefix_groups,
    saved_tokens,
    split_to_budget,
)

CPU_SEGMENT_COST = 16
"""The cost of one more attention call per layer on CPU, in tokens."""
WORTH_SHARING = 0.1
"""The share of a request's tokens that shared prefixes must save before they are used."""


class ScoringLayout(StrEnum):
    AUTO = "auto"
    """Packed on CUDA; on CPU padded unless shared prefixes save enough."""
    PADDED = "padded"
    PACKED = "packed"
    """Always packed, and prefixes are always shared."""


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """The sequences of one forward and their layout."""

    layout: ScoringLayout
    prefix_groups: tuple[PrefixGroup, ...]

    @property
    def rows(self) -> list[int]:
        """The sequences in the order of their states."""
        return [row for group in self.prefix_groups for row in group.rows]


class Body:
    """The transformer without its head. Registers the packed attention and switches the model to it when
    needed.

    `Scorer` calls it, on one or several scoring threads; a lock guards the model's attention setting.
    """

    def __init__(
        self,
        frozen: FrozenModel,
        layout: ScoringLayout,
        share_prefixes: bool,
        budget: int,
        pictures_together: bool = False,
    ) -> None:
        self.frozen = frozen
        self.layout = layout
        self.share_prefixes = share_prefixes
        self.budget = budget
        self._own_attention = frozen.model.config._attn_implementation
        self.rotary_border = frozen.rotary_border
        if layout is ScoringLayout.AUTO and self._own_attention != "sdpa":
            self.layout = ScoringLayout.PADDED  # packing would replace the attention the user chose
        if is_vision(frozen.model):
            # Packed rows and shared prefixes compare token ids, and two pictures have the same.
            if layout is ScoringLayout.PACKED:
                raise TeacherError(
                    f"{frozen.path} reads pictures and scores padded rows; leave the layout out"
                )
            self.layout = ScoringLayout.PADDED
        self._features = features_for(frozen.model, frozen.pictures, together=pictures_together)
        self._attention = self._own_attention
        dtype = next(frozen.model.parameters()).dtype
        self._groups = takes_groups(frozen.device, dtype, frozen.config, learns=False)
        self._switch = threading.Lock()
        """Held during a forward that depends on the model's attention setting; the CPU forward does not."""
        self._cpu_forward: tuple[int, CpuForward | None] | None = None
        """The longest row it serves, and the model's weights laid out for it."""
        varlen.register()

    def plan(self, request: ScoreRequest, rows: Sequence[int], lengths_N: np.ndarray) -> list[ScoringBatch]:
        """Cut the rows into micro-batches; a function of the request alone."""
        if self.rotary_border is not None:
            sides = (
                [row for row in rows if (lengths_N[row] > self.rotary_border) == long]
                for long in (False, True)
            )
            return [
                batch for side in sides if side for batch in self._plan_together(request, side, lengths_N)
            ]
        return self._plan_together(request, rows, lengths_N)

    def _plan_together(
        self, request: ScoreRequest, rows: Sequence[int], lengths_N: np.ndarray
    ) -> list[ScoringBatch]:
        singles = [PrefixGroup((row,), 0) for row in rows]
        total = int(lengths_N[list(rows)].sum())
        if self.layout is not ScoringLayout.PADDED and not self._too_short_to_share(len(rows), total):
            found = self._prefix_groups(request, rows, lengths_N) if self.share_prefixes else singles
            saved = saved_tokens(found)
            if self.layout is ScoringLayout.AUTO and self.frozen.device.type == "cpu":
                packed = saved > WORTH_SHARING * total + CPU_SEGMENT_COST * (len(rows) + len(found))
            else:
                packed = True
                found = (
                    found if self.layout is ScoringLayout.PACKED or saved > WORTH_SHARING * total else singles
                )
            if packed:
                grouped = self._groups and not any(group.shared for group in found)
                sizes_N = rounded_lengths(lengths_N) if grouped else lengths_N
                batches = split_to_budget(found, sizes_N, self.budget)
                return [ScoringBatch(ScoringLayout.PACKED, tuple(batch)) for batch in batches]
        members = padded_plan(lengths_N[list(rows)].tolist(), self.budget)
        return [ScoringBatch(ScoringLayout.PADDED, tuple(singles[i] for i in batch)) for batch in members]

    def _too_short_to_share(self, rows: int, total: int) -> bool:
        """Whether even one prefix shared by all rows would not pay, so that the search can be skipped."""
        if self.layout is not ScoringLayout.AUTO or self.frozen.device.type != "cpu":
            return False
        return total <= WORTH_SHARING * total + CPU_SEGMENT_COST * (rows + 1)

    def _prefix_groups(
        self, request: ScoreRequest, rows: Sequence[int], lengths_N: np.ndarray
    ) -> list[PrefixGroup]:
        starts_N = request.starts_N
        sequences = [request.tokens_T[starts_N[row] : starts_N[row] + lengths_N[row]] for row in rows]
        found = prefix_groups(sequences)
        return [PrefixGroup(tuple(rows[i] for i in group.rows), group.shared) for group in found]

    def states(
        self,
        request: ScoreRequest,
        batch: ScoringBatch,
        lengths_N: np.ndarray,
        positions_P: np.ndarray,
        counts_B: np.ndarray,
    ) -> torch.Tensor:
        """[P, H]: the states at `positions_P`, which are listed per sequence in the order of `batch.rows`."""
        if batch.layout is ScoringLayout.PACKED:
            return self._packed_states(request, batch, lengths_N, positions_P, counts_B)
        return self._padded_states(request, batch.rows, lengths_N, positions_P, counts_B)

    def _padded_states(
        self,
        request: ScoreRequest,
        rows: Sequence[int],
        lengths_N: np.ndarray,
        positions_P: np.ndarray,
        counts_B: np.ndarray,
    ) -> torch.Tensor:
        if (forward := self.cpu_forward(int(lengths_N[rows].max()))) is not None:
            return self._cpu_states(forward, request, rows, lengths_N, positions_P, counts_B)
        padded_BL = pad_right(request.tokens_T, request.starts_N, lengths_N, rows)
        with self._attention_of(self._own_attention):
            shown = self._vision(request, rows, lengths_N, padded_BL.shape[1])
            hidden_BLH = self.frozen.body(
                input_ids=self.to_device(padded_BL), use_cache=False, **shown
            ).last_hidden_state
        places_P = np.repeat(np.arange(len(rows)), counts_B) * padded_BL.shape[1] + positions_P
        return hidden_BLH.flatten(0, 1)[self.to_device(places_P)]

    def _vision(
        self, request: ScoreRequest, rows: Sequence[int], lengths_N: np.ndarray, width: int
    ) -> dict[str, Any]:
        """Pictures and positions of padded rows; nothing for a model that reads text only."""
        if not is_vision(self.frozen.model):
            return {}
        starts_N = request.starts_N
        made = vision_rows(
            self.frozen.model,
            self.frozen.pictures,
            [request.tokens_T[starts_N[row] : starts_N[row] + lengths_N[row]] for row in rows],
            [request.media_of(row) for row in rows],
            width,
            keys=[request.keys[row] for row in rows],
            features=self._features,
        )
        positions = {} if made.positions is None else {"position_ids": made.positions}
        return {**made.arguments, **positions}

    def cpu_forward(self, longest: int) -> CpuForward | None:
        """The CPU forward for rows up to about this length, if the model has one.

        Weights are laid out once, and again after `weights_changed`, not for every micro-batch.
        """
        if self.frozen.bits is not None:  # it reads weights as plain tensors
            return None
        reach, kept = _rounded_up(longest), self._cpu_forward
        if kept is None or kept[0] != reach:
            with self._attention_of(self._own_attention):
                self._cpu_forward = kept = (reach, cpu_forward(self.frozen.model, reach))
        return kept[1]

    def _cpu_states(
        self,
        forward: CpuForward,
        request: ScoreRequest,
        rows: Sequence[int],
        lengths_N: np.ndarray,
        positions_P: np.ndarray,
        counts_B: np.ndarray,
    ) -> torch.Tensor:
        """On a CPU, for supported models: common prefixes are read once and padding is not read at all."""
        starts_N = request.starts_N
        tree = prefix_tree([request.tokens_T[starts_N[row] : starts_N[row] + lengths_N[row]] for row in rows])
        row_P = np.repeat(np.arange(len(rows)), counts_B)
        return forward.states(tree, torch.from_numpy(tree.nodes_BL[row_P, positions_P]))

    def _packed_states(
        self,
        request: ScoreRequest,
        batch: ScoringBatch,
        lengths_N: np.ndarray,
        positions_P: np.ndarray,
        counts_B: np.ndarray,
    ) -> torch.Tensor:
        laid_out = (request.tokens_T, request.starts_N, lengths_N, batch.prefix_groups)
        packed = (pack_in_groups(*laid_out) if self._groups else None) or pack(*laid_out)
        with self._attention_of(varlen.NAME):
            hidden_1TH = self.frozen.body(
                input_ids=self.to_device(packed.tokens_T)[None],
                position_ids=self.to_device(packed.positions_T)[None],
                use_cache=False,
                cu_seq_lens_q=self.to_device(packed.ends_q),
                cu_seq_lens_k=self.to_device(packed.ends_k),
                max_length_q=_rounded_up(packed.longest_q),
                max_length_k=_rounded_up(packed.longest_k),
                key_places=None if packed.key_places_N is None else self.to_device(packed.key_places_N),
                groups=None if packed.groups_G3 is None else torch.from_numpy(packed.groups_G3),
            ).last_hidden_state
        return hidden_1TH[0][self.to_device(packed.places(positions_P, counts_B))]

    def weights_changed(self) -> None:
        """Drops what was computed from the model's weights."""
        self._cpu_forward = None
        if self._features is not None:
            self._features.clear()

    def compile_layers(self) -> None:
        self._cpu_forward = None
        if not compile_layers(self.frozen.body):
            raise TeacherError(
                f"{self.frozen.path} keeps its layers where compiling them is not supported; leave it off"
            )

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copies to the device without waiting for it."""
        return to_device(array, self.frozen.device)

    def own_attention(self) -> AbstractContextManager[None]:
        """The model with the attention it was loaded with, for a forward of its own."""
        return self._attention_of(self._own_attention)

    @contextmanager
    def _attention_of(self, name: str) -> Iterator[None]:
        with self._switch:
            if name != self._attention:
                self.frozen.model.set_attn_implementation(name)
                self._attention = name
            yield


def _rounded_up(length: int) -> int:
    """Rounds up to a power of two: kernels take it as a bound, and a compiled layer sees few different
    values."""
    return 1 << (length - 1).bit_length()
