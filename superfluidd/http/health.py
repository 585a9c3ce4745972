"""Health pages, in three strengths. None of them touches an engine, so a frozen worker cannot hang a probe.

* ``/livez``: the daemon answers.
* ``/health``: it would take a request: not draining, and a model is there to serve it, even if its worker is being
  replaced right now, or it rests.
* ``/readyz``: every model can serve at once, but for those that an operator has unloaded or that rest.
"""

from __future__ import annotations

from quart import Blueprint
from quart.wrappers import Response

from superfluidd.daemon.service import Service
from superfluidd.http.body import json_reply


def blueprint(service: Service) -> Blueprint:
    """The routes."""
    routes = Blueprint("health", __name__)

    @routes.get("/livez")
    async def livez() -> Response:
        return json_reply({"status": "ok"})

    @routes.get("/health")
    async def health() -> Response:
        states = [model.standing for model in service.models.values()]
        loaded = sum(state in ("ready", "recovering") for state in states)
        if service.draining:
            status = "draining"
        elif loaded:
            status = "ok"
        else:
            status = next((state for state in ("resting", "loading", "failed") if state in states), "unloaded")
        record: dict[str, object] = {"status": status, "models_loaded": loaded, "models_known": len(states)}
        return json_reply(record, 200 if status in ("ok", "resting") else 503)

    @routes.get("/readyz")
    async def readyz() -> Response:
        states = {model.name: model.standing for model in service.models.values()}
        status = "draining" if service.draining else "ready" if service.ready else "not ready"
        return json_reply({"status": status, "models": states}, 200 if service.ready else 503)

    return routes
