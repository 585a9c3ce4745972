"""Streams over time: signs of life, pauses, late errors, clients that leave or stop reading. Loopback sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
from quart_trio import QuartTrio
from trio.testing import MockClock

from superfluidd.daemon.service import Service
from tests.conftest import Simulated, simulated_spec
from tests.http.raw import RawClient, Server, frames, text_of, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LONG: dict[str, Any] = {"messages": HELLO, "ignore_eos": True}


@pytest.fixture
def simulated(request: pytest.FixtureRequest) -> Simulated:
    """A tenth of the usual speed unless a test asks for another: a window of 1024 tokens takes minutes of virtual
    time."""
    return Simulated(msgspec.structs.replace(simulated_spec(), simulated_speed=getattr(request, "param", 0.1)))


def idle(service: Service) -> bool:
    """No lane is in use and no KV is promised."""
    (view,) = service.status().models
    return not service.lanes() and not service.queue() and view.cells_promised == 0


async def occupy(server: Server, service: Service, lanes: int = 4) -> list[RawClient]:
    """Fill the lanes with endless streams."""
    clients = [await server.connect() for _ in range(lanes)]
    for client in clients:
        await client.send("POST", CHAT, {**LONG, "stream": True})
        await client.response()
    await until(lambda: len(service.lanes()) == lanes)
    return clients


async def test_a_stream_of_more_than_a_minute_is_not_cut(autojump_clock: MockClock, server: Server) -> None:
    client = await server.connect()
    started = trio.current_time()
    status, data = await client.ask("POST", CHAT, {**LONG, "stream": True})
    chunks = frames(data)
    assert status == 200
    assert trio.current_time() - started > 80
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_queued_stream_shows_signs_of_life(autojump_clock: MockClock, server: Server, service: Service) -> None:
    await occupy(server, service)
    waiting = await server.connect()
    await waiting.send("POST", CHAT, {**LONG, "max_tokens": 4, "stream": True})
    assert (await waiting.response()).status_code == 200
    started = trio.current_time()
    comment = b": queued class=agent position=1\n\n"
    seen = await waiting.until(comment + comment)
    assert 3 < trio.current_time() - started <= 5
    assert b'"role":"assistant"' in seen
    assert text_of(frames(seen)) == ""


@pytest.mark.parametrize("simulated", [0.001], indirect=True)
async def test_a_decoding_stream_that_falls_silent_shows_signs_of_life(
    autojump_clock: MockClock, server: Server, service: Service
) -> None:
    client = await server.connect()
    _, seen = await client.ask("POST", CHAT, {**LONG, "max_tokens": 8, "stream": True})
    gaps = seen.split(b'"content":')[2:-1]  # the first one opens the message
    assert len(gaps) > 1
    assert all(b": decoding class=agent" in gap for gap in gaps), "seconds pass between two tokens"
    assert frames(seen)[-1] == "[DONE]"


async def test_a_lost_engine_pauses_a_stream_and_nothing_is_repeated(
    autojump_clock: MockClock, server: Server, service: Service, simulated: Simulated
) -> None:
    client = await server.connect()
    _, uncut = await client.ask("POST", CHAT, {**LONG, "max_tokens": 60, "stream": True})
    await client.send("POST", CHAT, {**LONG, "max_tokens": 60, "stream": True})
    await until(lambda: any(lane.generated > 20 for lane in service.lanes()))
    simulated.engines[-1].die("killed by a test")
    await client.response()
    data = await client.rest()
    assert b": paused class=agent position=1\n\n" in data
    assert text_of(frames(data)) == text_of(frames(uncut))
    assert len(simulated.engines) == 2


async def test_a_model_that_fails_in_mid_stream_is_an_error_frame(
    autojump_clock: MockClock, server: Server, service: Service, simulated: Simulated
) -> None:
    (client,) = await occupy(server, service, 1)
    await until(lambda: service.lanes()[0].generated > 5)

    async def kill() -> None:
        while service.status().models[0].state != "failed":
            if not simulated.engines[-1].lost:
                simulated.engines[-1].die("killed by a test")
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        *_, error, done = frames(await client.rest())
    assert (error["error"]["code"], done) == ("model_failed", "[DONE]")
    other = await server.connect()
    status, data = await other.ask("POST", CHAT, {**LONG, "stream": True})
    assert status == 503
    assert b"model_failed" in data
    assert (await other.ask("GET", "/health"))[0] == 503
    assert (await other.ask("GET", "/livez"))[0] == 200


def queued(service: Service) -> bool:
    return bool(service.queue())


def prefilling(service: Service) -> bool:
    return any(lane.phase == "prefill" for lane in service.lanes())


def decoding(service: Service) -> bool:
    return any(lane.phase == "decode" and lane.generated > 3 for lane in service.lanes())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("where", [queued, prefilling, decoding])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_frees_its_lane(
    autojump_clock: MockClock,
    server: Server,
    service: Service,
    where: Callable[[Service], bool],
    streams: bool,
    n: int,
    how: str,
) -> None:
    others = await occupy(server, service) if where is queued else []
    client = await server.connect()
    content = "x" * 900 if where is prefilling else "Hello"
    await client.send(
        "POST",
        CHAT,
        {"messages": [{"role": "user", "content": content}], "ignore_eos": True, "stream": streams, "n": n},
        x_request_id="leaver",
    )
    await until(lambda: where(service))
    if how == "reset":
        client.stream.setsockopt(*RESET)
    await client.stream.aclose()
    # A step is 90 to 120 ms here, a full prefill step of 512 tokens 13 s.
    took = await until(lambda: not any(view.origin == "leaver" for view in (*service.queue(), *service.lanes())))
    assert took < 0.1
    for other in others:
        await other.stream.aclose()
    await until(lambda: idle(service))


RESET = (1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")
"""SO_LINGER of zero seconds on SOL_SOCKET: close with a reset."""


async def test_a_client_that_leaves_before_its_response_began_frees_its_lane(
    autojump_clock: MockClock, app: QuartTrio, service: Service
) -> None:
    """The handler has returned the stream, and nothing of it has been started."""
    gone = trio.Event()
    body = msgspec.json.encode({**LONG, "stream": True})
    incoming: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message["type"] == "http.response.start"
        gone.set()
        await trio.sleep_forever()

    scope: Any = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "extensions": {},
        "asgi": {"version": "3.0"},
        "state": {},
    }
    with trio.fail_after(5):
        await app(scope, receive, send)
    await until(lambda: idle(service))


async def read_into(read: list[bytes], client: RawClient) -> None:
    """Everything that comes, until the connection ends."""
    while piece := await client.stream.receive_some():
        read.append(piece)


async def test_a_reader_that_stops_slows_nobody_and_is_dropped(
    autojump_clock: MockClock, server: Server, service: Service
) -> None:
    stopped = await server.connect(receive_buffer=4096)
    # Log-probabilities make a token kilobytes long: the kernel's buffers are full long before the window.
    await stopped.send("POST", CHAT, {**LONG, "stream": True, "n": 2, "logprobs": True, "top_logprobs": 20})
    await until(lambda: bool(service.lanes()))
    neighbour = await server.connect()
    started = trio.current_time()
    status, data = await neighbour.ask("POST", CHAT, {**LONG, "stream": True, "max_tokens": 500})
    with_it = trio.current_time() - started
    assert status == 200
    await until(lambda: idle(service))
    assert trio.current_time() - started < 200
    started = trio.current_time()
    _, alone = await neighbour.ask("POST", CHAT, {**LONG, "stream": True, "max_tokens": 500})
    assert text_of(frames(alone)) == text_of(frames(data))
    # Its two lanes make a round 11 instead of 9 parts long; its not reading adds nothing.
    assert with_it < (trio.current_time() - started) * 1.3
    read: list[bytes] = []
    with pytest.raises(trio.BrokenResourceError):
        await read_into(read, stopped)
    assert b"[DONE]" not in b"".join(read)


async def test_a_reader_that_stops_does_not_hold_up_a_shutdown(
    autojump_clock: MockClock, server: Server, service: Service
) -> None:
    stopped = await server.connect(receive_buffer=4096)
    await stopped.send("POST", CHAT, {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20})
    # Far more than the buffers between the two hold.
    await until(lambda: any(lane.generated > 400 for lane in service.lanes()))
    started = trio.current_time()
    server.shutdown.set()
    await server.stopped.wait()
    assert trio.current_time() - started == pytest.approx(3.0, abs=0.5)
    await until(lambda: idle(service))
    await stopped.stream.aclose()


async def test_a_shutdown_lets_running_replies_end(autojump_clock: MockClock, server: Server, service: Service) -> None:
    client, resting = await server.connect(), await server.connect()
    assert (await resting.ask("GET", "/livez"))[0] == 200
    await client.send("POST", CHAT, {**LONG, "max_tokens": 20, "stream": True})
    await until(lambda: any(lane.generated > 2 for lane in service.lanes()))
    server.shutdown.set()
    assert await resting.stream.receive_some() == b""
    await client.response()
    chunks = frames(await client.rest())
    assert (chunks[-2]["choices"][0]["finish_reason"], chunks[-1]) == ("length", "[DONE]")
    await server.stopped.wait()
    with pytest.raises(OSError):
        await server.connect()
