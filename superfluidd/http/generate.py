"""From checked requests to generations and their events: what every API on this edge shares.

A request may have several choices. Each is a generation of its own, and all of them are read at the same time:
leaving one unread while another is being read would look like a client that has stopped reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import trio

from superfluidd.daemon.model import Model
from superfluidd.daemon.streams import Delta, Done, Event, Generation, GenerationRequest, Usage
from superfluidd.http.errors import failure
from superfluidd.http.lifetime import Lifetime
from superfluidd.text.assembler import TokenText
from superfluidd.types import FinishReason

THREAD_BYTES = 32 * 1024
"""Prompts with more text than this are rendered on a thread, so that no other stream waits for them."""


class Reply(msgspec.Struct, frozen=True):
    """One finished choice."""

    text: str
    tokens: tuple[TokenText, ...]
    reason: FinishReason
    usage: Usage


class Source(Protocol):
    """Events of all choices of a request, each with the choice it belongs to."""

    async def next(self) -> tuple[int, Event]:
        """The next event of any choice. Cancelling the wait loses nothing."""


class Single:
    """The source of a request with one choice."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def next(self) -> tuple[int, Event]:
        """See :class:`Source`."""
        return 0, await self._generation.next()


class Merged:
    """The source of a request with several: one helper per choice, in the request's own lifetime.

    The channel holds nothing: a client that does not read leaves its text in the generations, where it is joined
    and where the stall rule sees it.
    """

    def __init__(self, generations: Sequence[Generation], life: Lifetime) -> None:
        self._send, self._receive = trio.open_memory_channel[tuple[int, Event]](0)
        for index, generation in enumerate(generations):
            life.start_soon(self._pump, index, generation)

    async def _pump(self, index: int, generation: Generation) -> None:
        event: Event | None = None
        while not isinstance(event, Done):
            event = await generation.next()
            await self._send.send((index, event))

    async def next(self) -> tuple[int, Event]:
        """See :class:`Source`."""
        return await self._receive.receive()


def submit(model: Model, requests: Sequence[GenerationRequest], life: Lifetime) -> list[Generation]:
    """Queue every choice; the lifetime owns them.

    Raises:
        SuperfluidError: one cannot be served. The earlier ones are cancelled at once.
    """
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(life.own(model.submit(request)))
    except BaseException:
        for generation in generations:
            generation.close()
        raise
    return generations


def source(generations: Sequence[Generation], life: Lifetime) -> Source:
    """The events of these generations, merged where there are several."""
    return Single(generations[0]) if len(generations) == 1 else Merged(generations, life)


async def collect(generations: Sequence[Generation]) -> list[Reply]:
    """Read every choice to its end.

    Raises:
        SuperfluidError: one failed; the others are given up.
    """
    replies: list[Reply | None] = [None] * len(generations)
    failed: list[Done] = []

    async def read(index: int, generation: Generation) -> None:
        text: list[str] = []
        tokens: list[TokenText] = []
        while True:
            event = await generation.next()
            if isinstance(event, Delta):
                text.append(event.text)
                tokens += event.tokens
            elif isinstance(event, Done):
                replies[index] = Reply("".join(text), tuple(tokens), event.reason, event.usage)
                if failure(event) is not None:
                    failed.append(event)
                    nursery.cancel_scope.cancel()
                return

    async with trio.open_nursery() as nursery:
        for index, generation in enumerate(generations):
            nursery.start_soon(read, index, generation)
    if failed:
        error = failure(failed[0])
        assert error is not None
        raise error
    return [reply for reply in replies if reply is not None]


def total(usages: Sequence[Usage], choices: int) -> Usage:
    """The usage of a request: each prompt counts once, however many choices (``choices`` per prompt) it had."""
    firsts = usages[::choices]
    return Usage(
        prompt=sum(usage.prompt for usage in firsts),
        completion=sum(usage.completion for usage in usages),
        cached=sum(usage.cached for usage in firsts),
    )
