"""The critic's process as seen by the trainer: who waits for it, and how its death is reported."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from learning_rig import batch_of

from understudy.cluster.local import Child
from understudy.config import CriticConfig
from understudy.engines.hosted.client import HostChannel
from understudy.errors import CriticLost
from understudy.run.vitals import waits
from understudy.serving.endpoint import Endpoint
from understudy.trainers.critic.remote import CriticWatch, RemoteCritic

# A server that is alive and never answers a command, like a critic in the middle of a long update.
SERVER = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"ok")
    def do_POST(self):
        time.sleep(3600)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    log = tmp_path / "critic.log"
    log.write_text("loading\n")
    yield Child("critic", process, log, {"url": f"http://127.0.0.1:{port}"})
    process.kill()
    process.wait()
    process.stdout.close()


async def ask_and_disturb(child: Child, disturb: Any, **watching: float) -> tuple[Any, list[str], float]:
    """Calls the critic from a thread and then `disturb`. Returns the error, the wait graph and the seconds until it."""
    watch = CriticWatch(child, **watching)
    channel = HostChannel("critic", Endpoint(child.ready["url"]))
    critic = RemoteCritic(channel, watch, CriticConfig())
    got: list[BaseException] = []

    def ask() -> None:
        try:
            critic.begin_values(batch_of, lambda: 64)()
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=ask)
    watching_it = [asyncio.create_task(one(channel)) for one in (watch.watch_channel, watch.check_health)]
    thread.start()
    while critic.waiting(0.0) is None and thread.is_alive():
        await asyncio.sleep(0.01)
    teachers = SimpleNamespace(pools={})
    system = SimpleNamespace(
        producer=SimpleNamespace(teachers=teachers), learner=SimpleNamespace(critic=critic)
    )
    chains = waits(system, [], time.monotonic())  # type: ignore[arg-type]
    disturb(watch, channel)
    began = time.monotonic()
    while thread.is_alive() and time.monotonic() - began < 20:
        await asyncio.sleep(0.02)
    took = time.monotonic() - began
    for task in watching_it:
        task.cancel()
    await asyncio.gather(*watching_it, return_exceptions=True)
    await channel.close()
    assert critic.waiting(time.monotonic()) is None
    return (got[0] if got else None), chains, took


def test_a_killed_critic_is_reported_at_once_with_its_log(child: Child) -> None:
    kill = lambda *_: os.kill(child.process.pid, signal.SIGKILL)  # noqa: E731
    error, chains, took = asyncio.run(ask_and_disturb(child, kill))
    assert isinstance(error, CriticLost) and took < 5
    assert str(error).startswith("the critic was killed by SIGKILL") and str(child.log) in str(error)
    (chain,) = chains
    assert chain.startswith("train waits for the critic: values of 14 rows (")


def test_a_frozen_critic_is_given_up_after_silence_s(child: Child) -> None:
    stop = lambda *_: os.kill(child.process.pid, signal.SIGSTOP)  # noqa: E731
    error, _, took = asyncio.run(ask_and_disturb(child, stop, beat_s=0.1, silence_s=1.0))
    assert isinstance(error, CriticLost) and took < 10
    assert "the critic lives and has done nothing for 1 s (" in str(error)


def test_the_end_of_the_run_releases_a_thread_that_waits_for_the_critic(child: Child) -> None:
    def leave(watch: CriticWatch, channel: HostChannel) -> None:
        watch.expect_exit()
        channel.give_up("the run ends")

    error, _, took = asyncio.run(ask_and_disturb(child, leave))
    assert isinstance(error, CriticLost) and took < 2 and "the run ends" in str(error)


def test_the_error_of_a_dead_critic_begins_with_the_last_line_of_its_log(
    child: Child, tmp_path: Path
) -> None:
    watch = CriticWatch(replace(child, log_start=len("loading\n")))
    assert watch.lost() is None
    with child.log.open("a") as log:
        log.write("PolicyError: the GPU is gone\n")
    child.process.terminate()
    child.process.wait()
    child.process.returncode = 2
    assert (
        str(watch.lost()) == f"PolicyError: the GPU is gone (the critic ended with code 2; log: {child.log})"
    )
    after_the_run = CriticWatch(child)
    after_the_run.expect_exit()
    assert after_the_run.lost() is None, "an expected exit must not count as a loss"
