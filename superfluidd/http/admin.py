"""``/slots``: the lanes, as clients of other servers look for them."""

from __future__ import annotations

from quart import Blueprint
from quart.wrappers import Response

from superfluidd.control.protocol import LaneView
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.http.body import json_reply


def blueprint(service: Service) -> Blueprint:
    """The routes."""
    routes = Blueprint("admin", __name__)

    @routes.get("/slots")
    async def slots() -> Response:
        found: list[dict[str, object]] = []
        for model in service.models.values():
            found += _lanes(model, first=len(found))
        return json_reply(found)

    return routes


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
