"""One of two processes that each hold half of every model; rank 0 prints {family: largest error in nats, or the
refusal}."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from families import FAMILIES, VOCAB, make
from plain_figures import plain_logprobs, rows_of

from understudy.errors import TeacherError
from understudy.teacher.replica.tensor_parallel import ReplicaRank, shard_layers

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{folder / 'meet'}", world_size=2, rank=rank, timeout=timedelta(seconds=100)
)
found: dict[str, float | str] = {}
for name in FAMILIES:
    model = make(name)
    (row,) = rows_of((20,), VOCAB)
    whole = plain_logprobs(model, row)
    try:
        shard_layers(model, ReplicaRank(rank, 2))
    except TeacherError as error:
        found[name] = str(error)
        continue
    try:
        found[name] = float(abs(plain_logprobs(model, row) - whole).max())
    except RuntimeError as error:
        found[name] = f"broken: {error}"
if rank == 0:
    print(json.dumps(found))
