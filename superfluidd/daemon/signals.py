"""Signals to decisions: the first SIGTERM or SIGINT stops gently, the second stops now."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

import trio

log = logging.getLogger(__name__)


async def watch(
    stop: Callable[[], None],
    stop_now: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call ``stop`` on the first signal and ``stop_now`` on the second. Started once signals are caught."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        task_status.started()
        count = 0
        async for number in received:
            count += 1
            log.info("%s: %s", signal.Signals(number).name, "draining" if count == 1 else "stopping now")
            if count == 1:
                stop()
            else:
                stop_now()
