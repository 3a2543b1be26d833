"""Stands in for `nvidia-cuda-mps-control`: `-d` starts a daemon, `quit` on standard input ends it. Calls are recorded."""

import os
import signal
import sys
import time
from pathlib import Path

pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
calls = Path(os.environ["MPS_CALLS"])
arguments = sys.argv[1:] or sys.stdin.read().split()
with calls.open("a") as file:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    print(pipes, os.environ["CUDA_MPS_LOG_DIRECTORY"], visible, *arguments, file=file)
if os.environ.get("MPS_REFUSES") == arguments[0]:
    sys.exit("cannot " + arguments[0])
if arguments[0] == "-d":
    if pid := os.fork():
        (pipes / "nvidia-cuda-mps-control.pid").write_text(str(pid))
        (pipes / "control").touch()
        sys.exit(0)
    os.setsid()
    time.sleep(120)
else:
    os.kill(int((pipes / "nvidia-cuda-mps-control.pid").read_text()), signal.SIGTERM)
    (pipes / "control").unlink()
