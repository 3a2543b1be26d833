"""`HFEngine`: deterministic generation in this process with a transformers model, on a CPU or one GPU.

All model work happens on the scheduler's thread, so the event loop stays free. If the engine shares the
trained model's parameters, a publish only changes the version. Otherwise weights are copied in.

On a GPU that thread has a CUDA stream of its own, so that decoding and training in one process overlap. The
stream has high priority, because decoding is many short kernels and training few long ones. Only events
order two streams, and the weights are the only memory that both use. `_handing_over` therefore enforces two
waits:

    a writer of weights    waits for all work queued on the engine's stream; pausing only stops new work
    the engine's stream    waits for the writes before its next step
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.engines.base import GROWING_LAYERS, Detokenize, GenerateRequest, Generation
from understudy.engines.local.kernels import decode_step as decode_loop
from understudy.engines.local.kernels.fused import fuse_decoding
from understudy.engines.local.kernels.rms_norm import fuse_norms
from understudy.engines.local.kv_pool import KVFormat
from understudy.engines.local.padded import PaddedBatch
from understudy.engines.local.rows import DecodingRow, DecodingRows, RowBatch
from understudy.engines.local.scheduler import Batching, Call, Scheduler
from understudy.engines.local.slots import SlotBatch, SlotPool, pool_bytes, pool_fits
from understudy.errors import EngineError
from understudy.media.processor import PictureReader
from understudy.nn.pretrained import sharing_copy
from understudy.nn.rotary_border import crossing, rotary_border
from understudy.nn.vision import is_vision, is_vision_frozen, vision_parameters
from understudy.nn.vision_features import VisionFeatures, features_for

logger = logging.getLogger(__name__)

_POOL_SHARE = 0.7
"""Fraction of the free GPU memory that keys and values may take."""
KERNEL_DEVICES = {"cuda"}
"""Device types where rows live in slots and decode steps run our own kernels."""


class CacheLayout(StrEnum):
    """How keys and values of rows in flight are stored."""

    PADDED = "padded"
    """One block per batch, rows padded to one length: every model, every device."""
    SLOTS = "slots"
    """A preallocated pool, one slot of `max_length` tokens per row, steps as CUDA graphs: fast on a GPU."""


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


class HFEngine:
    """An `Engine` over a causal language model of transformers. Called on an event loop; decodes on its own
    thread.

    The engine takes over `model` and puts it into eval mode. To generate with a model that is being
    trained, use `share_parameters_with`. `max_length` bounds prompt plus new tokens. `detokenize` is needed
    for stop strings only. `layout` is chosen by device and model unless it is given: slots on a GPU, if the
    model supports them. `kv_format`: the number format of keys and values in slots. `recompute_kv`: compute those of running
    rows again after new weights. `pictures`: for a vision-language model.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        device: torch.device | str,
        pad_id: int,
        max_length: int,
        batching: Batching = Batching.COMPOSED,
        prefill_tokens: int = 65_536,
        detokenize: Detokenize | None = None,
        version: int = -1,
        layout: CacheLayout | None = None,
        kv_format: KVFormat = KVFormat.MODEL,
        recompute_kv: bool = True,
        pictures: PictureReader | None = None,
    ) -> None:
        self._pictures = pictures
        self._features = features_for(model, pictures, together=batching is Batching.CONTINUOUS)
        self._device, self._pad_id, self._max_length = torch.device(device), pad_id, max_length
        self._detokenize = detokenize
        self._version = version
        self._torn = False
        """The last weight update failed half-way: the model holds weights of two versions."""
        self._tower_changed = False
        """The vision tower's weights have changed since `_features` computed features with them."""
        self._layout, self._max_batch, self._kv_format = layout, max_batch, kv_format
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None
        self._adopt(model.to(self._device))
        self._scheduler = Scheduler(
            self._build,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            batching=batching,
            recompute_kv=recompute_kv,
            stream=self._stream,
        )

    @property
    def version(self) -> int:
        return self._version

    def share_parameters_with(self, model: Any) -> None:
        """Generates with the tensors that `model` trains from now on; a publish then only changes the
        version.

        Only the modules are copied, so that eval mode and kernels here do not affect the trained modules.
        An engine built over these tensors (`sharing_copy`) is left unchanged: a second pool of keys and
        values would have to fit beside the first.
        """
        if not self._shares(model):
            self._adopt(sharing_copy(model))

    def share_features(self, features: VisionFeatures) -> None:
        """Keeps features of pictures together with a trainer of the same tensors, whose vision tower is frozen."""
        self._features = features

    def _shares(self, model: Any) -> bool:
        own, theirs = (dict(one.named_parameters(remove_duplicate=False)) for one in (self._model, model))
        apart = not {id(module) for module in self._model.modules()} & {id(one) for one in model.modules()}
        return apart and own.keys() == theirs.keys() and all(own[name] is theirs[name] for name in own)

    def _adopt(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        layers = getattr(config, "layer_types", None) or ()
        other = sorted(set(layers) - GROWING_LAYERS)
        # Older releases of transformers name no layers of Mamba.
        recurrent = not layers and getattr(model, "_is_stateful", False)
        if other or recurrent:
            what = f"{', '.join(other)} layers" if other else "a recurrent state"
            raise EngineError(
                f"the hf engine cannot generate with {type(model).__name__}: it has {what}, and only "
                f'{" and ".join(sorted(GROWING_LAYERS))} layers are supported; use another engine (rollout.engine = "vllm")'
            )
        border = rotary_border(config.to_dict())
        if border is not None and self._max_length > border:
            raise EngineError(crossing(type(model).__name__, border, self._max_length))
        self._model = model.eval()
        self._vocab: int = model.get_input_embeddings().weight.shape[0]
        self._outputs: int = model.get_output_embeddings().weight.shape[0]
        with self._handing_over():
            self._pool = self._pool_for(model)

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        """Orders this stream's writes after all work the engine has queued, and before its next work."""
        if self._stream is None:
            yield
            return
        here = torch.cuda.current_stream(self._device)
        here.wait_stream(self._stream)
        try:
            yield
        finally:
            self._stream.wait_stream(here)

    def _pool_for(self, model: Any) -> SlotPool | None:
        """A slot pool if it was asked for or is possible; None means the padded layout."""
        fp8 = self._kv_format is KVFormat.FP8
        if self._layout is CacheLayout.PADDED or (
            self._layout is None and self._device.type not in KERNEL_DEVICES
        ):
            if fp8:
                raise EngineError(
                    f"keys and values in fp8 need the kernels of a GPU, this engine runs on {self._device.type}; leave out "
                    "rollout.kv_cache"
                )
            return None
        if problem := self._slot_problem(model):
            if fp8:
                raise EngineError(
                    f"{type(model).__name__} cannot keep keys and values in fp8: {problem}; leave out rollout.kv_cache"
                )
            if self._layout is CacheLayout.SLOTS:
                raise EngineError(
                    f"{type(model).__name__} cannot be decoded over slots: {problem}; leave `layout` out"
                )
            logger.warning("generation uses the slower padded layout: %s", problem)
            return None
        if self._device.type in KERNEL_DEVICES:
            fuse_norms(model)
            fuse_decoding(model)
            if decode_loop.fits(model):
                decode_loop.join_products(model)
        with torch.inference_mode():
            return SlotPool(
                model,
                slots=self._max_batch,
                max_length=self._max_length,
                device=self._device,
                kv_format=self._kv_format,
            )

    def _slot_problem(self, model: Any) -> str:
        """Why this model cannot be decoded over slots on this device; empty if it can."""
        if is_vision(model):
            return "it reads pictures"
        if not pool_fits(model):
            return "its attention is not one the decode kernel knows"
        if (attention := model.config._attn_implementation) != "sdpa":
            return f"attention = {attention!r} was chosen, and slots have a decode kernel of their own"
        if self._kv_format is KVFormat.FP8 and not _multiplies_fp8(self._device):
            return f"fp8 needs compute capability 8.9, {torch.cuda.get_device_name(self._device)} has less"
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            needed = pool_bytes(
                model, slots=self._max_batch, max_length=self._max_length, kv_format=self._kv_format
            )
            if needed > _POOL_SHARE * free:
                return (
                    f"{self._max_batch} rows of {self._max_length} tokens need {needed / 1e9:.1f} GB of keys and values, "
                    f"more than {_POOL_SHARE:.0%} of the {free / 1e9:.1f} GB that are free"
                )
        return ""

    def _build(self, rows: Sequence[DecodingRow]) -> RowBatch:
        decoding = DecodingRows(
            rows, version=self._version, vocab=self._outputs, device=self._device, detokenize=self._detokenize
        )
        if self._pool is not None:
            return SlotBatch(self._pool, self._model, decoding, pad_id=self._pad_id, device=self._device)
        return PaddedBatch(
            self._model,
            decoding,
            pad_id=self._pad_id,
            device=self._device,
            pictures=self._pictures,
            features=self._features,
        )

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        for request in requests:
            self._check(request)
        if self._torn:
            raise EngineError(
                "the last weight update failed half-way; publish a complete set of weights first"
            )
        if not requests:
            return []
        call = Call(requests)
        self._scheduler.submit(call)
        try:
            written = await call.answer
        except asyncio.CancelledError:
            self._scheduler.cancel(call)
            raise
        for request, generation in zip(requests, written, strict=True):
            if not np.isfinite(generation.logprobs).all():
                raise EngineError(
                    f"request {request.key} was answered with log-probabilities that are not finite: the student's weights hold NaN or "
                    "infinity, or a kernel made them; tokens drawn from them are meaningless"
                )
        return written

    def _check(self, request: GenerateRequest) -> None:
        length, new = len(request.tokens), request.sampling.max_new_tokens
        if length == 0:
            raise EngineError(f"request {request.key} has no tokens; expected at least one")
        if length + new > self._max_length:
            raise EngineError(
                f"request {request.key} has {length} tokens and asks for {new} new ones, {length + new} together; "
                f"the limit is {self._max_length}. Shorten the prompt, or lower rollout.max_new_tokens"
            )
        if request.tokens.min() < 0 or request.tokens.max() >= self._vocab:
            raise EngineError(
                f"request {request.key} holds token ids from {request.tokens.min()} to {request.tokens.max()}; "
                f"the model knows 0 … {self._vocab - 1}"
            )
        if request.media and self._pictures is None:
            raise EngineError(
                f"request {request.key} holds {len(request.media)} picture(s), and this engine reads text only"
            )
        usable = request.sampling.usable
        outputs = self._outputs if usable is None else min(usable.count, self._outputs)
        if request.sampling.candidates > outputs:
            raise EngineError(
                f"request {request.key} asks for {request.sampling.candidates} candidates; the model has "
                f"{outputs} ids. Lower loss.topk"
            )
        if request.sampling.stop_strings and self._detokenize is None:
            raise EngineError(
                f"request {request.key} has stop strings, but this engine was built without `detokenize`"
            )

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        was_paused = await asyncio.to_thread(self._scheduler.pause)
        try:
            await asyncio.to_thread(self._load, tensors)
            self._version = version
            if self._features is not None and self._tower_changed:
                self._features.clear()
                self._tower_changed = False
            self._scheduler.weights_changed(version)
        except BaseException as error:
            if self._torn:  # running rows would continue under a mixture of old and new weights
                self._scheduler.fail(EngineError(f"a weight update failed half-way: {error}"))
            raise
        finally:
            if not was_paused:
                self._scheduler.resume()

    @torch.no_grad()
    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._handing_over():
            self._copy_in(tensors)
        if self._pool is not None:
            self._pool.forget_moved_weights()

    def _copy_in(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self._model.named_parameters(remove_duplicate=False))
        tower = set() if self._features is None else {id(one) for one in vision_parameters(self._model)}
        left = {id(parameter) for parameter in own.values()}
        complete, begun = len(left), False
        try:
            for name, tensor in tensors:
                target = own.get(name)
                begun = True
                if target is None:
                    raise EngineError(
                        f"new weights hold {name}, which this model does not have; is it the same architecture?"
                    )
                if target.shape != tensor.shape:
                    raise EngineError(
                        f"new weights for {name} have shape {tuple(tensor.shape)}, expected {tuple(target.shape)}"
                    )
                if target.data_ptr() != tensor.data_ptr() or target.dtype != tensor.dtype:
                    if id(target) in tower:
                        tensor = tensor.to(target.device, target.dtype)
                        self._tower_changed = self._tower_changed or not torch.equal(target, tensor)
                    target.copy_(tensor)
                left.discard(id(target))
            if tower and not begun:  # the tensors are shared with the trainer, which has written them
                self._tower_changed = self._tower_changed or not is_vision_frozen(self._model)
            if 0 < len(left) < complete:
                missing = [name for name, parameter in own.items() if id(parameter) in left]
                raise EngineError(
                    f"new weights lack {len(missing)} of {len(own)} tensors, the first {missing[0]}; send all of them"
                )
        except BaseException:
            # Set only here: requests that arrive during the copy wait, and run under the new weights.
            self._torn = self._torn or begun
            raise
        self._torn = self._torn and not begun

    async def pause(self) -> None:
        await asyncio.to_thread(self._scheduler.pause)

    async def resume(self) -> None:
        self._scheduler.resume()

    async def abort(self) -> None:
        self._scheduler.abort()

    async def close(self) -> None:
        await asyncio.to_thread(self._scheduler.close)
        if self._stream is not None:  # other streams may reuse its memory from here on
            await asyncio.to_thread(self._stream.synchronize)
