"""Closing a link fails the calls that wait for an answer, on every thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import zmq
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from understudy.dataplane.transfer_queue.link import QueueAddress, QueueLink
from understudy.errors import DataPlaneError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(60)]


class MuteController:
    """A TransferQueue controller that completes handshakes, receives every request and answers none."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets = {name: self._context.socket(zmq.ROUTER) for name in ("handshake", "requests")}
        self.ports = {
            name: socket.bind_to_random_port("tcp://127.0.0.1") for name, socket in self._sockets.items()
        }
        self.received = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def address(self) -> QueueAddress:
        ports = {"handshake_socket": self.ports["handshake"], "request_handle_socket": self.ports["requests"]}
        controller = {"role": "TransferQueueController", "id": "mute", "ip": "127.0.0.1", "ports": ports}
        return QueueAddress(controller, ())

    def _listen(self) -> None:
        poller = zmq.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        yes = ZMQMessage.create(ZMQRequestType.HANDSHAKE_ACK, "mute", {}).serialize()
        while not self._ended.is_set():
            ready = dict(poller.poll(50))
            if self._sockets["handshake"] in ready:
                who, *_ = self._sockets["handshake"].recv_multipart()
                self._sockets["handshake"].send_multipart([who, *yes])
            if self._sockets["requests"] in ready:
                self._sockets["requests"].recv_multipart()
                self.received += 1
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def controller() -> Iterator[MuteController]:
    made = MuteController()
    yield made
    made.close()


def wait_for_requests(controller: MuteController, requests: int) -> None:
    deadline = time.monotonic() + 20
    while controller.received < requests:
        assert time.monotonic() < deadline, f"{controller.received} of {requests} requests arrived"
        time.sleep(0.02)


def run_in_daemon_thread(work: Callable[[], Any]) -> Future[Any]:
    """Runs the work in a daemon thread, which cannot block the test process if it hangs."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def test_close_fails_calls_that_wait_on_other_threads_at_once(controller: MuteController) -> None:
    link = QueueLink.connect(controller.address)
    marks = {"scores": ("5f0c2a.1", "5f0c2a.2")}
    calls: list[Callable[[], Any]] = [
        lambda: asyncio.run(link.keys("train")),
        lambda: asyncio.run(link.clear("train", ["a"])),
        # Two columns under different names: one call of two parts.
        lambda: asyncio.run(link.get("train", ["a", "b"], ["tokens", "scores"], marks)),
    ]
    waiting = [run_in_daemon_thread(call) for call in calls]
    wait_for_requests(controller, 4)
    began = time.monotonic()
    link.close()
    for one in waiting:
        with pytest.raises(DataPlaneError, match="was closed while this call waited for an answer"):
            one.result(timeout=10)
    assert time.monotonic() - began < 5
    with pytest.raises(DataPlaneError, match="is closed"):
        asyncio.run(link.keys("train"))
    link.close()


def test_a_call_that_is_cancelled_or_times_out_stays_so_when_the_link_is_closed(
    controller: MuteController,
) -> None:
    """A timeout of the caller must not turn into an error of the link either."""

    async def body() -> None:
        link = QueueLink.connect(controller.address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await link.keys("train")
        asking = asyncio.create_task(link.keys("train"))
        await asyncio.to_thread(wait_for_requests, controller, 2)
        asking.cancel()
        link.close()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(body())


def test_calls_made_while_the_link_is_closing_fail_too(controller: MuteController) -> None:
    """Eight threads call in a loop; none may be left waiting, whatever it did when the link was closed."""
    link = QueueLink.connect(controller.address)

    def ask_on() -> None:
        async def whole() -> None:
            while True:
                try:
                    async with asyncio.timeout(0.01):
                        await link.keys("train")
                except TimeoutError:
                    continue

        asyncio.run(whole())

    waiting = [run_in_daemon_thread(ask_on) for _ in range(8)]
    wait_for_requests(controller, 20)
    link.close()
    for one in waiting:
        with pytest.raises(DataPlaneError, match="closed"):
            one.result(timeout=10)


def test_a_link_without_waiting_calls_is_closed_at_once(
    controller: MuteController, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the link's loop finishes its last call before the closing thread continues: nothing would wake it
    later."""
    link, submit = QueueLink.connect(controller.address), asyncio.run_coroutine_threadsafe

    def submit_and_dawdle(*call: Any) -> Future[Any]:
        submitted = submit(*call)
        time.sleep(0.3)
        return submitted

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_and_dawdle)
    began = time.monotonic()
    link.close()
    assert time.monotonic() - began < 4 and not caplog.records
