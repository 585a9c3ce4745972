"""A generation as its client sees it: a stream of events that never makes the scheduler wait.

The model's task *pushes*, synchronously and without limit but the request's own length; the client's task *reads*
with :meth:`Generation.next`. Text that the client has not read yet is joined, so a reader that has stopped costs a
few kilobytes and nobody's time; how long it has been unread is what the stall rule looks at.

Text is a pure function of the tokens (:mod:`superfluidd.text.assembler`), so what streams equals what a
non-streaming reply returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import trio

from superfluidd.text.assembler import Assembler, TokenText
from superfluidd.types import FinishReason, QosClass, RequestId, SamplingParams, TokenLogprob


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request, ready to be scheduled.

    Attributes:
        prompt: token ids.
        sampling: how to draw.
        max_tokens: most tokens to generate; None fills the window.
        stop: texts that end the reply; they are not part of it.
        qos: class it is queued in; ``batch_invariant``: its lane ticks alone.
        origin: the client's or the edge's ``x-request-id``, for operators.
        param: the field that held the prompt, for errors.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    qos: QosClass = QosClass.AGENT
    origin: str = ""
    param: str = "messages"
    batch_invariant: bool = False


class Usage(msgspec.Struct, frozen=True):
    """Tokens a finished request used; ``cached`` of the prompt's came from the prefix cache."""

    prompt: int
    completion: int
    cached: int = 0


class Delta(msgspec.Struct, frozen=True):
    """Some more text, never empty of both; ``tokens`` have their log-probabilities where the request asked."""

    text: str
    tokens: tuple[TokenText, ...] = ()


class Pause(msgspec.Struct, frozen=True):
    """The request lost its lane and will go on later; nothing is repeated when it does."""

    why: str


class Resume(msgspec.Struct, frozen=True):
    """The request has a lane again."""


class Done(msgspec.Struct, frozen=True):
    """The last event. ``error`` says what went wrong when the reason is ``error``; ``code`` is its stable name."""

    reason: FinishReason
    usage: Usage
    error: str = ""
    code: str = ""


Event = Delta | Pause | Resume | Done


class Generation:
    """One request's stream. Use it as a context manager: leaving it early cancels the request.

    Resource handling: leaving the ``with`` block in any way before :class:`Done` was read frees the lane at the
    engine's next step. Only one task may read.
    """

    def __init__(
        self,
        request: RequestId,
        prompt_tokens: int,
        assembler: Assembler,
        cancel: Callable[[RequestId], None],
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.id = request
        self.prompt_tokens = prompt_tokens
        self._assembler = assembler
        self._cancel = cancel
        self._clock = clock
        self._events: deque[Event] = deque()
        self._text: list[str] = []
        self._tokens: list[TokenText] = []
        self._wakeup = trio.Event()
        self._unread_since: float | None = None
        self._done = False
        self._paused = False

    # -- the model task's side: synchronous, never blocks ----------------------------------------------------------

    def push(self, token: int, *, logprob: float | None, top: tuple[TokenLogprob, ...]) -> bool:
        """Add a token. True if the text now contains a stop text: the request is to be finished."""
        if self._paused:
            self._paused = False
            self._append(Resume())
        text, tokens, stopped = self._assembler.push(token, logprob, top)
        self._append_text(text, tokens)
        return stopped

    def pause(self, why: str) -> None:
        """The lane was lost. The next token resumes the stream."""
        if not self._paused:
            self._paused = True
            self._append(Pause(why))

    def finish(self, reason: FinishReason, usage: Usage, error: str = "", code: str = "") -> None:
        """The last event; held-back text goes out before it. Later calls do nothing."""
        if self._done:
            return
        self._done = True
        text, tokens = self._assembler.finish()
        self._append_text(text, tokens)
        if reason is FinishReason.LENGTH and self._assembler.stopped:
            reason = FinishReason.STOP  # the stop was there, and waited for a longer one that began before it
        self._append(Done(reason, usage, error, code))

    @property
    def done(self) -> bool:
        """Whether :class:`Done` has been pushed."""
        return self._done

    def unread_seconds(self) -> float:
        """How long the oldest unread event has been waiting."""
        return 0.0 if self._unread_since is None else self._clock() - self._unread_since

    def _append_text(self, text: str, tokens: tuple[TokenText, ...]) -> None:
        if text or tokens:
            self._text.append(text)
            self._tokens += tokens
            self._mark()

    def _append(self, event: Event) -> None:
        self._flush()
        self._events.append(event)
        self._mark()

    def _flush(self) -> None:
        if self._text:
            self._events.append(Delta("".join(self._text), tuple(self._tokens)))
            self._text.clear()
            self._tokens.clear()

    def _mark(self) -> None:
        if self._unread_since is None:
            self._unread_since = self._clock()
        self._wakeup.set()

    # -- the client's side ----------------------------------------------------------------------------------------

    async def next(self) -> Event:
        """The next event, waiting for it. After :class:`Done` there is none; do not ask."""
        while True:
            self._flush()
            if self._events:
                break
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        event = self._events.popleft()
        self._unread_since = self._clock() if self._events else None
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request unless it is done. Idempotent."""
        if not self._done:
            self._cancel(self.id)
