"""How fast new weights reach engine processes, beside a plain copy through loopback sockets.

    python benchmarks/weights.py            0.5 GB to 1, 2 and 4 processes, about a minute
    python benchmarks/weights.py --quick    0.1 GB, nothing written

Measured for each number of processes, the median of several rounds, from the tensors of the trainer to
tensors of every engine, all of them confirmed:

    broadcast    packed into buckets while earlier ones are sent, through a gloo group; for engines on other machines
    memory       one safetensors file in shared memory, mapped by each; for engines on this machine
    plain        the floor: the same bytes as one block through one socket per process, into a buffer, nothing else

GB/s count the model once, however many processes get it. Results go to
benchmarks/results/weights-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hardware import cpu_name
from understudy.weights.broadcast import GroupOrder, PackedWeights, Receiver, Rendezvous, StreamOrder, send
from understudy.weights.snapshots import Snapshots

ROUNDS = 7
_CHUNK = 1 << 20


def model(size: int) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a small decoder in bf16, as many layers as give about `size` bytes."""
    shapes = [
        (2048, 1024),
        (1024, 1024),
        (1024, 1024),
        (1024, 2048),
        (3072, 1024),
        (3072, 1024),
        (1024, 3072),
        (1024,),
    ]
    layer = sum(2 * torch.Size(shape).numel() for shape in shapes)
    return [
        (f"layers.{index}.{place}", torch.randn(shape).to(torch.bfloat16))
        for index in range(max(1, size // layer))
        for place, shape in enumerate(shapes)
    ]


def engine(pipe: Connection, size: int) -> None:
    """A process that receives weights, by the method each message names."""
    torch.set_num_threads(1)
    own = {name: torch.zeros_like(tensor) for name, tensor in model(size)}
    flat = bytearray(sum(tensor.nbytes for tensor in own.values()))
    receiver = Receiver("127.0.0.1")
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        how, what = order
        if how == "broadcast":
            for name, tensor in receiver.receive(what):
                own[name].copy_(tensor)
        elif how == "memory":
            with safe_open(what, framework="pt", device="cpu") as snapshot:
                for name in snapshot.keys():  # noqa: SIM118 - not a mapping
                    own[name].copy_(snapshot.get_tensor(name))
        else:
            _fill(what, memoryview(flat))
        pipe.send(float(own["layers.0.0"].float().sum()))


def _fill(port: int, into: memoryview) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        at = 0
        while at < len(into):
            at += connection.recv_into(into[at:], min(_CHUNK * 8, len(into) - at))


def plain(pipes: Sequence[Connection], block: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for pipe in pipes:
            pipe.send(("plain", server.getsockname()[1]))
        threads = []
        for _ in pipes:
            connection, _ = server.accept()
            threads.append(threading.Thread(target=_pour, args=(connection, block)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        for pipe in pipes:
            pipe.recv()


def _pour(connection: socket.socket, block: memoryview) -> None:
    with connection:
        connection.sendall(block)


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Crew:
    """The engine processes, and the methods of sending them weights."""

    def __init__(
        self, count: int, size: int, named: list[tuple[str, torch.Tensor]], rendezvous: Rendezvous
    ) -> None:
        self.named, self.total = named, sum(tensor.nbytes for _, tensor in named)
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(count)]
        self._children = [context.Process(target=engine, args=(end, size)) for _, end in ends]
        for child in self._children:
            child.start()
        self._pipes = [pipe for pipe, _ in ends]
        for pipe in self._pipes:
            pipe.recv()
        self._orders = [
            GroupOrder(rendezvous.host, rendezvous.port, f"n{count}", rank, count + 1, 60.0)
            for rank in range(count + 1)
        ]
        self._rendezvous = rendezvous
        self._group: Any = None
        self._spare: list[torch.Tensor] = []
        self._snapshots = Snapshots(self.total)
        self._block = memoryview(bytes(self.total))
        self._sum = float(named[0][1].float().sum())

    def plain(self) -> None:
        plain(self._pipes, self._block)

    def broadcast(self) -> None:
        packed = PackedWeights(self.named, before=self._spare)
        for pipe, order in zip(self._pipes, self._orders[1:], strict=True):
            pipe.send(("broadcast", StreamOrder(order, packed.bucket_bytes, packed.notes)))
        self._group = self._group or self._rendezvous.join(self._orders[0])
        send(self._group, packed)
        self._spare = packed.flats
        self._confirmed()

    def memory(self) -> None:
        file = self._snapshots.write(0, self.named)
        for pipe in self._pipes:
            pipe.send(("memory", str(self._snapshots.folder / str(file))))
        self._confirmed()

    def _confirmed(self) -> None:
        for pipe in self._pipes:
            assert pipe.recv() == self._sum, "what arrived is not what was sent"

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for child in self._children:
            child.join()
        self._snapshots.close()


def measure(size: int, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    named, rendezvous = model(size), Rendezvous("127.0.0.1")
    rows: list[dict[str, Any]] = []
    for count in counts:
        crew = Crew(count, size, named, rendezvous)
        first = seconds(crew.broadcast)
        ways = {"plain": crew.plain, "broadcast": crew.broadcast, "memory": crew.memory}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):  # alternating, so that other load affects all methods alike
            for name, way in ways.items():
                times[name].append(seconds(way))
        crew.close()
        rate = {name: crew.total / statistics.median(found) / 1e9 for name, found in times.items()}
        copies = f"{count} process{'' if count == 1 else 'es'}"
        rows += [
            line(f"broadcast, {copies}", rate["broadcast"], rate["plain"]),
            line(f"memory, {copies}", rate["memory"], rate["plain"]),
            {
                "name": f"broadcast, {copies}: the first, with meeting and fresh memory",
                "value": round(first, 4),
                "unit": "s",
            },
        ]
        for row in rows[-3:]:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    total = sum(tensor.nbytes for _, tensor in named)
    return [{"name": "weights", "value": round(total / 1e9, 3), "unit": "GB, bf16"}, *rows]


def line(name: str, value: float, peer: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "value": round(value, 3), "unit": "GB/s"}
    return row | {
        "peer": "plain loopback sockets",
        "peer_value": round(peer, 3),
        "ratio": round(value / peer, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = measure(100_000_000 if options.quick else 500_000_000, (1, 2, 4), 3 if options.quick else ROUNDS)
    if not options.quick:
        options.results.mkdir(exist_ok=True)
        file = options.results / f"weights-{cpu_name()}-{date.today().isoformat()}.json"
        file.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"written to {file}")


if __name__ == "__main__":
    main()
