"""Starts the replicas of one teacher as processes (a `teacher.pool.launch.Launcher`).

    replica 0 ─┬─ rank 0   answers HTTP        CUDA_VISIBLE_DEVICES = the replica's GPUs, device cuda:0
               └─ rank 1   holds a part        the same GPUs, device cuda:1

With `placement = "engine"` a replica sits in an engine process, which the engine starts.
With `backend = "vllm"` a replica is one vLLM server over all its GPUs, behind the parent process that engines use
(`engines/servers/vllm_process.py`).

`planning/seating.py` has assigned GPUs to replicas. This module turns the assignment into environment and
arguments.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from understudy.assembly.processes.scoring_engine import path_of
from understudy.assembly.teachers.following import FollowingReplicas
from understudy.cluster.local import LocalProcesses
from understudy.config import TeacherConfig
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.hosted.processes import process_name
from understudy.engines.servers.vllm_servers import (
    VLLMServers,
    cpu_environment,
    cpu_options,
    picture_options,
)
from understudy.errors import TeacherError
from understudy.media.store import REPLICA_FOLDER
from understudy.observability.owned_folder import OwnedFolder, remove_abandoned
from understudy.planning.preflight import vllm_python
from understudy.planning.seating import Seats, teacher_role
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import StartedProcess
from understudy.teacher.manifest import RequestBatching
from understudy.teacher.pool.gather import gather_or_cancel
from understudy.trainers.models import resolve_device

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_VLLM_BATCH = 256
_SPARE_LOGPROBS = 4
"""Logprobs that may be requested beyond K: placeholder ids of pictures may be among the best and are left out."""
_VLLM_TOKENS = 2048
"""The most tokens of one forward in vLLM, which holds the logits of all of them at once."""


class LocalTeachers:
    """Starts and restarts the replicas of one teacher, for its pool, on the event loop."""

    def __init__(
        self,
        processes: LocalProcesses,
        name: str,
        teacher: TeacherConfig,
        batching: str,
        token: str,
        seats: Seats,
    ) -> None:
        self._processes = processes
        self._name = name
        self._teacher = teacher
        self._batching = batching
        self._token = token
        self._seats = seats
        self._folders: dict[str, OwnedFolder] = {}
        self._begun: dict[str, asyncio.Task[Endpoint]] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.following: FollowingReplicas | None = None
        """Gives replicas the student's weights; None: they keep the weights they load."""

    def begin(self) -> None:
        """Starts the recipe's replicas ahead. `start` then returns what became of each."""
        for replica in map(str, range(self._teacher.replicas)):
            self._begun[replica] = asyncio.create_task(self._start(replica))

    async def start(self, replica: str) -> Endpoint:
        if begun := self._begun.pop(replica, None):
            return await begun
        await self.stop(replica)
        return await self._start(replica)

    async def _start(self, replica: str) -> Endpoint:
        gpus = self._seats.take(teacher_role(self._name), int(replica))
        ranks = range(self._teacher.tensor_parallel)
        rendezvous: Path | None = None
        if len(ranks) > 1:
            owned = self._folders[replica] = OwnedFolder("understudy-teacher-", None)
            rendezvous = owned.path / "rendezvous"
        started = await gather_or_cancel(
            self._processes.start(
                self._process(replica, rank),
                "understudy.teacher.replica.server",
                self._arguments(replica, rank, gpus, rendezvous),
                self._environment(gpus),
            )
            for rank in ranks
        )
        rank_0, process = started[0], self._process(replica, 0)
        shares = self._processes.shares_memory(process)
        endpoint = Endpoint(
            rank_0.ready["url"], self._token, shares_memory=shares, gpu=rank_0.ready.get("gpu")
        )
        self.endpoints[replica] = endpoint
        if self.following is not None:
            await self.following.started(replica, endpoint)
        return endpoint

    async def stop_begun(self) -> None:
        """Stops the replicas that `begin` started and `start` was not asked for."""
        await asyncio.gather(*(self.stop(replica) for replica in list(self._begun)))

    async def stop(self, replica: str) -> None:
        if begun := self._begun.pop(replica, None):
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
        ranks = range(self._teacher.tensor_parallel)
        await asyncio.gather(*(self._processes.stop(self._process(replica, rank)) for rank in ranks))
        if self.following is not None:
            await self.following.stopped(replica)
        folder = self._folders.pop(replica, None)
        if folder is not None:
            folder.close()
        remove_abandoned(Path(tempfile.gettempdir()), REPLICA_FOLDER)

    def alive(self, replica: str) -> bool:
        """Whether all processes of a replica live. A replica that lost a rank would wait for it for ever."""
        children = [
            self._processes.children.get(self._process(replica, rank))
            for rank in range(self._teacher.tensor_parallel)
        ]
        return all(child is not None and child.alive for child in children)

    def end_of_log(self, replica: str) -> str:
        """The last log lines of rank 0, which answers HTTP. The other ranks end with it."""
        return self._processes.end_of_log(self._process(replica, 0))

    def forget(self, replica: str) -> None:
        """Frees the GPUs of a replica that was removed."""
        self._seats.leave(teacher_role(self._name), int(replica))
        self.endpoints.pop(replica, None)

    def _process(self, replica: str, rank: int) -> str:
        return f"teacher-{self._name}-{replica}" + (f"-rank{rank}" if rank else "")

    def _environment(self, gpus: list[str]) -> dict[str, str]:
        # The token goes through the environment: command lines are readable by every user of the machine.
        env = {"UNDERSTUDY_TOKEN": self._token, "OMP_NUM_THREADS": str(self._teacher.threads)}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if self._teacher.tensor_parallel > 1:
            # Ranks on one machine use the loopback. By default gloo would resolve the host's name.
            env["GLOO_SOCKET_IFNAME"] = _LOOPBACK
        return env

    def _arguments(self, replica: str, rank: int, gpus: list[str], rendezvous: Path | None) -> list[str]:
        teacher = self._teacher
        number = int(replica)
        port = teacher.ports[number] if number < len(teacher.ports) else 0
        device = f"cuda:{rank}" if gpus else str(resolve_device(teacher.device))
        arguments = [
            "--model", teacher.model,
            "--name", self._name,
            "--bind", f"127.0.0.1:{port}",
            "--dtype", teacher.dtype,
            "--device", device,
            "--threads", str(teacher.threads),
            "--batching", self._batching,
            "--max-batch-tokens", str(teacher.max_batch_tokens),
        ]  # fmt: skip
        if teacher.compile:
            arguments.append("--compile")
        if teacher.quantize is not None:
            arguments += ["--quantize", teacher.quantize]
            arguments += ["--quantize-tolerance", str(teacher.quantize_tolerance)]
        if teacher.offload:
            arguments += ["--offload", str(teacher.offload)]
        if teacher.context_length is not None:
            arguments += ["--max-length", str(teacher.context_length)]
        if teacher.revision is not None:
            arguments += ["--revision", teacher.revision]
        if teacher.trust_remote_code:
            arguments.append("--trust-remote-code")
        if teacher.attention != "auto":
            arguments += ["--attention", teacher.attention]
        if self.following is not None:
            arguments += ["--weights", str(self.following.folder)]
        if rendezvous is not None:
            arguments += ["--world-size", str(teacher.tensor_parallel), "--rank", str(rank)]
            arguments += ["--rendezvous", f"file://{rendezvous}"]
        return arguments


class EngineTeachers:
    """The base of a LoRA student in the engine processes: replica i sits in process i. Called by its pool.

    The engine starts its processes and restarts those that die. If a replica's process is alive when the pool starts
    the replica again, the replica has failed its probe, and the engine replaces the process.
    """

    following: None = None
    """The base of a LoRA student never changes."""

    def __init__(self, processes: LocalProcesses, name: str, engine: HostedEngine, place: int) -> None:
        """`place`: how many teachers come before this one in these processes."""
        self._processes, self._name, self._engine, self._place = processes, name, engine, place
        self._sits_in: dict[str, StartedProcess | None] = {}
        self.endpoints: dict[str, Endpoint] = {}

    @property
    def replicas(self) -> int:
        return len(self._engine.hosts)

    async def start(self, replica: str) -> Endpoint:
        if int(replica) >= self.replicas:
            raise TeacherError(
                f"teacher {self._name} has a replica in each of the {self.replicas} engine process(es), and no more; resume with a higher "
                "rollout.processes"
            )
        host = self._engine.hosts[int(replica)]
        if self.alive(replica):
            self._engine.replace(host, f"teacher {self._name} in {host} did not prove itself")
        engine = await self._engine.serving(host)
        self._sits_in[replica] = self._engine.process_of(host)
        self.endpoints[replica] = replace(engine, url=engine.url + path_of(self._place))
        return self.endpoints[replica]

    async def stop(self, replica: str) -> None:
        """Does nothing: the engine still uses the process."""

    def alive(self, replica: str) -> bool:
        process = self._sits_in.get(replica)
        newest = self._engine.process_of(self._engine.hosts[int(replica)])
        return process is not None and process is newest and process.alive

    def end_of_log(self, replica: str) -> str:
        return self._processes.end_of_log(process_name(self._engine.hosts[int(replica)]))

    def forget(self, replica: str) -> None:
        self.endpoints.pop(replica, None)
        self._sits_in.pop(replica, None)


class VLLMTeachers:
    """Starts and restarts the vLLM servers of one teacher, for its pool, on the event loop."""

    following: FollowingReplicas | None = None
    """vLLM servers that score keep the weights they load."""

    def __init__(
        self,
        processes: LocalProcesses,
        name: str,
        teacher: TeacherConfig,
        batching: RequestBatching,
        token: str,
        seats: Seats,
        k: int,
        family: str | None = None,
    ) -> None:
        """`k`: the candidates per token that the recipe asks for. `family`: the student's, if it reads pictures."""
        self._processes, self._servers = processes, VLLMServers(processes, token)
        self._name, self._teacher, self._seats = name, teacher, seats
        self._batching, self._k, self._family = batching, k, family
        self.endpoints: dict[str, Endpoint] = {}

    async def start(self, replica: str) -> Endpoint:
        await self.stop(replica)
        gpus = self._seats.take(teacher_role(self._name), int(replica))
        process = self._process(replica)
        on_cpu = not gpus and self._on_cpu(process)
        child = await self._servers.start(process, self.arguments(on_cpu), self._environment(gpus, on_cpu))
        self.endpoints[replica] = self._servers.endpoint(process, child)
        return self.endpoints[replica]

    async def stop(self, replica: str) -> None:
        await self._processes.stop(self._process(replica))

    def alive(self, replica: str) -> bool:
        child = self._processes.children.get(self._process(replica))
        return child is not None and child.alive

    def end_of_log(self, replica: str) -> str:
        return self._processes.end_of_log(self._process(replica))

    def forget(self, replica: str) -> None:
        """Frees the GPUs of a replica that was removed."""
        self._seats.leave(teacher_role(self._name), int(replica))
        self.endpoints.pop(replica, None)

    def _process(self, replica: str) -> str:
        return f"teacher-{self._name}-{replica}"

    def _on_cpu(self, process: str) -> bool:
        """Whether the server runs on a CPU, as far as the trainer knows: on another machine vLLM resolves `auto`."""
        device = self._teacher.device
        return device == "cpu" or (
            not self._processes.is_remote(process) and resolve_device(device).type == "cpu"
        )

    def _environment(self, gpus: list[str], on_cpu: bool) -> dict[str, str]:
        env = {"OMP_NUM_THREADS": str(self._teacher.threads)}
        if on_cpu:
            return env | cpu_environment() | {"CUDA_VISIBLE_DEVICES": ""}
        return env | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})

    def arguments(self, on_cpu: bool) -> list[str]:
        """The arguments of the parent process. Under full determinism the server computes one sequence at a time, so
        that scores depend on nothing else."""
        teacher, alone = self._teacher, self._batching is RequestBatching.BY_REQUEST
        arguments = ["--scores", "--python", vllm_python(teacher, place=f"teachers.{self._name}")]
        arguments += ["--model", teacher.model, "--name", self._name, "--dtype", teacher.dtype]
        arguments += ["--max-batch", str(1 if alone else _VLLM_BATCH)]
        if teacher.context_length is not None:
            arguments += ["--max-length", str(teacher.context_length)]
        options = [
            f"--max-logprobs={max(self._k, 1) + _SPARE_LOGPROBS}",
            f"--max-num-batched-tokens={min(teacher.max_batch_tokens, _VLLM_TOKENS)}",
            f"--tensor-parallel-size={teacher.tensor_parallel}",
        ]
        if teacher.revision is not None:
            options.append(f"--revision={teacher.revision}")
        if teacher.trust_remote_code:
            options.append("--trust-remote-code")
        options += picture_options(teacher.engine_args, self._family)
        return arguments + [f"--option={option}" for option in (cpu_options(options) if on_cpu else options)]
