"""One line in, one line out: parse, check who asks, decode the parameters, call, and put the outcome in an envelope."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from superfluidd.control import protocol
from superfluidd.control.peer import Peer
from superfluidd.control.protocol import ErrorBody, Method, Role
from superfluidd.daemon.service import Service
from superfluidd.errors import PermissionDenied, SuperfluidError

log = logging.getLogger(__name__)

Ident = int | str | None
Handler = Callable[[Service, Any], Awaitable[msgspec.Struct]]

LOGGED = 200
"""Characters of anything a peer wrote that a log line shows."""

RANK: Mapping[Role, int] = {"observer": 0, "admin": 1}

_requests = msgspec.json.Decoder(protocol.Request)


class _Identified(msgspec.Struct):
    id: int | str | None = None


async def _status(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return service.status()


async def _lanes(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return protocol.LanesResult(service.lanes())


async def _queue(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return protocol.QueueResult(service.queue())


async def _cancel(service: Service, params: protocol.CancelParams) -> msgspec.Struct:
    return protocol.CancelResult(service.cancel(params.id))


async def _drain(service: Service, params: protocol.DrainParams) -> msgspec.Struct:
    service.drain()
    if params.wait:
        await service.wait_idle()
    return protocol.DrainResult(running=len(service.lanes()), queued=len(service.queue()))


async def _explain(service: Service, params: protocol.ExplainParams) -> msgspec.Struct:
    return protocol.ExplainResult(service.explain(params.id))


async def _trace(service: Service, params: protocol.TraceParams) -> msgspec.Struct:
    return service.ended.since(params.cursor)


async def _caps(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return protocol.ClassesResult(service.classes())


async def _set_caps(service: Service, params: protocol.SetCapsParams) -> msgspec.Struct:
    service.set_caps(params.caps)
    return protocol.ClassesResult(service.classes())


async def _set_qos(service: Service, params: protocol.SetQosParams) -> msgspec.Struct:
    requests, qos = service.set_qos(params.id, params.qos)
    return protocol.SetQosResult(requests, qos.label)


async def _pause(service: Service, params: protocol.ClassParams) -> msgspec.Struct:
    service.set_class_paused(params.qos, True)
    return protocol.ClassesResult(service.classes())


async def _resume(service: Service, params: protocol.ClassParams) -> msgspec.Struct:
    service.set_class_paused(params.qos, False)
    return protocol.ClassesResult(service.classes())


async def _models(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return protocol.ModelsResult(service.status().models)


async def _load(service: Service, params: protocol.LoadParams) -> msgspec.Struct:
    return protocol.ModelResult((await service.load(params.model, files=True)).view())


async def _unload(service: Service, params: protocol.UnloadParams) -> msgspec.Struct:
    return protocol.ModelResult((await service.unload(params.model, now=params.now)).view())


async def _pressure(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return service.pressure()


async def _mem(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return service.memory()


async def _pins(service: Service, _: protocol.NoParams) -> msgspec.Struct:
    return service.pins()


async def _pin(service: Service, params: protocol.PinParams) -> msgspec.Struct:
    service.pin(params.id, params.ttl)
    return service.pins()


async def _unpin(service: Service, params: protocol.UnpinParams) -> msgspec.Struct:
    service.unpin(params.id)
    return service.pins()


HANDLERS: Mapping[str, Handler] = {
    "status": _status,
    "lanes": _lanes,
    "queue": _queue,
    "cancel": _cancel,
    "drain": _drain,
    "explain": _explain,
    "trace": _trace,
    "caps": _caps,
    "set_caps": _set_caps,
    "set_qos": _set_qos,
    "pause": _pause,
    "resume": _resume,
    "models": _models,
    "load": _load,
    "unload": _unload,
    "pressure": _pressure,
    "mem": _mem,
    "pins": _pins,
    "pin": _pin,
    "unpin": _unpin,
}
"""What each row of the method table does."""

METHODS: Mapping[str, Method] = {method.name: method for method in protocol.METHODS}


def role_of(peer: Peer, owner: int) -> Role | None:
    """What a peer may do with a daemon that runs as uid ``owner``; None is nothing."""
    return "admin" if peer.uid in (owner, 0) else None


def authorize(peer: Peer, owner: int, method: Method | None) -> None:
    """The one place where a peer's role is compared with what a method asks for.

    Raises:
        PermissionDenied: the peer may not call it.
    """
    role = role_of(peer, owner)
    if role is None:
        raise PermissionDenied(f"uid {peer.uid} may not control this daemon, which belongs to uid {owner}")
    if method is not None and RANK[role] < RANK[method.role]:
        raise PermissionDenied(f"uid {peer.uid} may look but not call {method.name}, which takes an {method.role}")


async def answer(line: bytes | bytearray, service: Service, peer: Peer, owner: int) -> bytes | None:
    """Serve one message.

    Args:
        line: the message, without its line end.
        service: what the methods act on.
        peer: who sent it.
        owner: the daemon's own uid.

    Returns:
        The response line, or None where none is due.

    Error handling: every fault of the message, of the call or of the method becomes an error response.
    """
    try:
        request = _requests.decode(line)
    except msgspec.ValidationError as error:
        what = "send one request a line, not a batch" if line.lstrip()[:1] == b"[" else f"not a request: {error}"
        return failure(_ident(line), protocol.INVALID_REQUEST, what, "invalid_request")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return failure(None, protocol.PARSE_ERROR, f"not JSON: {error}", "parse_error")
    outcome = await _call(request, service, peer, owner)
    if isinstance(request.id, msgspec.UnsetType):
        return None
    if isinstance(outcome, ErrorBody):
        return _line(protocol.Reply(id=request.id, error=outcome))
    return _line(protocol.Reply(id=request.id, result=msgspec.Raw(msgspec.json.encode(outcome))))


async def _call(request: protocol.Request, service: Service, peer: Peer, owner: int) -> msgspec.Struct:
    method = METHODS.get(request.method)
    try:
        authorize(peer, owner, method)
        if method is None:
            known = ", ".join(METHODS)
            return ErrorBody(
                protocol.METHOD_NOT_FOUND, f"no method {_short(request.method)!r}; known: {known}", "method_not_found"
            )
        raw = b"{}" if isinstance(request.params, msgspec.UnsetType) else request.params
        try:
            params = msgspec.json.decode(raw, type=method.params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = str(error).replace("`$", "`params")
            return ErrorBody(protocol.INVALID_PARAMS, f"{method.name}: {reason}", "invalid_value")
        if method.role != "observer":
            shown = _short(msgspec.json.encode(params).decode())
            log.info("uid %d (pid %d) calls %s %s", peer.uid, peer.pid, method.name, shown)
        return await HANDLERS[method.name](service, params)
    except SuperfluidError as error:
        log.info("uid %d (pid %d) is refused %s: %s", peer.uid, peer.pid, _short(request.method), _short(error.message))
        return ErrorBody(protocol.REFUSED, error.message, error.code)
    except Exception:
        log.exception("%s failed", _short(request.method))
        return ErrorBody(
            protocol.INTERNAL_ERROR, f"{request.method} failed; the daemon's log says how", "internal_error"
        )


def failure(ident: Ident, code: int, message: str, data: str) -> bytes:
    """An error response line."""
    return _line(protocol.Reply(id=ident, error=ErrorBody(code, message, data)))


def _short(text: str) -> str:
    """What a peer wrote, fit for a log line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LOGGED])


def _line(reply: protocol.Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


def _ident(line: bytes | bytearray) -> Ident:
    """The id of a message that is no request, where it has one."""
    try:
        return msgspec.json.decode(line, type=_Identified).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
