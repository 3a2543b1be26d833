"""A `cluster.address` without a Ray cluster ends a run within seconds; the error names the address and what to do."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from small_runs import ASSETS, start_cli, write_toml

from understudy.cluster import ray_probe
from understudy.cluster.ray_probe import head_of, require_answer
from understudy.errors import ClusterError

pytestmark = pytest.mark.timeout(120)
HTTP2_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("0.0.0.0", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def listener(greeting: bytes) -> Iterator[int]:
    """A port that answers every connection with these bytes and nothing more."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        lines: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = server.accept()
                    lines.append(line)
                    line.sendall(greeting)

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])
        for line in lines:
            line.close()


def test_a_run_whose_ray_address_is_a_closed_port_ends_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measures the whole command with its imports. Ray itself would wait for ever."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token-that-nobody-asks-for-0123456789")
    address = f"127.0.0.1:{closed_port()}"
    few = tmp_path / "few.jsonl"
    few.write_text("".join((ASSETS / "data" / "train.jsonl").open().readlines()[:8]))
    table = {
        "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
        "teachers": {"add": {"model": str(ASSETS / "models" / "teacher-add")}},
        "loss": {"topk": 4},
        "rollout": {"max_new_tokens": 4},
        "data": {"train": str(few)},
        "trainer": {"steps": 1, "batch_size": 4},
        "cluster": {"backend": "ray", "address": address},
        "run": {"dir": str(tmp_path / "run"), "threads": 1},
    }
    began, computed = time.monotonic(), _children_seconds()
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    output, _ = process.communicate(timeout=100)
    took = time.monotonic() - began
    assert process.returncode == 2, output
    assert f"cluster.address = '{address}'" in output and "ray start --head" in output
    assert "Traceback" not in output
    computed = _children_seconds() - computed
    assert took < max(20, 4 * computed), f"{took:.1f} s, of which it computed for {computed:.1f} s"


def _children_seconds() -> float:
    """CPU seconds of child processes that have ended: imports take longer on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (b"", "not the head of a Ray cluster"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not the head of a Ray cluster"),
    ],
    ids=["says nothing", "another service"],
)
def test_a_port_that_is_not_a_ray_head_is_refused_within_seconds(greeting: bytes, message: str) -> None:
    began = time.monotonic()
    with listener(greeting) as port, pytest.raises(ClusterError, match=message):
        require_answer(f"127.0.0.1:{port}", seconds=1.0)
    assert time.monotonic() - began < 5


def test_a_port_that_answers_like_a_ray_head_is_accepted_at_once() -> None:
    began = time.monotonic()
    with listener(HTTP2_SETTINGS) as port:
        require_answer(f"127.0.0.1:{port}", seconds=30.0)
    assert time.monotonic() - began < 10, "it should continue at the first bytes, not at the deadline"


def test_a_host_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"no machine is called 'nobody\.invalid'|no answer within"):
        require_answer("nobody.invalid:6379")


def test_a_connection_that_hangs_is_given_up_and_left_to_a_daemon_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()

    def hang(*_: object, **__: object) -> None:
        let_go.wait(30)
        raise TimeoutError

    monkeypatch.setattr(ray_probe.socket, "create_connection", hang)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"no answer within 0\.3 s"):
        require_answer("127.0.0.1:6379", seconds=0.3)
    assert time.monotonic() - began < 5
    (left,) = [thread for thread in threading.enumerate() if thread.name == "ray-probe"]
    assert left.daemon
    let_go.set()
    left.join(10)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://10.0.0.1:10001", "run the command on one"),
        ("10.0.0.1", "expected HOST:PORT or 'auto'"),
        ("10.0.0.1:head", "expected HOST:PORT or 'auto'"),
    ],
)
def test_malformed_ray_addresses_are_refused(address: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        require_answer(address)


def test_auto_means_the_address_in_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6380")
    assert head_of("auto") == ("10.0.0.7", 6380)
    assert head_of("10.0.0.8:6379") == ("10.0.0.8", 6379), "a given address should take precedence"
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.7:10001")
    with pytest.raises(ClusterError, match="Ray's client"):
        head_of("auto")
