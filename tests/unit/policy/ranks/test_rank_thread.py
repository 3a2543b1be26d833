"""`RankThread`: a process can start several of them, one after another."""

import os
import subprocess
import sys

_TWO_THREADS = """
import tempfile, threading, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from understudy.policy.ranks.rank_thread import RankThread

def shard():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/rendezvous", rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()

for _ in range(3):
    thread = RankThread()
    thread.submit(shard).result()
    thread.close()
    for ending in threading.enumerate():
        if ending.name == "rank":
            ending.join()
print("done")
"""


def test_a_model_can_be_sharded_on_a_new_rank_thread_after_the_previous_one_has_ended() -> None:
    """A restart of the run does this. It once crashed with SIGSEGV (torch 2.11 for CUDA on a machine without a GPU)."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "faulthandler", "-c", _TWO_THREADS]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    # gloo of torch 2.8 writes to stdout too
    assert ended.returncode == 0 and ended.stdout.endswith("done\n"), ended.stderr
