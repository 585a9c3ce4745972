"""What OpenAI's replies look like, as bytes.

A streamed chunk is a fixed head, the JSON of its text and a fixed tail: building and encoding a dictionary for each
token of each stream would be most of the daemon's work.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from superfluidd.daemon.streams import Delta, Usage
from superfluidd.http.generate import Reply
from superfluidd.text.assembler import TokenText
from superfluidd.types import FinishReason

_encode = msgspec.json.Encoder().encode


class Writer(Protocol):
    """Writes one request's reply, in chunks or whole. A chunk is one SSE ``data`` frame."""

    def opening(self, choice: int) -> bytes:
        """What goes out before the first text of a choice; may be empty."""

    def delta(self, choice: int, event: Delta) -> bytes:
        """Some text of a choice."""

    def finish(self, choice: int, reason: FinishReason) -> bytes:
        """The end of a choice."""

    def usage(self, usage: Usage) -> bytes:
        """The end of the request, if its usage was asked for; else empty."""

    def whole(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """The reply of a request that does not stream."""


class ChatWriter:
    """Chat completions.

    Args:
        model: served name.
        created: unix seconds.
        logprobs: the request asked for log-probabilities.
        include_usage: end the stream with a usage chunk.
    """

    def __init__(self, model: str, created: int, *, logprobs: bool, include_usage: bool) -> None:
        self._whole = {"id": new_id("chatcmpl"), "object": "chat.completion", "created": created, "model": model}
        self._chunk = {**self._whole, "object": "chat.completion.chunk"}
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._head = _head(self._chunk)
        self._tail = _tail(include_usage)

    def opening(self, choice: int) -> bytes:
        """See :class:`Writer`."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._head + b"%d," % choice + delta + self._tail

    def delta(self, choice: int, event: Delta) -> bytes:
        """See :class:`Writer`."""
        logprobs = _encode(chat_logprobs(event.tokens)) if self._logprobs else b"null"
        return b'%s%d,"delta":{"content":%s},"logprobs":%s,"finish_reason":null%s' % (
            self._head,
            choice,
            _encode(event.text),
            logprobs,
            self._tail,
        )

    def finish(self, choice: int, reason: FinishReason) -> bytes:
        """See :class:`Writer`."""
        word = reason.value.encode()
        return self._head + b'%d,"delta":{},"logprobs":null,"finish_reason":"%s"' % (choice, word) + self._tail

    def usage(self, usage: Usage) -> bytes:
        """See :class:`Writer`."""
        return _usage_chunk(self._chunk, usage) if self._include_usage else b""

    def whole(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """See :class:`Writer`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": reply.text, "refusal": None},
                "logprobs": chat_logprobs(reply.tokens) if self._logprobs else None,
                "finish_reason": reply.reason.value,
            }
            for index, reply in enumerate(replies)
        ]
        return _encode({**self._whole, "choices": choices, "usage": usage_object(usage)})


class TextWriter:
    """Text completions. Arguments as for :class:`ChatWriter`."""

    def __init__(self, model: str, created: int, *, logprobs: bool, include_usage: bool) -> None:
        self._whole = {"id": new_id("cmpl"), "object": "text_completion", "created": created, "model": model}
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._head = _head(self._whole)
        self._tail = _tail(include_usage)
        self._offsets: dict[int, int] = {}

    def opening(self, choice: int) -> bytes:
        """See :class:`Writer`."""
        return b""

    def delta(self, choice: int, event: Delta) -> bytes:
        """See :class:`Writer`."""
        logprobs = b"null"
        if self._logprobs:
            offset = self._offsets.get(choice, 0)
            logprobs = _encode(text_logprobs(event.tokens, offset))
            self._offsets[choice] = offset + sum(len(token.text) for token in event.tokens)
        return b'%s%d,"text":%s,"logprobs":%s,"finish_reason":null%s' % (
            self._head,
            choice,
            _encode(event.text),
            logprobs,
            self._tail,
        )

    def finish(self, choice: int, reason: FinishReason) -> bytes:
        """See :class:`Writer`."""
        word = reason.value.encode()
        return self._head + b'%d,"text":"","logprobs":null,"finish_reason":"%s"' % (choice, word) + self._tail

    def usage(self, usage: Usage) -> bytes:
        """See :class:`Writer`."""
        return _usage_chunk(self._whole, usage) if self._include_usage else b""

    def whole(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """See :class:`Writer`."""
        choices = [
            {
                "index": index,
                "text": reply.text,
                "logprobs": text_logprobs(reply.tokens, 0) if self._logprobs else None,
                "finish_reason": reply.reason.value,
            }
            for index, reply in enumerate(replies)
        ]
        return _encode({**self._whole, "choices": choices, "usage": usage_object(usage)})


def new_id(prefix: str) -> str:
    """An id no other reply has."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage_object(usage: Usage) -> dict[str, Any]:
    """The ``usage`` of a reply."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.raw),
                "top_logprobs": [
                    {"token": other.text, "logprob": other.logprob, "bytes": list(other.raw)} for other in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def text_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    """``logprobs`` of a text choice; ``offset`` is where in the choice's text the first of these tokens starts."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.text: other.logprob for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _head(common: dict[str, Any]) -> bytes:
    return b"data: " + _encode(common)[:-1] + b',"choices":[{"index":'


def _tail(include_usage: bool) -> bytes:
    return b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"


def _usage_chunk(common: dict[str, Any], usage: Usage) -> bytes:
    return b"data: " + _encode({**common, "choices": [], "usage": usage_object(usage)}) + b"\n\n"
