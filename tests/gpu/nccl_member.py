"""One member of a group on one GPU, as a process of its own: `python nccl_member.py JOB RANK SIZE FOLDER`; prints JSON.

NCCL refuses two members of one machine on one GPU. Members that call themselves different machines (`NCCL_HOSTID`, set by the
test) may share it: what they send goes through sockets, as between machines without a faster network.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from understudy.weights.broadcast import (
    GroupOrder,
    PackedWeights,
    Receiver,
    Rendezvous,
    Stage,
    StreamOrder,
    TransferBroken,
    send,
)

VERSIONS = 3
BUCKET = 1 << 20
STALL_S = 10.0


def weights(version: int, scale: int = 1) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a few MiB times `scale` on the GPU, of sizes that are no multiples of the bucket size."""
    made = torch.Generator("cuda").manual_seed(version)
    kinds = [torch.bfloat16, torch.float32, torch.float16]
    shapes = [(1031, 997 * scale), (7,), (333, 65), (), (2048, 513 * scale), (640, 1000), (900, 900)]
    return [
        (f"w{i}", torch.randn(shape, generator=made, device="cuda").to(kinds[i % 3]))
        for i, shape in enumerate(shapes)
    ]


def digest(named: list[tuple[str, torch.Tensor]]) -> str:
    hashed = hashlib.sha256()
    for name, tensor in named:
        hashed.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return hashed.hexdigest()


def rendezvous_of(folder: Path, rank: int) -> tuple[Rendezvous | None, str, int]:
    place = folder / "rendezvous.json"
    if rank == 0:
        rendezvous = Rendezvous("127.0.0.1")
        (folder / "half").write_text(json.dumps([rendezvous.host, rendezvous.port]))
        (folder / "half").rename(place)
        return rendezvous, rendezvous.host, rendezvous.port
    while not place.exists():
        time.sleep(0.05)
    host, port = json.loads(place.read_text())
    return None, host, port


def broadcast(rank: int, size: int, folder: Path) -> Any:
    """Broadcasts several versions through one group; returns their digests."""
    rendezvous, host, port = rendezvous_of(folder, rank)
    order = GroupOrder(host, port, "all", rank, size, 60.0, "nccl")
    if rendezvous is None:
        receiver = Receiver("127.0.0.1", "cuda")
        notes = PackedWeights(weights(0), BUCKET).notes
        coming = StreamOrder(order, BUCKET, notes, staged=True)
        return [digest(receiver.receive(coming)) for _ in range(VERSIONS)]
    group, stage, found = rendezvous.join(order), Stage("cuda"), []
    for version in range(VERSIONS):
        named = weights(version)
        packed = PackedWeights(named, BUCKET)
        assert len(packed.buckets) > 3
        send(group, packed, stage)
        assert digest(packed.tensors()) == digest(named)
        found.append(digest(named))
    time.sleep(1.0)  # so that the other members have received the last version before the group ends
    return found


def lose_one(rank: int, size: int, folder: Path) -> Any:
    """The last member is killed during a broadcast; the others notice it in time and form new groups without it."""
    rendezvous, host, port = rendezvous_of(folder, rank)
    scale = 60
    named = weights(0, scale)
    packed = PackedWeights(named, BUCKET)
    order = GroupOrder(host, port, "all", rank, size, STALL_S, "nccl")
    receiver = Receiver("127.0.0.1", "cuda")
    stage = Stage("cuda")
    if rendezvous is None:
        receiver.receive(StreamOrder(order, BUCKET, packed.notes, staged=True))
    else:
        group: Any = rendezvous.join(order)
        send(group, packed, stage)
    if rank == size - 1:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    began, message = time.monotonic(), "nothing"
    try:
        if rendezvous is None:
            receiver.receive(StreamOrder(order, BUCKET, packed.notes, staged=True))
        else:
            send(group, PackedWeights(named, BUCKET), stage)
    except TransferBroken as error:
        message = str(error)
    seconds = time.monotonic() - began
    if rendezvous is not None:
        group.abort()
        group = None
    again = []
    for name, backend in (("by gloo", "gloo"), ("by nccl", "nccl")):
        order = GroupOrder(host, port, name, rank, size - 1, 30.0, backend)
        staged = backend == "nccl"
        if rendezvous is None:
            again.append(digest(receiver.receive(StreamOrder(order, BUCKET, packed.notes, staged))))
        else:
            group = rendezvous.join(order)
            send(group, PackedWeights(named, BUCKET), stage if staged else None)
            again.append(digest(named))
    time.sleep(1.0)
    return {"message": message, "seconds": seconds, "again": again}


def train(rank: int, size: int, folder: Path) -> Any:
    """Trains a student for a few steps on `size` ranks; returns losses, norms and a summary of the final weights."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "unit" / "policy"))
    from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch

    from understudy.policy.policy import Policy
    from understudy.policy.ranks.shard import join, leave

    ranks = join(rank, size, f"file://{folder}/rendezvous", "cuda:0") if size > 1 else None
    policy = Policy(qwen3().cuda(), settings(), ranks=ranks)
    lines = []
    for step in range(3):
        batch = varied_batch(seed=step)
        before = policy.logprobs(batch, 40).values.tolist()
        result = policy.update(batch, cross_entropy, token_mean(batch), 40)
        lines.append([result.loss, result.grad_norm, *result.row_losses, *before])
    last = [float(tensor.double().square().sum()) for _, tensor in policy.named_weights()]
    leave()
    return {"lines": lines, "weights": last}


JOBS = {"broadcast": broadcast, "lose_one": lose_one, "train": train}

if __name__ == "__main__":
    torch.cuda.set_device(0)
    job, rank, size, folder = sys.argv[1:]
    print(json.dumps(JOBS[job](int(rank), int(size), Path(folder))), flush=True)
    os._exit(0)  # at a normal exit, a broken group may wait for its lost members
