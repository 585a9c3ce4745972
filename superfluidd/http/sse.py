"""A stream of events as server-sent events.

The generator holds no cancel scope and no nursery across a ``yield``: waits are bounded inside, helpers live in the
request's lifetime.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence

import trio
from quart_trio.wrappers import TrioResponse

from superfluidd.daemon.streams import Delta, Done, Pause, Usage
from superfluidd.errors import SuperfluidError
from superfluidd.http import errors
from superfluidd.http.generate import Source
from superfluidd.http.replies import Writer

log = logging.getLogger("superfluidd.http")

DONE = b"data: [DONE]\n\n"

SILENCE = 2.0
"""Seconds without a byte after which a comment goes out. It says where the request is, so that a client that waits, in
the queue, paused or beside somebody's long prompt, can tell that from a server that has died."""

Totals = Callable[[Sequence[Usage]], Usage]

Progress = Callable[[], str]
"""Where the request is, in a few words."""


async def frames(
    source: Source, writer: Writer, choices: int, totals: Totals, progress: Progress
) -> AsyncGenerator[bytes, None]:
    """The body of a streaming reply.

    Args:
        source: events of all choices.
        writer: what they look like.
        choices: how many there are, over all prompts.
        totals: the request's usage from the choices' usages.
        progress: where the request is, for comments.

    Error handling: a choice that fails ends the whole stream with an error frame, since headers and status are gone;
    so does a fault of ours, which is also logged.
    """
    usages: list[Usage] = [Usage(0, 0)] * choices
    try:
        opening = b"".join([writer.opening(choice) for choice in range(choices)])
        if opening:
            yield opening
        open_choices = set(range(choices))
        while open_choices:
            item = None
            with trio.move_on_after(SILENCE):
                item = await source.next()
            if item is None:
                yield _comment(progress())
                continue
            choice, event = item
            if isinstance(event, Delta):
                yield writer.delta(choice, event)
            elif isinstance(event, Done):
                error = errors.failure(event)
                usages[choice] = event.usage
                if error is not None:
                    yield _error_frame(error)
                    break
                open_choices.discard(choice)
                yield writer.finish(choice, event.reason)
            elif isinstance(event, Pause):
                yield _comment("paused" if len(open_choices) > 1 else progress())
        else:
            last = writer.usage(totals(usages))
            if last:
                yield last
    except Exception:
        log.exception("a stream failed after it had opened")
        yield _error_frame(SuperfluidError("the server failed in the middle of this reply; its log has the cause"))
    yield DONE


def response(body: AsyncGenerator[bytes, None]) -> TrioResponse:
    """A response that streams for as long as it takes."""
    reply = TrioResponse(
        body,
        content_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
    # Quart's default would cut every stream after a minute, without a word.
    reply.timeout = None
    return reply


def _comment(words: str) -> bytes:
    return b": " + (words or "waiting").encode() + b"\n\n"


def _error_frame(error: SuperfluidError) -> bytes:
    return b"data: " + errors.encode(error) + b"\n\n"
