"""sfctl's client against a peer that behaves in every wrong way."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from sfctl.client import Client
from sfctl.errors import NoDaemon, Refused, Usage

from superfluidd.control import paths
from superfluidd.control.protocol import DrainParams, DrainResult, NoParams, QueueResult
from tests.control.fakes import WAITING

Behaviour = Callable[[socket.socket], None]


@contextlib.contextmanager
def peer(path: Path, behave: Behaviour) -> Iterator[None]:
    """Something that listens, takes one connection and behaves like that."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            behave(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(10)
        listener.close()
    assert not thread.is_alive()


def says(*lines: bytes) -> Behaviour:
    """Reads a request and says that, whatever it was."""

    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        for line in lines:
            connection.sendall(line)

    return behave


def call(path: Path, patience: float = 10.0) -> QueueResult:
    with Client([path], trusted=True, patience=patience) as client:
        return client.call("queue", NoParams(), QueueResult).result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c"


def result(**members: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "result": members}).encode() + b"\n"


def test_an_answer_in_pieces(path: Path) -> None:
    whole = result(queue=[], schema=1)
    with peer(path, says(*(bytes([byte]) for byte in whole))):
        assert call(path) == QueueResult(())


def test_members_of_a_newer_daemon_are_ignored_and_kept_in_json(path: Path) -> None:
    with peer(path, says(result(queue=[], schema=2, novelty=[1]))), Client([path], trusted=True) as client:
        answer = client.call("queue", NoParams(), QueueResult)
    assert answer.result == QueueResult((), schema=2)
    assert json.loads(answer.raw) == {"queue": [], "schema": 2, "novelty": [1]}


def test_an_answer_this_version_cannot_read(path: Path) -> None:
    with peer(path, says(result(queue=[{"model": 3}]))), pytest.raises(Refused, match=r"another version.*--json"):
        call(path)


def test_a_refusal(path: Path) -> None:
    line = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"no such thing","data":"gone"}}\n'
    with peer(path, says(line)), pytest.raises(Refused, match="no such thing") as caught:
        call(path)
    assert caught.value.code == "gone"


def test_a_refusal_before_the_request_could_be_sent(path: Path) -> None:
    def behave(connection: socket.socket) -> None:
        connection.sendall(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"too many","data":"busy"}}\n')
        connection.close()
        closed.set()

    closed = threading.Event()
    with peer(path, behave), Client([path], trusted=True) as client:
        assert closed.wait(10)
        with pytest.raises(Refused, match="too many"):
            client.call("queue", NoParams(), QueueResult)


def test_a_method_the_daemon_does_not_know(path: Path) -> None:
    line = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no method","data":"method_not_found"}}\n'
    with peer(path, says(line)), pytest.raises(Refused, match="older than this sfctl"):
        call(path)


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\xff\xff\n",
        b"[]\n",
        b'{"jsonrpc":"2.0","id":1}\n',
        b'{"jsonrpc":"2.0","id":2,"result":{"queue":[]}}\n',
    ],
)
def test_somebody_else_listens_there(path: Path, line: bytes) -> None:
    with peer(path, says(line)), pytest.raises(NoDaemon, match="does not speak the control protocol"):
        call(path)


def test_a_daemon_that_goes_away(path: Path) -> None:
    with peer(path, says(b'{"jsonrpc"')), pytest.raises(NoDaemon, match="went away before it answered"):
        call(path)


@pytest.mark.process
def test_a_daemon_that_does_not_answer(path: Path) -> None:
    done = threading.Event()

    def behave(connection: socket.socket) -> None:
        done.wait(10)

    with peer(path, behave):
        with pytest.raises(NoDaemon, match=rf"\(pid {os.getpid()}\) .*has not answered for 0.05 s; it may be stopped"):
            call(path, patience=0.05)
        done.set()


@pytest.mark.process
def test_a_call_that_waits_is_not_cut_short(path: Path) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        threading.Event().wait(0.2)
        connection.sendall(result(running=0, queued=0))

    with peer(path, behave), Client([path], trusted=True, patience=0.05) as client:
        assert client.call("drain", DrainParams(True), DrainResult, waits=True).result == DrainResult(0, 0)


def test_nobody_is_there(tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    with pytest.raises(NoDaemon) as caught:
        Client([tmp_path / "none", stale], trusted=True)
    message = str(caught.value)
    assert f"{tmp_path / 'none'} (no such socket)" in message
    assert f"{stale} (the daemon that made it is gone)" in message
    assert "`superfluidd serve`" in message


def test_the_first_that_answers_is_taken(tmp_path: Path, path: Path) -> None:
    with peer(path, says(result(queue=[]))), Client([tmp_path / "none", path], trusted=True) as client:
        assert client.path == path
        client.call("queue", NoParams(), QueueResult)


def test_a_path_that_cannot_be_a_sockets() -> None:
    with pytest.raises(Usage, match="longer than"):
        Client([Path("/" + "x" * paths.LONGEST)], trusted=True)


def test_a_planted_socket_is_not_spoken_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted").chmod(0o777)
    path = tmp_path / "planted" / "c"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(NoDaemon, match=r"not trusted: others may write"):
            Client([path], trusted=False)
        with Client([path], trusted=True):
            pass


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may open every socket; be somebody else for a moment."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_socket_of_another_user_names_that_user(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        uid = os.geteuid()
        owner = f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
        with unprivileged(), pytest.raises(Refused, match="sudo") as caught:
            Client([path], trusted=True)
    assert f"belongs to {owner} " in str(caught.value)


def test_waiting_requests_come_typed(path: Path) -> None:
    line = b'{"jsonrpc":"2.0","id":1,"result":' + msgspec.json.encode(QueueResult((WAITING,))) + b"}\n"
    with peer(path, says(line)):
        assert call(path).queue == (WAITING,)
