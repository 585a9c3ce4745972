"""The control plane over a real Unix socket: on virtual time with the real service, and with a fake one."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from superfluidd.control import listener, protocol, server
from superfluidd.control.peer import HasOptions, Peer
from superfluidd.daemon.service import Service
from superfluidd.daemon.streams import Generation, GenerationRequest
from superfluidd.types import QosClass, SamplingParams
from tests.control.fakes import FakeService

PROMPT = tuple(range(97, 107))


class Line:
    """A client that speaks a line at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer = b""

    async def __aenter__(self) -> Self:
        self.stream = await trio.open_unix_socket(self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stream.aclose()

    async def send(self, method: str, ident: Any = 1, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "id": ident, "method": method, "params": params}
        await self.stream.send_all(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Any:
        """The next message; None at the end."""
        while b"\n" not in self._buffer:
            data = await self.stream.receive_some(65536)
            if not data:
                assert not self._buffer
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    async def call(self, method: str, **params: Any) -> Any:
        await self.send(method, **params)
        return (await self.receive())["result"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "control.sock"


@pytest.fixture
async def control(nursery: trio.Nursery, service: Service, path: Path) -> AsyncIterator[Path]:
    """The control plane over ``service``."""
    await nursery.start(server.serve, server.open_listener(path), service)
    yield path
    nursery.cancel_scope.cancel()


@pytest.fixture
def fake() -> FakeService:
    return FakeService()


@pytest.fixture
async def faked(nursery: trio.Nursery, fake: FakeService, path: Path) -> AsyncIterator[Path]:
    """The control plane over ``fake``."""
    await nursery.start(server.serve, server.open_listener(path), fake.as_service())
    yield path
    nursery.cancel_scope.cancel()


def submit(service: Service, count: int, origin: str = "", qos: QosClass = QosClass.AGENT) -> Generation:
    return service.resolve(None).submit(
        GenerationRequest(
            prompt=PROMPT,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=count,
            origin=origin,
            qos=qos,
        )
    )


async def test_it_shows_what_runs_and_what_waits(autojump_clock: MockClock, service: Service, control: Path) -> None:
    for number in range(6):
        submit(service, 200, f"req-{number}", QosClass.INTERACTIVE if number == 5 else QosClass.AGENT)
    await trio.sleep(0.5)
    async with Line(control) as line:
        status = await line.call("status")
        assert (status["pid"], status["draining"], status["schema"]) == (os.getpid(), False, 1)
        [model] = status["models"]
        assert (model["lanes_busy"], model["queued"], model["state"]) == (4, 2, "ready")
        lanes = (await line.call("lanes"))["lanes"]
        queue = (await line.call("queue"))["queue"]
    assert [lane["lane"] for lane in lanes] == [0, 1, 2, 3]
    assert all(lane["phase"] == "decode" and lane["prompt"] == len(PROMPT) for lane in lanes)
    assert len(queue) == 2
    assert {row["origin"] for row in lanes + queue} == {f"req-{number}" for number in range(6)}


async def test_cancel_by_number_and_by_name(autojump_clock: MockClock, service: Service, control: Path) -> None:
    kept = submit(service, 50, "kept")
    first = submit(service, 500, "twice")
    second = submit(service, 500, "twice")
    third = submit(service, 500, "third")
    await trio.sleep(0.2)
    async with Line(control) as line:
        assert (await line.call("cancel", id="twice"))["cancelled"] == [first.id, second.id]
        assert (await line.call("cancel", id=str(third.id)))["cancelled"] == [third.id]
        await line.send("cancel", id="twice")
        assert (await line.receive())["error"]["data"] == "request_not_found"
        await trio.sleep(0.2)
        assert [lane["request"] for lane in (await line.call("lanes"))["lanes"]] == [kept.id]


async def test_drain_returns_at_once_and_with_wait_when_nothing_is_left(
    autojump_clock: MockClock, service: Service, control: Path
) -> None:
    for _ in range(5):
        submit(service, 100)
    await trio.sleep(0.2)
    async with Line(control) as line, Line(control) as other:
        start = trio.current_time()
        assert await line.call("drain") == {"running": 4, "queued": 1, "schema": 1}
        assert trio.current_time() == start
        await line.send("drain", wait=True)
        assert len((await other.call("lanes"))["lanes"]) == 4, "a waiting call held up another connection"
        assert (await other.call("status"))["draining"]
        assert (await line.receive())["result"] == {"running": 0, "queued": 0, "schema": 1}
        assert trio.current_time() > start + 1
        assert (await other.call("lanes"))["lanes"] == []
    assert service.draining


async def test_requests_of_a_connection_are_answered_in_order(
    autojump_clock: MockClock, fake: FakeService, faked: Path
) -> None:
    async with Line(faked) as line:
        await line.send("drain", "first", wait=True)
        await line.send("status", "second")
        await line.send("nonsense", "third")
        with trio.move_on_after(5) as scope:
            await line.receive()
        assert scope.cancelled_caught, "something was answered while the first call waits"
        fake.idle.set()
        assert [(await line.receive())["id"] for _ in range(3)] == ["first", "second", "third"]


async def test_messages_may_come_in_any_pieces(autojump_clock: MockClock, faked: Path) -> None:
    one = b'{"jsonrpc":"2.0","id":1,"method":"lanes"}'
    async with Line(faked) as line:
        for byte in one + b"\r\n":
            await line.stream.send_all(bytes([byte]))
            await wait_all_tasks_blocked()
        assert (await line.receive())["id"] == 1
        await line.stream.send_all(b"\n\n" + one + b"\n  \n" + one + b"\n" + one)
        await line.stream.send_eof()
        for _ in range(3):
            assert (await line.receive())["id"] == 1
        assert await line.receive() is None


async def test_a_client_that_only_stopped_sending_gets_its_answer(
    autojump_clock: MockClock, fake: FakeService, faked: Path
) -> None:
    async with Line(faked) as line:
        await line.send("drain", wait=True)
        await line.stream.send_eof()
        await trio.sleep(100)
        fake.idle.set()
        assert (await line.receive())["result"]["running"] == 1
        assert await line.receive() is None


async def test_a_bad_line_leaves_the_connection_alive(autojump_clock: MockClock, faked: Path) -> None:
    async with Line(faked) as line:
        await line.stream.send_all(b"{nonsense\n\xff\xff\n")
        for _ in range(2):
            assert (await line.receive())["error"]["code"] == protocol.PARSE_ERROR
        assert (await line.call("lanes"))["lanes"]


async def test_the_longest_line_passes_and_a_longer_one_closes_the_connection(
    autojump_clock: MockClock, faked: Path
) -> None:
    start = b'{"jsonrpc":"2.0","id":1,"method":"lanes","more":"'
    longest = start + b"x" * (protocol.MAX_LINE - len(start) - 2) + b'"}'
    assert len(longest) == protocol.MAX_LINE
    async with Line(faked) as line, Line(faked) as other, Line(faked) as endless:
        await line.stream.send_all(longest + b"\n")
        assert "result" in await line.receive()
        await other.stream.send_all(longest + b" \n")
        error = (await other.receive())["error"]
        assert (error["code"], error["data"]) == (protocol.REFUSED, "payload_too_large")
        assert str(protocol.MAX_LINE) in error["message"]
        assert await other.receive() is None
        with pytest.raises(trio.BrokenResourceError):
            await endless.stream.send_all(b"x" * 16 * protocol.MAX_LINE)
        assert (await line.call("lanes"))["lanes"]


async def test_a_client_that_never_reads_blocks_nobody_and_is_dropped(autojump_clock: MockClock, faked: Path) -> None:
    async with Line(faked) as deaf, Line(faked) as line:
        with trio.move_on_after(1):
            while True:
                await deaf.send("status")
        assert (await line.call("lanes"))["lanes"]
        await trio.sleep(server.WRITE_PATIENCE + 1)
        with pytest.raises(trio.BrokenResourceError):
            await deaf.send("status")
        assert (await line.call("lanes"))["lanes"]


async def test_one_connection_too_many_is_told_so(autojump_clock: MockClock, faked: Path) -> None:
    lines = [Line(faked) for _ in range(server.CONNECTIONS)]
    async with Line(faked) as first:
        await first.call("lanes")
        for line in lines[1:]:
            await line.__aenter__()
        await wait_all_tasks_blocked()
        async with Line(faked) as extra:
            error = (await extra.receive())["error"]
            assert (error["code"], error["data"]) == (protocol.REFUSED, "busy")
            assert str(server.CONNECTIONS) in error["message"]
            assert await extra.receive() is None
        assert (await lines[-1].call("lanes"))["lanes"]
        for line in lines[1:]:
            await line.stream.aclose()
        await wait_all_tasks_blocked()
        async with Line(faked) as extra:
            assert (await extra.call("lanes"))["lanes"]


async def test_clients_that_leave_a_waiting_call_leave_nothing_behind(autojump_clock: MockClock, faked: Path) -> None:
    for _ in range(server.CONNECTIONS):
        async with Line(faked) as line:
            await line.send("drain", wait=True)
            await line.send("lanes")
            await wait_all_tasks_blocked()
    await trio.sleep(2 * server.GONE_INTERVAL)
    async with Line(faked) as line:
        assert (await line.call("lanes"))["lanes"]


@pytest.mark.parametrize("uid, allowed", [(os.geteuid(), True), (0, True), (os.geteuid() + 4321, False)])
async def test_only_the_daemons_own_user_and_root_may_call(
    autojump_clock: MockClock, nursery: trio.Nursery, fake: FakeService, path: Path, uid: int, allowed: bool
) -> None:
    def credentials(sock: HasOptions) -> Peer:
        return Peer(uid, 1)

    await nursery.start(partial(server.serve, server.open_listener(path), fake.as_service(), credentials=credentials))
    async with Line(path) as line:
        await line.send("drain")
        reply = await line.receive()
        assert ("result" in reply) == fake.drained == allowed
        if not allowed:
            assert reply["error"]["data"] == "permission_denied"
            assert f"uid {uid} " in reply["error"]["message"]
    nursery.cancel_scope.cancel()


async def test_a_peer_that_the_kernel_does_not_name_is_not_served(
    autojump_clock: MockClock, nursery: trio.Nursery, fake: FakeService, path: Path
) -> None:
    def credentials(sock: HasOptions) -> Peer:
        raise OSError("nobody knows")

    await nursery.start(partial(server.serve, server.open_listener(path), fake.as_service(), credentials=credentials))
    for _ in range(2):
        async with Line(path) as line:
            assert await line.receive() is None
    nursery.cancel_scope.cancel()


async def test_the_file_goes_with_the_server(autojump_clock: MockClock, fake: FakeService, path: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, server.open_listener(path), fake.as_service())
        async with Line(path) as line:
            await line.call("lanes")
            await line.send("drain", wait=True)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert listener.identify(path) is None


async def test_another_daemons_file_stays(autojump_clock: MockClock, fake: FakeService, path: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, server.open_listener(path), fake.as_service())
        listener.remove(path, listener.identify(path))
        with server.open_listener(path):
            nursery.cancel_scope.cancel()
    assert listener.identify(path) is not None


@settings(max_examples=30, deadline=None)
@given(chunks=st.lists(st.binary(max_size=300) | st.sampled_from([b"\n", b"{}", b"[", b"null\n"]), max_size=8))
def test_garbage_ends_nothing_but_itself(chunks: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "c"

    async def play() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, server.open_listener(path), FakeService().as_service())
            async with Line(path) as line, Line(path) as other:
                for chunk in chunks:
                    await line.stream.send_all(chunk)
                await line.stream.send_all(b"\n")
                await line.send("lanes", "last")
                while (await line.receive())["id"] != "last":
                    pass
                assert (await other.call("lanes"))["lanes"]
            nursery.cancel_scope.cancel()

    trio.run(play)
    assert not path.exists()


async def test_a_listener_from_elsewhere_is_served_too(
    autojump_clock: MockClock, fake: FakeService, path: Path
) -> None:
    """As a service manager would hand over."""
    path.parent.mkdir()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(1)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listening, fake.as_service())
        async with Line(path) as line:
            assert (await line.call("lanes"))["lanes"]
        nursery.cancel_scope.cancel()
    assert listening.fileno() == -1
