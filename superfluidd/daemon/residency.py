"""Whether a model is in memory: loading, unloading, resting, and who waits for which.

Everything that takes time is done by the model's own task. Who asks for it waits for the outcome, and may give that up
without changing anything.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from typing import Literal

import trio

from superfluidd.control.protocol import ModelState
from superfluidd.errors import ModelFailed, ModelFileError, ModelLoading, ModelUnloaded

log = logging.getLogger(__name__)

PARK_GRACE = 10.0
"""Seconds that writing KV to disk may go on for once every request has ended."""


class Residency(abc.ABC):
    """A model that comes and goes. What it does while it is there is its subclass's business.

    Args:
        name: what clients call it.
        path: where it came from, for people.
        idle_timeout: seconds without a request after which it rests; 0 is never.
        clock: seconds.
    """

    def __init__(self, name: str, path: str, idle_timeout: float, clock: Callable[[], float]) -> None:
        self.name = name
        self.path = path
        self.state: ModelState = "loading"
        """Where it is, as if it were to stay; :attr:`standing` also knows that it leaves."""
        self.error = ""
        self.progress = 0.0
        self.leaving = False
        """It takes nothing new, and is unloaded once it is idle or out of patience."""
        self._rests = False
        """What unloads it, or has, is want of work."""
        self._begun = False
        """It has been loaded once, or need not be."""
        self._idle_timeout = idle_timeout
        self._clock = clock
        self._last_used = clock()
        self._changed = trio.Event()
        self._wanted = trio.Event()
        self._residence = trio.CancelScope()
        self._tasks: trio.Nursery | None = None

    # -- what it does while it is there -----------------------------------------------------------------------------

    @abc.abstractmethod
    async def _reside(self, begun: Callable[[], None], *, again: bool) -> None:
        """Load it, serve it, replace its engine. Returns once it has failed.

        Args:
            begun: to be called when it is loaded.
            again: it was loaded before, or could not be.
        """

    @abc.abstractmethod
    def _release(self) -> None:
        """Forget everything that belongs to the engine that is gone."""

    @property
    @abc.abstractmethod
    def _pinned(self) -> bool:
        """Something is to be kept."""

    @abc.abstractmethod
    def abort_all(self, why: str, code: str) -> None:
        """End everything that is queued or running."""

    @abc.abstractmethod
    async def wait_idle(self) -> None:
        """Return once nothing is queued or running."""

    @abc.abstractmethod
    async def wait_parked(self) -> None:
        """Return once everything that is to be on disk is there, or the engine is gone."""

    # -- the task ---------------------------------------------------------------------------------------------------

    async def run(
        self, *, must_load: bool = True, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Load the model and serve it until cancelled; unloaded or failed, wait to be told to load it again. Started
        once it is loaded.

        Args:
            must_load: a model that cannot be loaded in the first place is an error. Otherwise this is started at once.

        Resource handling: the engine lives in a nursery of its own, and is ended when this is cancelled.
        Error handling: an engine that dies is replaced; one that cannot be is a failed model.

        Raises:
            ModelFileError: the model could not be loaded in the first place.
        """

        def begin() -> None:
            if not self._begun:
                self._begun = True
                task_status.started()

        async with trio.open_nursery() as self._tasks:
            if not must_load:
                begin()
            if self._idle_timeout:
                self._tasks.start_soon(self._rest_when_idle)
            again = False
            while True:
                with trio.CancelScope() as self._residence:
                    await self._reside(begin, again=again)
                if self.leaving:
                    self._gone("resting" if self._rests else "unloaded")
                elif not self._begun:
                    break
                await self._wanted.wait()
                self._wanted, again = trio.Event(), True
            self._tasks.cancel_scope.cancel()
        raise ModelFileError(f"{self.path}: {self.error}")

    def _gone(self, state: Literal["unloaded", "resting"]) -> None:
        self._release()
        self.leaving = False
        self._set_state(state)
        log.info("model %s is unloaded%s", self.name, ": the next request loads it" if state == "resting" else "")

    def _set_state(self, state: ModelState) -> None:
        self.state = state
        self._changed.set()
        self._changed = trio.Event()

    # -- leaving ----------------------------------------------------------------------------------------------------

    @property
    def _why_gone(self) -> str:
        return f"model {self.name} was unloaded before the request was complete"

    def _begin_to_leave(self, patience: float, *, rests: bool) -> None:
        assert self._tasks is not None
        self.leaving, self._rests = True, rests
        self._set_state(self.state)
        self._tasks.start_soon(self._leave, patience)

    async def _leave(self, patience: float) -> None:
        """Let what is queued and running end, as long as there is patience, then what is being parked, then go."""
        residence = self._residence
        with trio.move_on_after(patience):
            await self.wait_idle()
        self.abort_all(self._why_gone, ModelUnloaded.code)
        with trio.move_on_after(PARK_GRACE):
            await self.wait_parked()
        residence.cancel()

    async def _rest_when_idle(self) -> None:
        """Unload it when nobody has wanted anything of it for long enough, and nothing of it is pinned."""
        while True:
            await self.wait_idle()
            rest = self._last_used + self._idle_timeout - self._clock()
            if self.state != "ready" or self.leaving:
                await self._changed.wait()
            elif rest > 0 or self._pinned:
                await trio.sleep(rest if rest > 0 else 1.0)
            else:
                log.info("model %s: nothing was asked of it for %g s", self.name, self._idle_timeout)
                self._begin_to_leave(0.0, rests=True)

    # -- what others ask of it --------------------------------------------------------------------------------------

    @property
    def standing(self) -> ModelState:
        """Its state, for everybody else."""
        return "unloading" if self.leaving else self.state

    async def load(self) -> None:
        """Load it if it is not; return once it can serve. Cancelling the wait changes nothing.

        Raises:
            ModelFailed: it cannot be loaded; the message says why.
            ModelUnloaded: it is being unloaded.
        """
        if self.leaving:
            raise self._not_ready()
        if self.state in ("failed", "unloaded", "resting"):
            self._release()
            self._set_state("loading")
            self._wanted.set()
        while self.state in ("loading", "recovering") and not self.leaving:
            await self._changed.wait()
        if self.state == "failed":
            raise ModelFailed(f"model {self.name} cannot be loaded: {self.error}")
        if self.standing != "ready":
            raise self._not_ready()

    async def wake(self) -> None:
        """Load it if it rests, and return once it can serve.

        Raises:
            ModelFailed: it cannot be loaded.
        """
        self._last_used = self._clock()
        while self._rests and (self.leaving or self.state in ("resting", "loading")):
            if self.leaving:
                await self._changed.wait()
            else:
                await self.load()

    async def unload(self, patience: float) -> None:
        """Take nothing new; unload it once everything has ended, or ``patience`` seconds have passed and what was left
        has been ended. Return then; cancelling the wait changes nothing. Calling it again can only shorten the
        patience to none.

        Raises:
            ModelLoading: it is being loaded for the first time.
        """
        self._rests = False
        if self.leaving and not patience:
            self.abort_all(self._why_gone, ModelUnloaded.code)
        if not self.leaving and self.state in ("failed", "resting"):
            self._gone("unloaded")
        elif not self.leaving and self.state != "unloaded":
            if not self._begun:
                raise ModelLoading(f"model {self.name} is being loaded; unload it when it has been", retry_after=2)
            self._begin_to_leave(patience, rests=False)
        while self.leaving:
            await self._changed.wait()

    def _not_ready(self) -> ModelLoading | ModelFailed | ModelUnloaded:
        if self.leaving or self.state in ("unloaded", "resting"):
            doing = "is being unloaded" if self.leaving else "is not loaded"
            return ModelUnloaded(f"model {self.name} {doing}; `sfctl load {self.name}` loads it again")
        if self.state == "failed":
            return ModelFailed(f"model {self.name} has failed; `sfctl load {self.name}` tries it again: {self.error}")
        if self.state == "recovering":
            return ModelLoading(f"model {self.name} is recovering; try again in a moment", retry_after=1)
        return ModelLoading(f"model {self.name} is being loaded ({self.progress:.0%}); try again soon", retry_after=2)
