"""The application over a simulated service: in process, and behind a real loopback listener."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import pytest
import trio
from quart_trio import QuartTrio
from quart_trio.testing import TrioClient
from trio.testing import MockClock

from superfluidd.daemon.service import Service
from superfluidd.http.app import create_app
from superfluidd.http.server import open_listener, serve

from tests.http.raw import Server  # isort: skip


@pytest.fixture
def app(service: Service) -> QuartTrio:
    """The application over ``service``."""
    return create_app(service)


@pytest.fixture
def client(app: QuartTrio) -> TrioClient:
    """Quart's client: no sockets."""
    return app.test_client()  # type: ignore[return-value]


@pytest.fixture
async def server(nursery: trio.Nursery, app: QuartTrio) -> AsyncIterator[Server]:
    """The application behind a real listener; three seconds of grace, sixty until a stalled reader is dropped."""
    # pytest-trio takes a clock only from the test's own arguments.
    assert isinstance(trio.lowlevel.current_clock(), MockClock), "the test has to ask for autojump_clock itself"
    listener = open_listener("127.0.0.1", 0)
    running = Server(listener.getsockname()[1])

    async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await serve(app, listener, running.shutdown, 3.0, 60.0, task_status=task_status)
        running.stopped.set()

    await nursery.start(partial(run))
    yield running
    await running.hang_up()
    running.shutdown.set()
    await running.stopped.wait()
