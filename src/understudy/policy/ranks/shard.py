"""One student sharded over several ranks (FSDP2), or whole on one rank, behind one protocol.

Reduction weights belong to the global batch, so a rank's loss is a part of one sum. Losses and gradients are
added over ranks, never averaged, and the result does not depend on the number of ranks. Rows are distributed
by length and key; every rank knows all lengths and therefore every rank's share, without communication.

Sharded weights are float32 masters. If the student is stored in half precision, FSDP computes with a rounded
copy and adds gradients up in float32, which is what `MasterAdamW` does on one rank.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from understudy.errors import PolicyError
from understudy.nn.vision import is_vision, language_part
from understudy.types.loss_metrics import METRIC_KINDS, Metric, merge_metrics

_TIMEOUT = timedelta(days=30)
"""How long a rank waits for the next command. A lost peer shows at once as a closed connection; a long
rollout is not an error."""


class Ranks(Protocol):
    """The ranks that train one student together."""

    rank: int
    size: int

    def shard(self, forward: nn.Module, weight_dtype: torch.dtype) -> None:
        """Shards the wrapped model's weights over the ranks, in place."""
        ...

    def settle(self, forward: nn.Module) -> None:
        """Reshards after a pass without a backward, so that no later pass reads a stale copy of the whole
        weights."""
        ...

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over all ranks, on the CPU in float64."""
        ...

    def merged(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Metrics of all ranks, merged on the host."""
        ...

    def gathered(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order."""
        ...


class SingleRank:
    """One process, whole weights."""

    rank = 0
    size = 1

    def shard(self, forward: nn.Module, weight_dtype: torch.dtype) -> None:
        return

    def settle(self, forward: nn.Module) -> None:
        return

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return values.to("cpu", torch.float64)

    def merged(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        return metrics

    def gathered(self, message: bytes) -> list[bytes]:
        return [message]


class RankGroup:
    """The ranks of the default process group; see `join`."""

    def __init__(self, device: str = "cpu") -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device, (self.size,))
        # Small sums on the host go over gloo, whichever backend carries the gradients, so they never wait
        # for a device.
        self.host = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def shard(self, forward: nn.Module, weight_dtype: torch.dtype) -> None:
        model = forward.get_submodule("model")
        half = weight_dtype != torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=weight_dtype if half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        model.to(torch.float32)
        layers = set(getattr(model, "_no_split_modules", None) or ())
        # The vision part is not split by layer: a rank whose rows have no picture does not run it.
        split = language_part(model) if is_vision(model) else model
        for module in list(split.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=self.mesh, mp_policy=policy)
        fully_shard(forward, mesh=self.mesh, mp_policy=policy)
        if self.mesh.device_type == "cpu":
            # With torch 2.8, gloo gives the sum of gradients where their mean is asked for.
            for module in forward.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

    def settle(self, forward: nn.Module) -> None:
        for module in forward.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        summed = values.detach().to("cpu", torch.float64, copy=True)
        dist.all_reduce(summed, group=self.host)
        return summed

    def merged(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        parts = self._gather(
            {name: [type(metric).__name__, vars(metric)] for name, metric in metrics.items()}
        )
        return merge_metrics(
            {name: METRIC_KINDS[kind](**values) for name, (kind, values) in part.items()} for part in parts
        )

    def gathered(self, message: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self.host)
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self.host)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(found, sizes, strict=True)]

    def _gather(self, value: Any) -> list[Any]:
        """Gathers a small value of every rank, as JSON rather than pickle."""
        return [json.loads(text) for text in self.gathered(json.dumps(value).encode())]


def join(rank: int, size: int, rendezvous: str, device: str = "cpu") -> RankGroup:
    """Makes this process rank `rank` of `size`. `rendezvous` is `tcp://127.0.0.1:PORT` or `file:///PATH`,
    the same for all."""
    if not 0 <= rank < size:
        raise PolicyError(f"rank = {rank} of {size} ranks: expected 0 … {size - 1}")
    if device.startswith("cuda"):
        torch.cuda.set_device(rank_gpu(rank, device))
        # Torch's watchdog would end this process with SIGABRT if another rank is lost. With 2 it ends the
        # communicator alone, and the trainer starts the ranks again (`cluster.restarts.student`).
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if device.startswith("cuda:"):
        # All ranks share this GPU. NCCL refuses that unless it takes them for ranks of different machines.
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
    return RankGroup(device.partition(":")[0])


def rank_gpu(rank: int, device: str) -> int:
    """The index of a rank's GPU: the one that `device` names, or one for each rank."""
    _, _, index = device.partition(":")
    return int(index) if index else rank % torch.cuda.device_count()


def leave() -> None:
    """Leaves the process group; does nothing if this process never joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """Leaves a process group of lost ranks without asking them. NCCL raises their loss again in `leave`."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def is_about_a_connection(error: BaseException) -> bool:
    """Whether this error is what a rank sees when a peer ends."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "Connection" in str(error))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one (collective: every rank must call it), or the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, shard = tensor.device_mesh, tensor.to_local()
    if mesh.ndim != 1 or tuple(tensor.placements) != (Shard(0),):
        raise PolicyError(f"only weights that are sharded by rows can be gathered, not {tensor.placements}")
    rows, *rest = tensor.shape
    each = -(-rows // mesh.size())
    if len(shard) < each:  # the last ranks have fewer rows, or none
        shard = torch.cat([shard, shard.new_zeros(each - len(shard), *rest)])
    found = shard.new_empty(each * mesh.size(), *rest)
    # Not `DTensor.full_tensor`: it gathers in a group of NCCL operations. If a rank is lost during one, the group's
    # destructor throws while the first error is being thrown, which ends the trainer with SIGABRT.
    dist.all_gather_into_tensor(found, shard.contiguous(), group=mesh.get_group())
    return found[:rows]


def deal_rows(rows: Sequence[int], lengths: Sequence[int], keys: Sequence[str], size: int) -> list[list[int]]:
    """Each rank's rows: longest first, each to the rank with the fewest tokens so far, ties to the lowest
    rank.

    `lengths` and `keys` are by row. The number of rows need not be a multiple of the ranks, and may be
    smaller.
    """
    if size == 1:
        return [list(rows)]
    shares: list[list[int]] = [[] for _ in range(size)]
    load = [(0, rank) for rank in range(size)]
    for row in sorted(rows, key=lambda row: (-lengths[row], keys[row])):
        tokens, rank = heapq.heappop(load)
        shares[rank].append(row)
        heapq.heappush(load, (tokens + lengths[row], rank))
    return shares
