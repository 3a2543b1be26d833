"""The slot layout: rows in slots of one preallocated key/value pool. The decode path on a GPU.

Legend: B rows, S slots, H key/value heads, C columns per slot, D head size, V vocabulary, N tokens of all
prompts.

A row gets a slot when it enters and returns it when it ends. Rows are never copied or padded, so joining
and leaving is free. A decode step reads each row's true length (`kernels/attention.py`) and runs as a CUDA
graph, recorded once per batch size, and again for long rows if attention divides them. The pool has
`max_length` columns per slot and is allocated once, when the engine is built.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from understudy.engines.local.kernels import attention as decode_attention
from understudy.engines.local.kernels import decode_step as decode_loop
from understudy.engines.local.kv_pool import KeyValues, KVFormat, Places, SlotLayer, bytes_per_token
from understudy.engines.local.padded import PaddedBatch
from understudy.engines.local.rows import DecodingRow, DecodingRows, RowBatch

ATTENTION = "understudy_slots"
AttentionInterface.register(ATTENTION, decode_attention.attend)
RUN_AHEAD = {"cuda"}
"""Device types that run asynchronously to the host."""
FUSED = {"cuda"}
"""Device types where a step is one loop of our own kernels (`kernels/decode_step.py`)."""
SMALLEST = 16
"""Rows of the smallest recorded step."""
MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
"""Models with plain attention (grouped, causal, maybe windowed) behind transformers' attention interface."""


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def pool_fits(model: Any) -> bool:
    """Whether this model's decode steps can run over slots. Code that came with a model may give other meanings to the names of
    transformers' classes."""
    if not type(model).__module__.startswith("transformers."):
        return False
    config = model.config.get_text_config(decoder=True)
    plain = config.model_type in MODEL_TYPES
    return plain and decode_attention.kernel_fits(
        config.num_attention_heads, config.num_key_value_heads, _head_size(config)
    )


def pool_bytes(model: Any, *, slots: int, max_length: int, kv_format: KVFormat = KVFormat.MODEL) -> int:
    """The memory of a pool in bytes."""
    config = model.config.get_text_config(decoder=True)
    per_token = bytes_per_token(config.num_key_value_heads, _head_size(config), kv_format, model.dtype)
    return int((slots + 1) * max_length * config.num_hidden_layers * per_token)


class SlotPool:
    """Keys and values of all rows in flight, free slots, recorded steps. Used on the scheduler's thread."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_length: int,
        device: torch.device,
        kv_format: KVFormat = KVFormat.MODEL,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        # One slot more than rows: a graph's unused rows write there.
        shape = (slots + 1, config.num_key_value_heads, max_length, _head_size(config))
        self._model, self._device, self._scratch = model, device, slots
        self.last_column = max_length - 1
        self._layers = [
            SlotLayer(KeyValues.empty(shape, kv_format, model.dtype, device))
            for _ in range(config.num_hidden_layers)
        ]
        self._cache = Cache(layers=self._layers)
        self._free = list(range(slots))[::-1]
        self._most = slots
        self._heads = int(config.num_key_value_heads)
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )
        self._steps: dict[tuple[int, int], _Step] = {}
        """By rows, and by the parts of a row in attention."""
        self._addresses = self._weight_addresses()
        self._loop = self._fused_loop()
        self._memory: Any = None
        """Graphs share one memory pool: they never run at the same time."""

    def take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: list[int]) -> None:
        self._free.extend(slots)

    def fill(self, slots: list[int], prompts: PaddedBatch) -> None:
        """Copies the keys and values of prompts just computed into slots."""
        lengths = [len(row) for row in prompts.decoding.rows]
        row_N = np.repeat(np.arange(len(slots)), lengths)
        place_N = np.concatenate([np.arange(length) for length in lengths])
        rows_N, places_N = (torch.from_numpy(a).to(self._device) for a in (row_N, place_N))
        columns_N = torch.from_numpy(place_N + prompts.pads[row_N]).to(self._device)
        slots_N = torch.tensor(slots, device=self._device)[rows_N]
        for layer, source in zip(self._layers, prompts.cache.layers, strict=True):
            fresh = (source.keys[rows_N, :, columns_N], source.values[rows_N, :, columns_N])
            layer.pool.write(slots_N, places_N, *fresh)

    @property
    def reads_prompts(self) -> bool:
        """Whether `read` may be called; if not, transformers computes prompts and `fill` copies them in."""
        return self._loop is not None

    def read(self, slots: list[int], rows: Sequence[np.ndarray]) -> Tensor:
        """Computes prompts directly into their slots; returns the logits [B, V] after each."""
        assert self._loop is not None
        lengths = [len(row) for row in rows]
        bounds = np.cumsum([0, *lengths])
        tokens_T = np.concatenate(rows).astype(np.int64)
        slots_T = np.repeat(np.asarray(slots), lengths)
        before_T = np.arange(len(tokens_T)) - np.repeat(bounds[:-1], lengths)
        # One transfer for everything per token, one for everything per row.
        per_token_3T = torch.from_numpy(np.stack([tokens_T, slots_T, before_T])).to(self._device)
        ends_B = torch.from_numpy(bounds[1:]).to(self._device)
        places = Places(per_token_3T[1], per_token_3T[2], per_token_3T[2])
        begins = torch.nn.functional.pad(ends_B, (1, 0)).to(torch.int32)
        prompts = decode_loop.Prompts(per_token_3T[0], places, begins, max(lengths), ends_B - 1)
        return self._loop.read(prompts, self._layers)

    def step_for(self, rows: int, longest: int) -> _Step:
        """The recorded step of the smallest size with room for `rows`: powers of two, and the whole pool.

        Fewer than `SMALLEST` rows take as long as `SMALLEST` rows, and each size costs a recording. `longest`:
        tokens of the longest row; a batch with a long row has a step of its own if attention divides its rows.
        """
        size = min(max(1 << (rows - 1).bit_length(), SMALLEST), self._most)
        parts = decode_attention.parts_for(size, self._heads, longest, self._processors)
        if (size, parts) not in self._steps:
            self._steps[size, parts] = _Step(self, size, parts)
        return self._steps[size, parts]

    def forget_moved_weights(self) -> None:
        """Drops recorded steps if a weight's address changed.

        A recorded step reads weights at fixed addresses. Code that replaces a tensor's memory (`.to`,
        `.data =`) instead of writing into it would leave the step reading freed memory, so the steps are
        recorded again.
        """
        addresses = self._weight_addresses()
        if addresses != self._addresses:
            self._steps.clear()
            self._addresses = addresses
            self._loop = self._fused_loop()

    def _fused_loop(self) -> decode_loop.DecodeLoop | None:
        """Our own decode loop, if the device runs our kernels and every layer of the model is a known one."""
        fused = self._device.type in FUSED and decode_loop.fits(self._model)
        return decode_loop.DecodeLoop(self._model) if fused else None

    def _weight_addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._model.parameters())

    def forward(self, tokens_B: Tensor, places: Places) -> Tensor:
        """Logits [B, V] after each row's newest token."""
        for layer in self._layers:
            layer.places = places
        torch.add(places.lengths_B, 1, out=places.ends_B)
        if self._loop is not None:
            return self._loop.step(tokens_B, places, self._layers)
        config = self._model.config.get_text_config(decoder=True)
        before, config._attn_implementation = config._attn_implementation, ATTENTION
        try:
            output = self._model(
                input_ids=tokens_B[:, None],
                # transformers passes a 4-D mask on unchanged; the real mask is in the lengths.
                attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self._device),
                position_ids=places.lengths_B[:, None],
                past_key_values=self._cache,
                use_cache=True,
                slots=places,
                pools=self._layers,
            )
        finally:
            config._attn_implementation = before
        return output.logits[:, -1]

    def scratch_places(self, size: int, parts: int = 1) -> Places:
        slots_B = torch.full((size,), self._scratch, dtype=torch.int64, device=self._device)
        return Places(slots_B, torch.zeros_like(slots_B), torch.zeros_like(slots_B), parts)

    def record(self, run: Any) -> Any:
        """Records `run` as a CUDA graph; None on a CPU, where the step is called directly.

        It is recorded on the engine's own stream, so its kernels keep that stream's priority. Another
        thread may train and allocate memory meanwhile, which needs `capture_error_mode="thread_local"`.
        """
        if self._device.type != "cuda":
            return None
        own = torch.cuda.current_stream(self._device)
        for _ in range(2):  # compile kernels and allocate workspaces before recording
            run()
        own.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            garbage_collection_off(),
            torch.cuda.graph(graph, pool=self._memory, stream=own, capture_error_mode="thread_local"),
        ):
            run()
        self._memory = self._memory or graph.pool()
        return graph


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disables Python's garbage collector while a graph is recorded.

    Garbage may hold graphs of a closed engine, and Python may collect it in any thread at any time. A graph
    destroyed in the recording thread aborts the recording, and every later use of the device's random
    numbers fails.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Step:
    """One recorded decode step for up to `size` rows, over tensors whose addresses never change."""

    def __init__(self, pool: SlotPool, size: int, parts: int) -> None:
        self._pool, self._size = pool, size
        self._places = pool.scratch_places(size, parts)
        self._tokens_B = torch.zeros_like(self._places.slots_B)
        self._logits_BV = torch.empty(0)
        self._graph = pool.record(self._run)

    def _run(self) -> None:
        self._logits_BV = self._pool.forward(self._tokens_B, self._places)

    def place(self, slots_B: Tensor, lengths_B: Tensor) -> None:
        """Sets the slots and lengths of the rows; unused rows get the scratch slot."""
        empty = self._pool.scratch_places(self._size)
        for static_B, fresh_B, rest_B in (
            (self._places.slots_B, slots_B, empty.slots_B),
            (self._places.lengths_B, lengths_B, empty.lengths_B),
        ):
            static_B.copy_(rest_B)
            static_B[: len(fresh_B)] = fresh_B

    def run(self, tokens_B: Tensor) -> Tensor:
        """Runs the step: appends these tokens to the rows and returns the logits after them."""
        rows = len(tokens_B)
        self._tokens_B[:rows] = tokens_B
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        # An ended row stays until `dropping_pays`; if its slot is full, it overwrites its last column.
        self._places.lengths_B[:rows] += 1
        self._places.lengths_B[:rows].clamp_(max=self._pool.last_column)
        return self._logits_BV[:rows]


class SlotBatch:
    """A `RowBatch` whose keys and values are in slots of a pool."""

    def __init__(
        self, pool: SlotPool, model: Any, decoding: DecodingRows, *, pad_id: int, device: torch.device
    ) -> None:
        self._pool, self._device, self.decoding = pool, device, decoding
        self._slots = pool.take(len(decoding.rows))
        self._lengths = [len(row) for row in decoding.rows]
        if pool.reads_prompts:
            self._logits_BV = pool.read(self._slots, [row.ids for row in decoding.rows])
        else:
            prompts = PaddedBatch(model, decoding, pad_id=pad_id, device=device)
            pool.fill(self._slots, prompts)
            self._logits_BV = prompts.logits_BV
        self._step: _Step | None = None
        self._ahead = False
        """Whether the step after the newest draw is already queued."""

    def draw(self) -> list[DecodingRow]:
        """Draws; on a GPU it queues the next step before the host has the drawn tokens.

        So the GPU does not wait while Python finds out which rows have ended. An ended row runs one step
        too many, into a slot that is still its own.
        """
        drawn = self.decoding.begin_draw(self._logits_BV)
        if self._device.type in RUN_AHEAD and self.decoding.continues:
            self._run_step()
            self._ahead = True
        return self.decoding.end_draw(drawn)

    def advance(self) -> None:
        if self.decoding.dropping_pays:
            self.release()
        if not self._ahead:
            self._run_step()
        self._ahead = False

    def _run_step(self) -> None:
        step = self._pool.step_for(len(self._slots), max(self._lengths) + 1)
        if step is not self._step:
            self._step = step
            lengths = [min(length, self._pool.last_column) for length in self._lengths]
            places = torch.tensor([self._slots, lengths], device=self._device)
            step.place(places[0], places[1])
        self._logits_BV = step.run(self.decoding.newest_B)
        self._lengths = [length + 1 for length in self._lengths]

    def release(self) -> None:
        if self.decoding.alive == len(self.decoding.rows):
            return
        keep = self.decoding.drop_ended().tolist()
        kept = set(keep)
        self._pool.give_back([slot for i, slot in enumerate(self._slots) if i not in kept])
        self._slots, self._lengths = [self._slots[i] for i in keep], [self._lengths[i] for i in keep]
        self._logits_BV = self._logits_BV[torch.tensor(keep, dtype=torch.int64, device=self._device)]
        self._step = None

    def continue_under(self, version: int) -> None:
        self.decoding.version = version
        self._step = None  # it may have been recorded with the addresses of the earlier weights

    def join(self, other: RowBatch) -> None:
        assert isinstance(other, SlotBatch)
        self.release()
        self.decoding = self.decoding.joined(other.decoding)
        self._slots, self._lengths = self._slots + other._slots, self._lengths + other._lengths
        self._logits_BV = torch.cat([self._logits_BV, other._logits_BV])
        self._step = None
