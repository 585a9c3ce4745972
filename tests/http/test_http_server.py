"""The listener and what reaches it as bytes."""

from __future__ import annotations

import json
import socket

import pytest
import trio
from trio.testing import MockClock

from superfluidd.daemon.service import Service
from superfluidd.errors import AlreadyRunning, UsageError
from superfluidd.http import body
from superfluidd.http.server import open_listener, url
from tests.http.raw import Server, until

CHAT = "/v1/chat/completions"


@pytest.fixture
def autojump_clock() -> MockClock:
    """Megabytes through a socket take a moment in which nothing is ready; that is not the time to jump."""
    return MockClock(autojump_threshold=0.02)


def test_an_address_in_use_is_said_so() -> None:
    with open_listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(AlreadyRunning, match=f"127.0.0.1:{port} is in use.*--http"):
            open_listener("127.0.0.1", port)
    # SO_REUSEADDR: a restart does not have to wait.
    open_listener("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".invalid", "..", "bad host"])
def test_a_host_that_does_not_resolve_is_a_usage_error(host: str) -> None:
    with pytest.raises(UsageError, match="cannot resolve"):
        open_listener(host, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_urls_are_written_for_both_families() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        assert url(listener, "127.0.0.1") == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert url(listener, "::1") == f"http://[::1]:{listener.getsockname()[1]}"


async def test_a_body_over_the_limit_is_a_413_that_arrives(autojump_clock: MockClock, server: Server) -> None:
    """The whole body is sent by a client that does not look for an answer before it is done."""
    client = await server.connect()
    status, data = await client.ask("POST", CHAT, b" " * (body.MAX_BODY + 1))
    assert (status, json.loads(data)["error"]["code"]) == (413, "payload_too_large")
    assert (await client.ask("GET", "/livez"))[0] == 200


async def test_a_chunked_body_is_limited_as_well(
    autojump_clock: MockClock, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "MAX_BODY", 1 << 20)
    client = await server.connect()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    await client.stream.send_all(head + b"10000\r\n" + b" " * 65536 + b"\r\n")
    for _ in range(20):
        await client.stream.send_all(b"10000\r\n" + b" " * 65536 + b"\r\n")
    await client.stream.send_all(b"0\r\n\r\n")
    assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 413")


async def test_a_body_that_never_comes_is_a_408(autojump_clock: MockClock, server: Server) -> None:
    client = await server.connect()
    started = trio.current_time()
    await client.stream.send_all(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
    assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 408")
    assert trio.current_time() - started == pytest.approx(60, abs=1)


async def test_an_idle_connection_and_half_a_header_are_closed(autojump_clock: MockClock, server: Server) -> None:
    silent, slow, used = [await server.connect() for _ in range(3)]
    assert (await used.ask("GET", "/livez"))[0] == 200
    await slow.stream.send_all(b"POST /v1/chat")
    started = trio.current_time()
    assert await silent.stream.receive_some() == b""
    assert await slow.stream.receive_some() == b""
    assert await used.stream.receive_some() == b""
    assert trio.current_time() - started == pytest.approx(75, abs=1)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_hurts_nobody(autojump_clock: MockClock, server: Server, data: bytes) -> None:
    client = await server.connect()
    try:
        await client.stream.send_all(data)
        answer = await client.stream.receive_some()
    except trio.BrokenResourceError:
        answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    other = await server.connect()
    assert (await other.ask("GET", "/livez"))[0] == 200


async def test_connections_are_kept_alive(autojump_clock: MockClock, server: Server, service: Service) -> None:
    client = await server.connect()
    for _ in range(3):
        status, data = await client.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        assert (status, json.loads(data)["usage"]["completion_tokens"]) == (200, 3)
    await until(lambda: not service.lanes())
