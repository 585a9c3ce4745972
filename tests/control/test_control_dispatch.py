"""One line in, one line out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from superfluidd.control import dispatch, protocol
from superfluidd.control.peer import Peer
from superfluidd.errors import PermissionDenied
from tests.control.fakes import LANE, MEMORY, MODEL, PINS, PRESSURE, STATUS, WAITING, FakeService

OWNER = 1000
ME = Peer(OWNER, 99)

Result = TypeVar("Result")


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that does not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("it waits for something")


def answer(line: bytes, service: FakeService | None = None, who: Peer = ME) -> Any:
    """The decoded response; None where there is none."""
    reply = finish(dispatch.answer(line, (service or FakeService()).as_service(), who, OWNER))
    if reply is None:
        return None
    assert reply.endswith(b"\n")
    assert reply.count(b"\n") == 1
    return json.loads(reply)


def ask(method: str, params: Any = None, who: Peer = ME, service: FakeService | None = None) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": method} | ({} if params is None else {"params": params})
    return answer(json.dumps(message).encode(), service, who)


def test_every_row_of_the_method_table_has_a_handler() -> None:
    assert list(dispatch.HANDLERS) == [method.name for method in protocol.METHODS]


@pytest.mark.parametrize(
    "method, params, expected",
    [
        ("status", None, STATUS),
        ("status", {}, STATUS),
        ("lanes", None, protocol.LanesResult((LANE,))),
        ("queue", None, protocol.QueueResult((WAITING,))),
        ("models", None, protocol.ModelsResult((MODEL,))),
        ("load", {"model": "m"}, protocol.ModelResult(MODEL)),
        ("unload", {"model": "m"}, protocol.ModelResult(MODEL)),
        ("pressure", None, PRESSURE),
        ("mem", None, MEMORY),
        ("pins", None, PINS),
        ("pin", {"id": "7"}, PINS),
        ("unpin", {"id": "7"}, PINS),
        ("cancel", {"id": "7"}, protocol.CancelResult((7,))),
        ("drain", None, protocol.DrainResult(1, 1)),
        ("drain", {"wait": False}, protocol.DrainResult(1, 1)),
    ],
)
def test_round_trip(method: str, params: Any, expected: msgspec.Struct) -> None:
    reply = ask(method, params)
    assert reply.keys() == {"jsonrpc", "id", "result"}
    assert (reply["jsonrpc"], reply["id"]) == ("2.0", 1)
    assert msgspec.convert(reply["result"], dispatch.METHODS[method].result) == expected
    assert reply["result"]["schema"] == protocol.SCHEMA


@pytest.mark.parametrize("ident", [0, -1, 2**62, "a", "", None])
def test_an_answer_carries_the_requests_id(ident: Any) -> None:
    reply = answer(json.dumps({"jsonrpc": "2.0", "id": ident, "method": "lanes"}).encode())
    assert reply["id"] == ident
    assert "result" in reply


def test_a_notification_is_done_and_not_answered() -> None:
    service = FakeService()
    assert answer(b'{"jsonrpc":"2.0","method":"drain"}', service) is None
    assert service.drained
    assert answer(b'{"jsonrpc":"2.0","method":"nonsense"}') is None
    assert answer(b'{"jsonrpc":"2.0","method":"cancel","params":{"id":"no"}}') is None


@pytest.mark.parametrize(
    "line, code, ident",
    [
        (b"hello", protocol.PARSE_ERROR, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"status"', protocol.PARSE_ERROR, None),
        (b"\xff\xfe", protocol.PARSE_ERROR, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"\\ud800"}', protocol.PARSE_ERROR, None),
        (b'{"x":' * 100_000, protocol.PARSE_ERROR, None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"status"}]', protocol.INVALID_REQUEST, None),
        (b"[]", protocol.INVALID_REQUEST, None),
        (b"42", protocol.INVALID_REQUEST, None),
        (b"null", protocol.INVALID_REQUEST, None),
        (b'{"id":3,"method":"status"}', protocol.INVALID_REQUEST, 3),
        (b'{"jsonrpc":"1.0","id":"x","method":"status"}', protocol.INVALID_REQUEST, "x"),
        (b'{"jsonrpc":"2.0","id":{},"method":"status"}', protocol.INVALID_REQUEST, None),
        (b'{"jsonrpc":"2.0","id":4}', protocol.INVALID_REQUEST, 4),
        (b'{"jsonrpc":"2.0","id":5,"method":"Status"}', protocol.METHOD_NOT_FOUND, 5),
        (b'{"jsonrpc":"2.0","id":6,"method":"cancel"}', protocol.INVALID_PARAMS, 6),
        (b'{"jsonrpc":"2.0","id":7,"method":"cancel","params":["7"]}', protocol.INVALID_PARAMS, 7),
        (b'{"jsonrpc":"2.0","id":8,"method":"cancel","params":null}', protocol.INVALID_PARAMS, 8),
    ],
)
def test_what_is_no_good_request_gets_the_right_error(line: bytes, code: int, ident: Any) -> None:
    reply = answer(line)
    assert reply.keys() == {"jsonrpc", "id", "error"}
    assert (reply["error"]["code"], reply["id"]) == (code, ident)
    assert reply["error"]["message"]


@pytest.mark.parametrize(
    "method, params, named",
    [
        ("cancel", {"id": 7}, "params.id"),
        ("cancel", {}, "`id`"),
        ("cancel", {"id": "7", "force": True}, "`force`"),
        ("drain", {"wait": "yes"}, "params.wait"),
        ("pin", {"id": "7", "ttl": "10m"}, "params.ttl"),
        ("pin", {}, "`id`"),
        ("unpin", {"id": "7", "ttl": 3}, "`ttl`"),
        ("status", {"verbose": True}, "`verbose`"),
    ],
)
def test_bad_parameters_are_named(method: str, params: Any, named: str) -> None:
    error = ask(method, params)["error"]
    assert error["code"] == protocol.INVALID_PARAMS
    assert error["data"] == "invalid_value"
    assert method in error["message"]
    assert named in error["message"]


def test_a_batch_is_told_what_to_do_instead() -> None:
    assert "one request a line" in answer(b" [1]")["error"]["message"]


def test_an_unknown_method_is_told_the_known_ones() -> None:
    assert "status, lanes, queue, cancel, drain" in ask("top")["error"]["message"]


def test_a_refusal_carries_the_errors_stable_name() -> None:
    error = ask("cancel", {"id": "none"})["error"]
    assert error == {"code": protocol.REFUSED, "message": "no request none", "data": "request_not_found"}


def test_a_bug_is_an_internal_error_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = ask("cancel", {"id": "bug"})["error"]
    assert (error["code"], error["data"]) == (protocol.INTERNAL_ERROR, "internal_error")
    assert "ZeroDivisionError" not in error["message"]
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("method", [*dispatch.METHODS, "nonsense"])
def test_a_stranger_may_do_nothing(method: str) -> None:
    service = FakeService()
    error = ask(method, {"id": "7"} if method == "cancel" else None, Peer(4321, 1), service)["error"]
    assert (error["code"], error["data"]) == (protocol.REFUSED, "permission_denied")
    assert "uid 4321" in error["message"]
    assert not service.drained
    assert not service.cancelled


def test_root_may_do_everything() -> None:
    assert "result" in ask("cancel", {"id": "7"}, Peer(0, 1))


def test_roles_are_compared_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "role_of", lambda peer, owner: "observer")
    service = FakeService()
    params: dict[str, dict[str, object]] = {
        "cancel": {"id": "7"},
        "explain": {"id": "7"},
        "set_caps": {"caps": {"background": 2}},
        "set_qos": {"id": "7", "qos": "agent"},
        "pause": {"qos": "agent"},
        "resume": {"qos": "agent"},
        "trace": {"cursor": -1},
        "load": {"model": "m"},
        "unload": {"model": "m"},
        "pin": {"id": "7"},
        "unpin": {"id": "7"},
    }
    for method in protocol.METHODS:
        reply = ask(method.name, params.get(method.name), service=service)
        assert ("result" in reply) == (method.role == "observer"), method.name
    assert not service.drained
    assert not service.cancelled
    assert not service.steered
    with pytest.raises(PermissionDenied, match="takes an admin"):
        dispatch.authorize(ME, OWNER, dispatch.METHODS["drain"])


def test_files_are_loaded_from_here_and_a_model_is_unloaded_with_or_without_patience() -> None:
    service = FakeService()
    ask("load", {"model": "/m.gguf"}, service=service)
    ask("unload", {"model": "m"}, service=service)
    ask("unload", {"model": "m", "now": True}, service=service)
    assert service.steered == [("load", "/m.gguf", True), ("unload", "m", False), ("unload", "m", True)]


def test_a_pins_time_reaches_the_service() -> None:
    service = FakeService()
    ask("pin", {"id": "chat", "ttl": 90.5}, service=service)
    ask("pin", {"id": "chat"}, service=service)
    ask("unpin", {"id": "chat"}, service=service)
    assert service.steered == [("pin", "chat", 90.5), ("pin", "chat", None), ("unpin", "chat")]


def test_what_changes_something_is_logged_with_the_peer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask("cancel", {"id": "7"})
    assert [record.getMessage() for record in caplog.records] == ['uid 1000 (pid 99) calls cancel {"id":"7"}']
    caplog.clear()
    for method in ("status", "lanes", "queue"):
        ask(method)
    assert caplog.records == []


def test_a_log_line_is_one_line_and_not_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask("cancel", {"id": "x\n" * 500_000})
    ask("evil\n" * 100_000, who=Peer(4321, 1))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all("\n" not in line for line in lines)
    assert all(len(line) < 500 for line in lines)


def wellformed(reply: bytes | None) -> None:
    """None, or one line with exactly one of result and error."""
    if reply is not None:
        assert reply.endswith(b"\n")
        assert reply.count(b"\n") == 1
        decoded = msgspec.json.decode(reply, type=protocol.Reply)
        assert isinstance(decoded.result, msgspec.UnsetType) != isinstance(decoded.error, msgspec.UnsetType)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=200).filter(lambda line: b"\n" not in line))
@example(b'{"jsonrpc":"2.0","id":1,"method":"\xed\xa0\x80"}')
@example(b'{"jsonrpc":"2.0","id":1e999,"method":"status"}')
@example(b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"status"}')
def test_any_bytes_get_an_answer_and_no_exception(line: bytes) -> None:
    wellformed(finish(dispatch.answer(line, FakeService().as_service(), ME, OWNER)))


@given(
    st.fixed_dictionaries(
        {"jsonrpc": st.just("2.0") | JSON, "method": st.sampled_from(sorted(dispatch.METHODS)) | JSON},
        optional={"id": JSON, "params": JSON | st.fixed_dictionaries({"id": JSON}), "more": JSON},
    )
)
def test_any_object_gets_an_answer_and_no_exception(message: Any) -> None:
    line = json.dumps(message).encode()
    wellformed(finish(dispatch.answer(line, FakeService().as_service(), Peer(os.geteuid(), 1), OWNER)))
