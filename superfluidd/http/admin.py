"""``/slots``: the lanes, as clients of other servers look for them; and loading and unloading of models.

A page in a browser can send a form to any address. It cannot send JSON there unless it is allowed to: so what changes
something asks for JSON by name. Only models that are served can be loaded here; new files take the control socket.
"""

from __future__ import annotations

from quart import Blueprint, request
from quart.wrappers import Response

from superfluidd.control.protocol import LaneView
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.errors import ClientError
from superfluidd.http import schema
from superfluidd.http.body import json_reply, read_body
from superfluidd.http.openai import model_object


class NotJson(ClientError):
    """The body is not said to be JSON."""

    status = 415
    code = "unsupported_media_type"


def blueprint(service: Service) -> Blueprint:
    """The routes."""
    routes = Blueprint("admin", __name__)

    @routes.get("/slots")
    async def slots() -> Response:
        found: list[dict[str, object]] = []
        for model in service.models.values():
            found += _lanes(model, first=len(found))
        return json_reply(found)

    @routes.post("/v1/models/load")
    async def load() -> Response:
        body = schema.decode_load(await _read_json())
        return json_reply(model_object(await service.load(body.model, files=False)))

    @routes.post("/v1/models/unload")
    async def unload() -> Response:
        body = schema.decode_unload(await _read_json())
        return json_reply(model_object(await service.unload(body.model, now=body.now)))

    return routes


async def _read_json() -> bytes:
    if not request.is_json:
        raise NotJson("send this with `content-type: application/json`")
    return await read_body()


def _lanes(model: Model, first: int) -> list[dict[str, object]]:
    """One entry per lane, idle ones too; ids go on from ``first`` so that they are unique over all models."""
    view = model.view()
    busy = {lane.lane: lane for lane in model.lanes()}
    return [_entry(first + lane, view.name, view.window, busy.get(lane)) for lane in range(view.lanes)]


def _entry(ident: int, model: str, window: int, lane: LaneView | None) -> dict[str, object]:
    entry: dict[str, object] = {"id": ident, "is_processing": lane is not None, "n_ctx": window, "model": model}
    if lane is not None:
        entry |= {
            "request": lane.request,
            "request_id": lane.origin,
            "class": lane.qos,
            "phase": lane.phase,
            "prompt_tokens": lane.prompt,
            "generated_tokens": lane.generated,
            "max_tokens": lane.max_tokens,
        }
    return entry
