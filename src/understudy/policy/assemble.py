"""Cuts a batch into tensors for one forward pass, with the record that the loss reads.

Alignment is decided here and nowhere else: stream index t belongs to token t, and the hidden state that
predicts it is at position t − 1. `predict_N` holds that t − 1, as an index into the flattened [rows ×
longest] or [total] line. A row is read up to the token before its last loss-bearing one: later states
predict nothing that the loss reads.

Shapes: B rows of a micro-batch, L longest row, T tokens of all its rows, N loss-bearing tokens, P the same
per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from understudy.errors import LossInputError, PolicyError
from understudy.policy.microbatch import Layout
from understudy.types.batch import Batch
from understudy.types.batch_ref import BatchRef
from understudy.types.jagged import Jagged
from understudy.types.loss import LossInputs, TeacherHead
from understudy.types.trajectory import Origin


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass."""

    keys: tuple[str, ...]
    ids: torch.Tensor
    """int64 [B, L] (padded) or [1, T] (packed)."""
    predict_N: torch.Tensor
    """int64: index of the hidden state, in the flattened states, that predicts each loss-bearing token."""
    inputs: LossInputs
    layout: Layout
    lengths: tuple[int, ...]
    """Tokens of each row that go through the model."""
    loss_counts: tuple[int, ...]
    """Loss-bearing tokens of each row; they lie one after another in `inputs`."""
    media: tuple[tuple[str, ...], ...] = ()
    """Hashes of each row's pictures; empty if no row of the batch has any."""

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return MicroBatch(
            self.keys,
            self.ids.to(device, non_blocking=True),
            self.predict_N.to(device, non_blocking=True),
            self.inputs.to(device, non_blocking=True),
            self.layout,
            self.lengths,
            self.loss_counts,
            self.media,
        )

    def pinned(self) -> MicroBatch:
        """The same in page-locked memory: the host waits for all queued kernels before it copies any other to a GPU."""
        return replace(
            self,
            ids=self.ids.pin_memory(),
            predict_N=self.predict_N.pin_memory(),
            inputs=self.inputs.pinned(),
        )


class Assembler:
    """Cuts micro-batches out of one batch. Columns are not copied; only the rows of a micro-batch are.

    It knows the lengths of all rows at once, and the columns of the rows that `hold` has fetched.
    """

    def __init__(
        self,
        batch: BatchRef,
        weights: Jagged | Sequence[torch.Tensor],
        old_logprobs: Jagged | None = None,
        teacher_heads: Mapping[str, TeacherHead] | None = None,
    ) -> None:
        self.whole = batch
        self.keys = batch.keys
        self.weights = weights if isinstance(weights, Jagged) else Jagged.from_rows(list(weights))
        self.old_logprobs = old_logprobs
        self.teacher_heads = teacher_heads or {}
        self.token_lengths = torch.tensor(batch.token_lengths, dtype=torch.int64)
        """int64 [rows]."""
        self.loss_offsets = torch.tensor([0, *batch.loss_lengths], dtype=torch.int64).cumsum(0)
        """int64 [rows + 1]: where each row's loss-bearing positions start among all of them."""
        given = [origin != Origin.STUDENT for origin in batch.origins]
        self._given = torch.tensor(given) if any(given) else None
        """bool [rows]: which are given answers; None if the student wrote all."""
        self.batch: Batch
        """The rows held."""
        self._held_offsets: torch.Tensor
        """int64 [rows held + 1]: `loss_offsets` of `batch`."""
        self._place: torch.Tensor | None = None
        """int64 [rows]: the index of each row in `batch`; None: same as in the whole batch."""
        self._check_whole()

    def hold(self, rows: Sequence[int] | None = None) -> Assembler:
        """Fetches these rows, by default all; only they can be cut afterwards. Returns itself."""
        rows = range(len(self.keys)) if rows is None else rows
        found = self.whole.fetch(rows)
        if found is self.whole:
            self._take(found, self.loss_offsets)
            return self
        chosen = torch.tensor(rows, dtype=torch.int64)
        offsets = _loss_offsets(found)
        in_ledger = (self.token_lengths[chosen], self.loss_offsets.diff()[chosen])
        for name, seen, expected in zip(
            ("tokens", "loss-bearing tokens"), (found.tokens.lengths, offsets.diff()), in_ledger, strict=True
        ):
            if not torch.equal(seen, expected):
                row = int((seen != expected).nonzero()[0])
                raise PolicyError(
                    f"row {found.keys[row]} came with {int(seen[row])} {name}; the ledger has {int(expected[row])}"
                )
        self._place = torch.full((len(self.keys),), -1, dtype=torch.int64)
        self._place[chosen] = torch.arange(len(rows))
        self._take(found, offsets)
        return self

    def rows(self, rows: Sequence[int]) -> Batch:
        """These rows with their columns, fetched if they are not held; called on the leading rank."""
        return self.whole.select(rows).fetch_all()

    def _take(self, batch: Batch, loss_offsets: torch.Tensor) -> None:
        self.batch, self._held_offsets = batch, loss_offsets
        self._check_columns()

    def rows_with_loss(self) -> list[int]:
        return self.loss_offsets.diff().nonzero().flatten().tolist()

    def loss_places(self, rows: Sequence[int]) -> torch.Tensor:
        """int64 [N]: indexes of these rows' loss-bearing positions among those of the whole batch."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        return _spans(self.loss_offsets[chosen], self.loss_offsets[chosen + 1] - self.loss_offsets[chosen])[0]

    def any_pictures(self, rows: Sequence[int]) -> bool:
        """Whether any of these rows, which must be held, has a picture."""
        here = rows if self._place is None else self._place[list(rows)].tolist()
        return bool(self.batch.media) and any(self.batch.media[place] for place in here)

    def groups(self) -> list[str]:
        """One group name per row; rows of different groups never share a forward pass. Teachers that send
        hidden states each need their own head, so each is a group; all other rows are one group."""
        return list(self.whole.teachers) if self.whole.has_hidden_states else [""] * len(self.keys)

    def cut(self, rows: Sequence[int], layout: Layout, dummy: bool = False) -> MicroBatch:
        """The micro-batch of the named rows. `dummy` gives every token weight 0: the pass only keeps
        the FSDP collectives of all ranks aligned."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        here = chosen if self._place is None else self._place[chosen]
        token_index_T, row_of_T, within_T = _spans(
            self.batch.tokens.offsets[here], self.token_lengths[chosen]
        )
        tokens_T = self.batch.tokens.values[token_index_T]
        is_loss_T = self.batch.loss_mask.values[token_index_T]
        # No loss reads the states from a row's last loss-bearing token on, so that token is not fed to the
        # model.
        lengths_B = torch.zeros_like(chosen).scatter_reduce(
            0, row_of_T[is_loss_T], within_T[is_loss_T], "amax"
        )
        read_T = within_T < lengths_B[row_of_T]
        if layout is Layout.PACKED:
            ids, begins_B = tokens_T[read_T][None], lengths_B.cumsum(0) - lengths_B
        else:
            longest = int(lengths_B.max())
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            begins_B = torch.arange(len(rows)) * longest
        place_T = begins_B[row_of_T] + within_T
        if layout is Layout.PADDED:
            ids.view(-1)[place_T[read_T]] = tokens_T[read_T]
        loss_counts_B = self.loss_offsets[chosen + 1] - self.loss_offsets[chosen]
        loss_index_N, sequence_N, position_N = _spans(self._held_offsets[here], loss_counts_B)
        try:
            inputs = self._inputs(
                rows,
                tokens_T[is_loss_T],
                token_index_T[is_loss_T],
                loss_index_N,
                sequence_N,
                position_N,
                dummy,
            )
        except LossInputError as error:
            raise LossInputError(f"{error} (rows {_some([self.keys[row] for row in rows])})") from error
        return MicroBatch(
            keys=tuple(self.keys[row] for row in rows),
            ids=ids,
            predict_N=place_T[is_loss_T] - 1,
            inputs=inputs,
            layout=layout,
            lengths=tuple(lengths_B.tolist()),
            loss_counts=tuple(loss_counts_B.tolist()),
            media=tuple(self.batch.media[i] for i in here.tolist()) if self.batch.media else (),
        )

    def cut_ahead(
        self, passes: Iterable[tuple[Sequence[int], bool]], layout: Layout, device: torch.device
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """The micro-batches of (rows, whether they count in the loss) on `device`.

        For a GPU, a thread cuts the next one while the caller queues this one's kernels. Cutting 26,000 tokens with 64
        candidates each takes the host 0.1 s, in which the GPU would run out of work.
        """

        def cut(which: tuple[Sequence[int], bool]) -> tuple[MicroBatch, bool]:
            rows, counted = which
            micro = self.cut(rows, layout, dummy=not counted)
            if device.type != "cuda":
                return micro, counted
            with torch.cuda.device(device):
                return micro.pinned(), counted

        if device.type == "cpu":  # its cores are busy with the passes
            yield from map(cut, passes)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="cut") as thread:
            submitted = (thread.submit(cut, which) for which in passes)
            following = next(submitted, None)
            while following is not None:
                micro, counted = following.result()
                following = next(submitted, None)
                yield micro.to(device), counted

    def _inputs(
        self,
        rows: Sequence[int],
        token_ids_N: torch.Tensor,
        token_index_N: torch.Tensor,
        loss_index_N: torch.Tensor,
        sequence_N: torch.Tensor,
        position_N: torch.Tensor,
        dummy: bool,
    ) -> LossInputs:
        def pick(column: Jagged | None) -> torch.Tensor | None:
            return None if column is None else column.values[loss_index_N]

        whole_index_N = loss_index_N if self._place is None else self.loss_places(rows)
        weights_N = self.weights.values[whole_index_N].to(torch.float32)
        behaviour_N = self.batch.behaviour_logprobs.values[token_index_N]
        given_N = None if self._given is None else self._given[list(rows)][sequence_N]
        if given_N is not None:  # only there: a NaN that an engine wrote stays and is refused
            behaviour_N = behaviour_N.masked_fill(given_N, 0.0)
        return LossInputs(
            token_ids_N=token_ids_N,
            weights_N=torch.zeros_like(weights_N) if dummy else weights_N,
            positions_N=position_N,
            sequence_ids_N=sequence_N,
            teacher_logprobs_N=pick(self.batch.teacher_logprobs),
            teacher_ids_NK=pick(self.batch.teacher_ids),
            teacher_logprobs_NK=pick(self.batch.teacher_topk_logprobs),
            teacher_hidden_NH=pick(self.batch.teacher_hidden),
            teacher_head=self._head_of(rows),
            behaviour_logprobs_N=behaviour_N,
            old_logprobs_N=None if self.old_logprobs is None else self.old_logprobs.values[whole_index_N],
            advantages_N=pick(self.batch.advantages),
            importance_N=pick(self.batch.importance),
            reference_logprobs_N=pick(self.batch.reference_logprobs),
            old_values_N=pick(self.batch.values),
            returns_N=pick(self.batch.returns),
            given_N=given_N,
        )

    def _head_of(self, rows: Sequence[int]) -> TeacherHead | None:
        if not self.whole.has_hidden_states:
            return None
        name = self.whole.teachers[rows[0]]
        if name not in self.teacher_heads:
            raise PolicyError(
                f"rows scored by teacher {name!r} carry hidden states, but its head was not given; "
                f"heads are known for {sorted(self.teacher_heads) or 'no teacher'}"
            )
        return self.teacher_heads[name]

    def _check_whole(self) -> None:
        """Checks that the columns given for all rows have one entry per row."""
        for name, column in {"weights": self.weights, "old_logprobs": self.old_logprobs}.items():
            if column is not None and not torch.equal(column.offsets, self.loss_offsets):
                raise PolicyError(
                    f"{name} is not aligned to the loss-bearing positions: "
                    f"{_first_difference(column, self.loss_offsets, self.keys)}"
                )

    def _check_columns(self) -> None:
        """Checks alignment once, so that a shifted column is an error here and not a wrong loss later."""
        batch, expected = self.batch, self._held_offsets
        for name in ("loss_mask", "behaviour_logprobs"):
            if not torch.equal(getattr(batch, name).offsets, batch.tokens.offsets):
                raise PolicyError(
                    f"{name} is not aligned to tokens: {_first_difference(getattr(batch, name), batch.tokens.offsets, batch.keys)}"
                )
        columns = {
            "teacher_logprobs": batch.teacher_logprobs,
            "teacher_ids": batch.teacher_ids,
            "teacher_topk_logprobs": batch.teacher_topk_logprobs,
            "teacher_hidden": batch.teacher_hidden,
            "advantages": batch.advantages,
            "importance": batch.importance,
            "reference_logprobs": batch.reference_logprobs,
            "values": batch.values,
            "returns": batch.returns,
        }
        for name, column in columns.items():
            if column is not None and not torch.equal(column.offsets, expected):
                raise PolicyError(
                    f"{name} is not aligned to the loss-bearing positions: {_first_difference(column, expected, batch.keys)}"
                )
        starts = batch.tokens.offsets[:-1][batch.tokens.lengths > 0]
        if batch.loss_mask.values[starts].any():
            rows = [
                key for key, mask in zip(batch.keys, batch.loss_mask, strict=True) if len(mask) and mask[0]
            ]
            raise PolicyError(
                f"the first token of a row has no prediction and cannot bear loss: rows {_some(rows)}"
            )


def _loss_offsets(batch: Batch) -> torch.Tensor:
    mask = batch.loss_mask.values
    counted = torch.zeros(len(mask) + 1, dtype=torch.int64)
    torch.cumsum(mask, 0, out=counted[1:])
    return counted[batch.tokens.offsets]


def _first_difference(column: Jagged, expected: torch.Tensor, keys: Sequence[str]) -> str:
    if len(column) != len(keys):
        return f"{len(column)} rows, expected {len(keys)}"
    row = int((column.lengths != expected.diff()).nonzero()[0])
    return f"row {keys[row]} has {int(column.lengths[row])} entries, expected {int(expected.diff()[row])}"


def _spans(
    starts_B: torch.Tensor, lengths_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For spans [start, start + length): the flat indexes, the span each belongs to, and the index within
    it."""
    span_T = torch.repeat_interleave(lengths_B)
    ends_B = lengths_B.cumsum(0)
    within_T = torch.arange(len(span_T)) - (ends_B - lengths_B)[span_T]
    return starts_B[span_T] + within_T, span_T, within_T


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
