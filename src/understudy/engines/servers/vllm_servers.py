"""Processes of vLLM servers: how each is started, where it answers, and what it needs on a CPU.

The servers of the student (`vllm.py`) and of teachers (`assembly/teachers/launchers.py`) are started here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from understudy.engines.launcher import HostLauncher
from understudy.media.processor import IDEFICS
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import StartedProcess

HOST_MODULE = "understudy.engines.servers.vllm_process"
_CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""By default vLLM on a CPU takes 4 GiB and binds itself to cores that the trainer uses."""
_EAGER = "--enforce-eager"
_PROCESSOR = "--mm-processor-kwargs"


class VLLMServers:
    """Starts vLLM servers by process name, on this machine or where the launcher places them."""

    def __init__(self, launcher: HostLauncher, token: str) -> None:
        """`token`: what proxies of remote servers ask for."""
        self.launcher, self._token = launcher, token

    async def start(self, process: str, arguments: Sequence[str], env: Mapping[str, str]) -> StartedProcess:
        all_arguments, env = list(arguments), dict(env)
        if self.launcher.is_remote(process):
            # On a remote machine 127.0.0.1 stands for that machine's own address.
            all_arguments += ["--bind", "127.0.0.1:0"]
            # Through the environment: command lines are readable by every user of the machine.
            env["UNDERSTUDY_TOKEN"] = self._token
        return await self.launcher.start(process, HOST_MODULE, all_arguments, env)

    def endpoint(self, process: str, child: StartedProcess) -> Endpoint:
        if "socket" in child.ready:
            return Endpoint(child.ready["url"], socket=child.ready["socket"])
        shares = self.launcher.shares_memory(process)
        return Endpoint(child.ready["url"], token=self._token, shares_memory=shares)


def cpu_environment() -> dict[str, str]:
    """What a server on a CPU gets unless the environment has it already."""
    return {key: value for key, value in _CPU_DEFAULTS.items() if key not in os.environ}


def picture_options(options: Sequence[str], family: str | None) -> list[str]:
    """`family`: of the model, if it reads pictures. SmolVLM and Idefics3 resize a picture in several steps, which vLLM
    then does by Pillow, as everything here does; pictures of other families are sent in their last size."""
    given = any(option.startswith(_PROCESSOR) for option in options)
    return [*options, *([] if given or family not in IDEFICS else [f'{_PROCESSOR}={{"use_fast": false}}'])]


def cpu_options(options: Sequence[str]) -> list[str]:
    return [*options, *([] if _EAGER in options else [_EAGER])]
