"""The models of a daemon: made from what the settings ask for, and from what operators add while it runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import partial

import trio

from superfluidd.config import Settings
from superfluidd.daemon import ownership
from superfluidd.daemon.loading import Loaded, examine_one
from superfluidd.daemon.model import Model
from superfluidd.engine.client import StartEngine, worker_starter
from superfluidd.errors import UnknownModel, UsageError
from superfluidd.scheduling.entries import Cache
from superfluidd.scheduling.shares import Budget


class Fleet:
    """Makes models and starts those that come later.

    Args:
        settings: what all of them run with.
        loaded: those to begin with; at least one.

    Attributes:
        models: by served name, the default first.
    """

    def __init__(self, settings: Settings, loaded: Sequence[Loaded]) -> None:
        self._settings = settings
        self._ids = itertools.count(1)
        self._host_bytes = loaded[0].cache.host_bytes
        self._budgets = Budget(self._host_bytes), Budget(loaded[0].cache.park_bytes)
        self._engines: trio.Nursery | None = None
        self._fitting = trio.Lock()
        self._promised: dict[str, int] = {}
        """Bytes of weights and pool, by model, since it was fitted last."""
        self.models = {one.name: self._model(one) for one in loaded}

    async def start(self, engines: trio.Nursery) -> None:
        """Load every model, one after the other. Raises what :meth:`Model.run` does."""
        self._engines = engines
        for model in list(self.models.values()):
            await engines.start(model.run)

    async def add(self, path: str) -> Model:
        """A model from a file that is not served yet; it is loading when this returns.

        Raises:
            ModelFileError: the file cannot be served.
            UnknownModel: it is no path, and so the name of a model that is not served.
            UsageError: a model of its name is served from another file, or the daemon is only starting.
        """
        if self._settings.engine != "simulated" and not os.path.isabs(path):
            raise UnknownModel(path, list(self.models))
        if self._engines is None:
            raise UsageError("the daemon is starting; try again when it is ready")
        async with self._fitting:
            served = self._served_from(path)
            if served is not None:
                return served
            one = await self._examine(path)
            if one.name in self.models:
                where = self.models[one.name].path
                raise UsageError(f"{one.name} is served from {where} already; rename one of the files")
            model = self.models[one.name] = self._model(one)
            await self._engines.start(partial(model.run, must_load=False))
        return model

    def _served_from(self, path: str) -> Model | None:
        """The model of that file, however its path was written."""
        wanted = os.path.realpath(path)
        return next((model for model in self.models.values() if os.path.realpath(model.path or "/") == wanted), None)

    async def _examine(self, path: str) -> Loaded:
        others = [(name, model) for name, model in self.models.items() if path not in (model.path, name)]
        committed = sum(self._committed(name, model) for name, model in others)
        return await trio.to_thread.run_sync(
            examine_one, self._settings, path, committed, self._host_bytes, abandon_on_cancel=True
        )

    def _committed(self, name: str, model: Model) -> int:
        """Memory that a model will still take of what seems to be available."""
        if model.state == "loading":
            return self._promised[name]
        return ownership.outstanding(model)

    async def _refit(self, path: str) -> tuple[StartEngine, Cache]:
        # One after the other: each has to see what the one before was promised.
        async with self._fitting:
            one = await self._examine(path)
            self._promise(one)
        return self._starter(one), one.cache

    def _promise(self, one: Loaded) -> None:
        self._promised[one.name] = one.fit.weights_bytes + one.fit.kv_bytes if one.fit else 0

    def _starter(self, one: Loaded) -> StartEngine:
        return worker_starter(one.spec, log_level=self._settings.log_level, log_format=self._settings.log_format)

    def _model(self, one: Loaded) -> Model:
        self._promise(one)
        settings = self._settings
        return Model(
            one.name,
            one.path,
            self._starter(one),
            self._ids,
            policy=settings.policy,
            caps=settings.caps,
            cache=one.cache,
            budgets=self._budgets,
            refit=partial(self._refit, one.path or one.name),
            stall_timeout=settings.stall_timeout,
            idle_timeout=settings.idle_timeout,
        )
