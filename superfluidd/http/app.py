"""The application: routes, and the way of every failure into an envelope."""

from __future__ import annotations

import logging

from quart.wrappers import Response
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from superfluidd.daemon.service import Service
from superfluidd.errors import SuperfluidError
from superfluidd.http import admin, errors, health, metrics, openai
from superfluidd.http.lifetime import Connection, Request, lifetime

log = logging.getLogger("superfluidd.http")

REQUEST_ID = "x-request-id"


class App(QuartTrio):
    """Quart with our request lifetime."""

    asgi_http_class = Connection
    request_class = Request


def create_app(service: Service) -> QuartTrio:
    """The ASGI application over a service."""
    app = App("superfluidd.http", static_folder=None)
    app.config.update(
        # Bodies are bounded where they are read, sends where they block; Quart's own timeout would cut streams.
        BODY_TIMEOUT=None,
        MAX_CONTENT_LENGTH=None,
        RESPONSE_TIMEOUT=None,
        PROPAGATE_EXCEPTIONS=False,
    )
    for module in (openai, health, metrics, admin):
        app.register_blueprint(module.blueprint(service))

    @app.errorhandler(SuperfluidError)
    async def refused(error: SuperfluidError) -> Response:
        if error.status >= 500:
            log.warning("request=%s failed: %s", lifetime().id, error.message)
        return errors.reply(error)

    @app.errorhandler(HTTPException)
    async def not_routed(error: HTTPException) -> Response:
        return errors.http_reply(error)

    @app.errorhandler(Exception)
    async def broken(error: Exception) -> Response:
        ident = lifetime().id
        log.error("request=%s: unexpected error", ident, exc_info=error)
        return errors.reply(SuperfluidError(f"the server failed on this request; its log has the cause under {ident}"))

    @app.after_request
    async def identify(response: Response) -> Response:
        response.headers[REQUEST_ID] = lifetime().id
        return response

    return app
