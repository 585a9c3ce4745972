"""The daemon's nursery: a scheduler task per model, an HTTP listener, a watcher of memory, a control plane; start and
stop in order."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path

import trio

from superfluidd.config import Settings, split_address
from superfluidd.control import paths
from superfluidd.control import server as control
from superfluidd.daemon import sensors, signals
from superfluidd.daemon.fleet import Fleet
from superfluidd.daemon.loading import Loaded, examine
from superfluidd.daemon.os_pressure import Watcher
from superfluidd.daemon.residency import PARK_GRACE
from superfluidd.daemon.service import Service
from superfluidd.http import server as http
from superfluidd.http.app import create_app
from superfluidd.scheduling.pressure import Ladder

log = logging.getLogger(__name__)

HTTP_GRACE = 2.0
"""Seconds that open connections get to read what has been sent, once every request has ended."""


async def serve(settings: Settings, socket_path: Path, ready: Callable[[Service, list[Loaded]], None]) -> None:
    """Serve until told to stop.

    Args:
        settings: what to serve and how.
        socket_path: where the control socket goes.
        ready: called once every model is loaded.

    Resource handling: on return the sockets are closed, the control socket's file is gone and every worker has ended.
    Error handling: whatever goes wrong before ``ready`` is a :class:`~superfluidd.errors.StartupError`.
    """
    loaded = examine(settings)
    with (
        http.open_listener(*split_address(settings.http), settings.stall_timeout) as web,
        control.open_listener(socket_path) as control_socket,
    ):
        fleet = Fleet(settings, loaded)
        watcher = Watcher(settings.os_pressure, sensors.arm, Ladder(hold=settings.os_pressure_hold))
        service = Service(settings, fleet.models, str(socket_path), _address(web), watcher, fleet.add)
        await _run(service, fleet, web, control_socket, lambda: ready(service, loaded))


async def _run(
    service: Service, fleet: Fleet, web: socket.socket, control_socket: socket.socket, ready: Callable[[], None]
) -> None:
    stop, web_stop = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(signals.watch, stop.set, nursery.cancel_scope.cancel)
        await nursery.start(control.serve, control_socket, service)
        await nursery.start(service.watcher.run)
        async with trio.open_nursery() as engines:
            async with trio.open_nursery() as edge:
                await edge.start(
                    http.serve, create_app(service), web, web_stop, HTTP_GRACE, service.settings.stall_timeout
                )
                async with trio.open_nursery() as starting:
                    starting.start_soon(_cancel_on, stop, starting.cancel_scope)
                    await fleet.start(engines)
                    starting.cancel_scope.cancel()
                if not stop.is_set():
                    ready()
                    await stop.wait()
                await _drain(service)
                web_stop.set()
            engines.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


async def _cancel_on(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def _drain(service: Service) -> None:
    """Take nothing new, let what runs go on for the drain timeout, then end it."""
    service.drain()
    with trio.move_on_after(service.settings.drain_timeout) as patience:
        await service.wait_idle()
    if patience.cancelled_caught:
        log.warning("the drain timeout of %g s is over; ending what still runs", service.settings.drain_timeout)
    service.abort_all("the server is shutting down", "shutting_down")
    with trio.move_on_after(PARK_GRACE):
        await service.wait_parked()


def _address(web: socket.socket) -> str:
    host, port = web.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_path(settings: Settings) -> Path:
    """Where the control socket goes."""
    return Path(settings.socket) if settings.socket else paths.default_socket_path()
