"""Starts replica processes quickly: imports everything once, then forks a child per replica.

Input, one line of JSON per replica, from standard input or from the pipe `--watch-fd N`:
{"argv": […], "log": path, "token": …, "lie": name or null, "rate": share, "seed": number}
Output, one line of JSON each: {"pid": …}

Each child runs the real server. `lie` names a way in which its replies are corrupted; its log lists all of them.
Children end with this process: they watch a pipe whose other end only this process holds.
"""

import itertools
import json
import os
import pathlib
import random
import signal
import sys
import time
from dataclasses import replace
from typing import Any, TextIO

import numpy as np
import torch
from transformers import Qwen3ForCausalLM  # noqa: F401  (imported before the fork, so that children need not)

from understudy.teacher.protocol import ScoreReply, ScoreRequest, encode_reply
from understudy.teacher.replica import app, server
from understudy.teacher.scoring import scorer

torch.set_num_threads(1)


def moved(array: np.ndarray, by: int) -> np.ndarray:
    return np.roll(array, -by)


def first_k(reply: ScoreReply) -> int:
    return next((k for k in reply.k_N if k), 0)


def altered(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array[len(array) // 2] = value
    return array


def swapped_best(reply: ScoreReply) -> np.ndarray:
    """The best and the last candidate of the first position change places."""
    logprobs = reply.logprobs.copy()
    last = first_k(reply) - 1
    logprobs[[0, last]] = logprobs[[last, 0]]
    return logprobs


def without_last_row(reply: ScoreReply) -> ScoreReply:
    gone = int(reply.position_counts_N[-1])
    k = reply.k_N[-1]
    return replace(
        reply,
        keys=reply.keys[:-1],
        signals=reply.signals[:-1],
        k_N=reply.k_N[:-1],
        position_counts_N=reply.position_counts_N[:-1],
        digests_N=reply.digests_N[:-1],
        scored_P=reply.scored_P[: len(reply.scored_P) - gone],
        sampled_P=reply.sampled_P[: len(reply.sampled_P) - gone],
        ids=reply.ids[: len(reply.ids) - gone * k],
        logprobs=reply.logprobs[: len(reply.logprobs) - gone * k],
    )


LIES = {
    "nan": lambda r: encode_reply(replace(r, sampled_P=altered(r.sampled_P, np.nan))),
    "nan_candidate": lambda r: encode_reply(replace(r, logprobs=altered(r.logprobs, np.nan))),
    "null": lambda r: b"",
    "json_null": lambda r: b'{"choices": [{"prompt_logprobs": null}]}',
    "cut": lambda r: encode_reply(r)[:-7],
    "short": lambda r: encode_reply(without_last_row(r)),
    "positive": lambda r: encode_reply(replace(r, sampled_P=altered(r.sampled_P, 0.3))),
    # All streams are shifted by one position together, as by a server with an off-by-one error.
    "shifted": lambda r: encode_reply(
        replace(
            r,
            scored_P=moved(r.scored_P, 1),
            sampled_P=moved(r.sampled_P, 1),
            ids=moved(r.ids, first_k(r)),
            logprobs=moved(r.logprobs, first_k(r)),
        )
    ),
    # The echoed tokens are right and only the scores are shifted.
    "shifted_scores": lambda r: encode_reply(
        replace(
            r,
            sampled_P=moved(r.sampled_P, 1),
            ids=moved(r.ids, first_k(r)),
            logprobs=moved(r.logprobs, first_k(r)),
        )
    ),
    "unsorted": lambda r: encode_reply(replace(r, logprobs=swapped_best(r))),
    "wrong_vocabulary": lambda r: encode_reply(replace(r, ids=altered(r.ids, 151_936))),
    "other_rows": lambda r: encode_reply(replace(r, keys=[f"not-{key}" for key in r.keys])),
    "zeros": lambda r: encode_reply(
        replace(r, sampled_P=np.zeros_like(r.sampled_P), logprobs=np.zeros_like(r.logprobs))
    ),
}


def start_lying(lie: str, rate: float, seed: int) -> None:
    """Corrupts replies in the way `lie` at the given rate; "every" uses all kinds in turn."""
    rng = random.Random(seed)
    turns = itertools.cycle(LIES if lie == "every" else [lie])

    def encode(reply: ScoreReply) -> bytes:
        if reply.keys == ["probe"] or rng.random() >= rate:
            return encode_reply(reply)
        kind = next(turns)
        print(f"lied: {kind}", flush=True)
        return LIES[kind](reply)

    app.encode_reply = encode


def wedge_after(requests: int) -> None:
    """Scoring blocks for ever after this many requests, while the event loop still answers /health."""
    begin = scorer.Scorer.begin
    seen = 0

    def stuck(self: scorer.Scorer, request: ScoreRequest, *between: Any) -> scorer.QueuedRequest:
        nonlocal seen
        seen += len(request) > 1  # a probe is a single sequence
        while seen > requests:
            time.sleep(3600)
        return begin(self, request, *between)

    scorer.Scorer.begin = stuck


def child(order: dict[str, object], watch: int) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["UNDERSTUDY_TOKEN"] = str(order["token"])
    if order["lie"] == "wedged":
        wedge_after(int(str(order["seed"])))
    elif order["lie"]:
        start_lying(str(order["lie"]), float(str(order["rate"])), int(str(order["seed"])))
    argv = order["argv"]
    assert isinstance(argv, list)
    return server.main([*argv, "--watch-fd", str(watch)])


def run(orders: TextIO) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these children: do not keep zombies
    read_end, write_end = os.pipe()
    print(json.dumps({"ready": True}), flush=True)
    for line in orders:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            code = 70
            try:
                code = child(order, read_end)
            finally:
                pathlib.Path(str(order["log"])).with_name("exit").write_text(str(code))
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    run(os.fdopen(int(sys.argv[2])) if sys.argv[1:2] == ["--watch-fd"] else sys.stdin)
