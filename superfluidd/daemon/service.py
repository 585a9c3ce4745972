"""The facade both edges call: everything HTTP and the control plane may ask of the daemon, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping

import trio

from superfluidd import __version__
from superfluidd.config import Settings
from superfluidd.control.protocol import (
    ClassView,
    Explanation,
    LaneView,
    MemResult,
    PinsResult,
    PressureResult,
    QueueView,
    StatusResult,
    TraceEntry,
)
from superfluidd.daemon import ownership, steering
from superfluidd.daemon.ended import Ended
from superfluidd.daemon.model import Model
from superfluidd.daemon.os_pressure import Watcher
from superfluidd.errors import Draining, ModelFailed, UnknownModel, UnknownRequest
from superfluidd.scheduling.pressure import Rung
from superfluidd.scheduling.qos import parse_class
from superfluidd.scheduling.request import Request
from superfluidd.types import QosClass, RequestId


class Service:
    """The served models and the switches over all of them.

    Args:
        settings: what the daemon runs with.
        models: the models by served name, the default first.
        socket: path of the control socket, for status.
        http: address the HTTP listener is bound to, for status; by default the one in the settings.
        watcher: of the operating system's memory; by default nobody watches it.
        add: makes and starts a model from the file of that path; by default nothing can be added. Raises what a start
            would.
    """

    def __init__(
        self,
        settings: Settings,
        models: dict[str, Model],
        socket: str = "",
        http: str = "",
        watcher: Watcher | None = None,
        add: Callable[[str], Awaitable[Model]] | None = None,
    ) -> None:
        self.settings = settings
        self.watcher = watcher or Watcher("off", lambda: None)
        self.models = models
        self.socket = socket
        self.http = http or settings.http
        self.ended = Ended()
        self._add = add
        self._started = trio.current_time()
        for model in models.values():
            model.on_ended = self._note_ended
        self.watcher.apply = self._apply_pressure
        self._draining = False
        self._rung = Rung.NORMAL

    def _note_ended(self, record: Request) -> None:
        arrived = record.arrived - self._started
        self.ended.add(TraceEntry(arrived, record.qos.label, record.prompt, record.generated))

    def _apply_pressure(self, rung: Rung) -> None:
        self._rung = rung
        for model in self.models.values():
            model.set_pressure(rung)

    @property
    def draining(self) -> bool:
        """No new work is taken."""
        return self._draining

    def resolve(self, name: str | None) -> Model:
        """The model of that name; None means the first one.

        Raises:
            UnknownModel: no such model.
            Draining: the daemon takes no new work.

        Without a name, models that an operator has unloaded are passed over while there are others.
        """
        if name is None:
            every = list(self.models.values())
            model = next((model for model in every if model.standing not in ("unloading", "unloaded")), every[0])
        else:
            model = self.named(name)
        if self._draining:
            raise Draining("the daemon is draining and takes no new requests", retry_after=5)
        return model

    def named(self, name: str) -> Model:
        """The model of that name, in whatever state. Raises :class:`UnknownModel`."""
        if name not in self.models:
            raise UnknownModel(name, list(self.models))
        return self.models[name]

    async def load(self, name: str, *, files: bool) -> Model:
        """Load a model; return once it can serve.

        Args:
            name: a served one; or, with ``files``, a path: that file is served from now on.

        Raises:
            Draining: the daemon is about to end.
            ModelFailed: it cannot be loaded.
            ModelFileError, UsageError: the file cannot be served.
            ModelUnloaded: it is being unloaded.
            UnknownModel: there is none of that name, and it is no path.
        """
        if self._draining:
            raise Draining("the daemon is draining and loads nothing")
        model = self.models.get(name)
        if model is not None:
            await model.load()
            return model
        if self._add is None or not files:
            raise UnknownModel(name, list(self.models))
        before = len(self.models)
        model = await self._add(name)
        added = len(self.models) > before
        model.on_ended = self._note_ended
        model.set_pressure(self._rung)
        failed: ModelFailed | None = None
        try:
            await model.load()
        except ModelFailed as error:
            failed = error
        if failed is None:
            return model
        if added:  # nobody has ever been served by it: it is nothing that could be broken
            await model.unload(0.0)
        raise failed

    async def unload(self, name: str, *, now: bool) -> Model:
        """Unload a model; return when it is. What is queued and running goes on for at most the drain timeout; with
        ``now`` it ends at once, with an error that says so.

        Raises:
            ModelLoading: the daemon is still starting it.
            UnknownModel: no such model.
        """
        model = self.named(name)
        await model.unload(0.0 if now else self.settings.drain_timeout)
        return model

    def cancel(self, ident: str) -> tuple[RequestId, ...]:
        """Cancel a request by id, or every request of an ``x-request-id``.

        Raises:
            UnknownRequest: nothing queued or running has that name.
        """
        found = self._find(ident)
        for model, request in found:
            model.cancel(request)
        return tuple(request for _, request in found)

    def _find(self, ident: str, *, ended: bool = False) -> list[tuple[Model, RequestId]]:
        found = [(model, request) for model in self.models.values() for request in model.find(ident, ended=ended)]
        if not found:
            which = "request that is queued, running or ended lately" if ended else "queued or running request"
            raise UnknownRequest(
                f"no {which} is called {ident!r}; see `sfctl lanes` and `sfctl queue`",
                param="id",
            )
        return found

    def explain(self, ident: str) -> tuple[Explanation, ...]:
        """What was decided about a request, or about every request of an ``x-request-id``.

        Raises:
            UnknownRequest: nothing queued, running or ended lately has that name.
        """
        return tuple(steering.explain(model, request) for model, request in self._find(ident, ended=True))

    def set_qos(self, ident: str, qos: str) -> tuple[tuple[RequestId, ...], QosClass]:
        """Re-class a request, or every request of an ``x-request-id``.

        Raises:
            InvalidValue: no such class.
            UnknownRequest: nothing queued or running has that name.
        """
        parsed = parse_class(qos, "qos")
        found = self._find(ident)
        for model, request in found:
            steering.set_qos(model, request, parsed, trio.current_time())
        return tuple(request for _, request in found), parsed

    def pin(self, ident: str, ttl: float | None) -> None:
        """Keep the KV of a request, or of every request of an ``x-request-id``.

        Raises:
            InvalidValue: there is nothing of any of them, or too much; or the time is none.
            UnknownRequest: nothing queued, running or ended lately has that name.
        """
        steering.pin(self._find(ident, ended=True), ttl, trio.current_time())

    def unpin(self, ident: str) -> None:
        """Take the pins of a request, or of every request of an ``x-request-id``, away.

        Raises:
            InvalidValue: none of them is pinned.
            UnknownRequest: nothing pinned, queued, running or ended lately has that name.
        """
        found = steering.pinned(self.models.values(), ident) or self._find(ident, ended=True)
        steering.unpin(found, trio.current_time())

    def pins(self) -> PinsResult:
        """What is pinned, and what may be."""
        return steering.pins(self.models.values(), trio.current_time())

    def classes(self) -> tuple[ClassView, ...]:
        """Every class of every model: its cap, what it holds, whether it is paused."""
        return steering.classes(self.models.values())

    def set_caps(self, caps: Mapping[str, int | None]) -> None:
        """Set lane caps, of every model; nothing is changed if one of them is wrong. Raises :class:`InvalidValue`."""
        steering.set_caps(self.models.values(), caps)

    def set_class_paused(self, qos: str, paused: bool) -> None:
        """Give a class no more lanes, or again. Raises :class:`InvalidValue` for no such class."""
        steering.set_paused(self.models.values(), qos, paused)

    def drain(self) -> None:
        """Take no new work from now on; what is queued and running goes on. Idempotent."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Return once nothing is queued or running on any model."""
        for model in self.models.values():
            await model.wait_idle()

    async def wait_parked(self) -> None:
        """Return once everything that is to be on disk is there."""
        for model in self.models.values():
            await model.wait_parked()

    def abort_all(self, why: str, code: str) -> None:
        """Cancel everything that is queued or running."""
        for model in self.models.values():
            model.abort_all(why, code)

    def lanes(self) -> tuple[LaneView, ...]:
        """Running requests, by model and lane."""
        return tuple(view for model in self.models.values() for view in model.lanes())

    def queue(self) -> tuple[QueueView, ...]:
        """Waiting requests, by model, class and place."""
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

    def pressure(self) -> PressureResult:
        """The operating system's memory, and what is done about it."""
        return self.watcher.view()

    def memory(self) -> MemResult:
        """Who holds how much memory."""
        return ownership.memory(self.models.values())

    @property
    def ready(self) -> bool:
        """Every model can take a request now, but for those that an operator has unloaded or that rest."""
        states = {model.standing for model in self.models.values()} - {"unloading", "unloaded"}
        return not self._draining and bool(states) and states <= {"ready", "resting"}
