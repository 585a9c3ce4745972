"""The facade both edges call: everything HTTP and the control plane may ask of the daemon, and nothing else."""

from __future__ import annotations

import os

import trio

from superfluidd import __version__
from superfluidd.config import Settings
from superfluidd.control.protocol import LaneView, QueueView, StatusResult
from superfluidd.daemon.model import Model
from superfluidd.errors import Draining, UnknownModel, UnknownRequest
from superfluidd.types import RequestId


class Service:
    """The served models and the switches over all of them.

    Args:
        settings: what the daemon runs with.
        models: the models by served name, the default first.
        socket: path of the control socket, for status.
        http: address the HTTP listener is bound to, for status; by default the one in the settings.
    """

    def __init__(self, settings: Settings, models: dict[str, Model], socket: str = "", http: str = "") -> None:
        self.settings = settings
        self.models = models
        self.socket = socket
        self.http = http or settings.http
        self._started = trio.current_time()
        self._draining = False

    @property
    def draining(self) -> bool:
        """No new work is taken."""
        return self._draining

    def resolve(self, name: str | None) -> Model:
        """The model of that name; None means the first one.

        Raises:
            UnknownModel: no such model.
            Draining: the daemon takes no new work.
        """
        if name is None:
            model = next(iter(self.models.values()))
        elif name in self.models:
            model = self.models[name]
        else:
            raise UnknownModel(name, list(self.models))
        if self._draining:
            raise Draining("the daemon is draining and takes no new requests", retry_after=5)
        return model

    def cancel(self, ident: str) -> tuple[RequestId, ...]:
        """Cancel a request by id, or every request of an ``x-request-id``.

        Raises:
            UnknownRequest: nothing queued or running has that name.
        """
        cancelled: list[RequestId] = []
        for model in self.models.values():
            for request in model.find(ident):
                model.cancel(request)
                cancelled.append(request)
        if not cancelled:
            raise UnknownRequest(
                f"no queued or running request is called {ident!r}; see `sfctl lanes` and `sfctl queue`",
                param="id",
            )
        return tuple(cancelled)

    def drain(self) -> None:
        """Take no new work from now on; what is queued and running goes on. Idempotent."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Return once nothing is queued or running on any model."""
        for model in self.models.values():
            await model.wait_idle()

    def abort_all(self, why: str, code: str) -> None:
        """Cancel everything that is queued or running."""
        for model in self.models.values():
            model.abort_all(why, code)

    def lanes(self) -> tuple[LaneView, ...]:
        """Running requests, by model and lane."""
        return tuple(view for model in self.models.values() for view in model.lanes())

    def queue(self) -> tuple[QueueView, ...]:
        """Waiting requests, by model, in the order they would be served."""
        return tuple(view for model in self.models.values() for view in model.queue())

    def status(self) -> StatusResult:
        """The daemon in one record."""
        return StatusResult(
            version=__version__,
            pid=os.getpid(),
            uptime=trio.current_time() - self._started,
            http=self.http,
            socket=self.socket,
            draining=self._draining,
            models=tuple(model.view() for model in self.models.values()),
        )

    @property
    def ready(self) -> bool:
        """Every model can take a request now."""
        return not self._draining and all(model.state == "ready" for model in self.models.values())
