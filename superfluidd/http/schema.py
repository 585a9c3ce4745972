"""Request bodies, of OpenAI's two generation calls and of loading and unloading: bytes to checked records, or an error
that names the field.

Types are msgspec's business: strict, so true is not a number and "5" is not 5. Unknown fields are ignored, and null
means absent. Known fields that this server cannot honour are listed in :data:`HARMLESS` with the values that would
change nothing; any other value is refused by name, because quietly ignoring it would be a wrong answer.

Ranges of sampling fields are in :mod:`superfluidd.http.sampling`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from superfluidd.errors import ClientError, InvalidValue, UnsupportedParameter

MAX_CHOICES = 128
"""Most choices of one request, over all its prompts."""

ROLES = ("system", "developer", "user", "assistant", "tool")

_NULL = msgspec.Raw(b"null")


class MalformedJson(ClientError):
    """The body is not JSON at all."""

    code = "malformed_json"


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One chat message, as sent."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields both calls share, then those that are only ever refused or harmless."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    response_format: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL
    functions: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    grammar: msgspec.Raw = _NULL
    json_schema: msgspec.Raw = _NULL
    suffix: msgspec.Raw = _NULL
    echo: msgspec.Raw = _NULL
    best_of: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    modalities: msgspec.Raw = _NULL
    prediction: msgspec.Raw = _NULL
    web_search_options: msgspec.Raw = _NULL
    store: msgspec.Raw = _NULL

    @property
    def choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """The stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(Body, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


HARMLESS: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "grammar": ("",),
    "json_schema": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
}
"""Values, beside null, that ask for what happens anyway."""

_BodyT = TypeVar("_BodyT", bound=Body)


class LoadBody(msgspec.Struct, frozen=True):
    """``POST /v1/models/load``."""

    model: str


class UnloadBody(msgspec.Struct, frozen=True):
    """``POST /v1/models/unload``; ``now``: end its requests instead of waiting for them."""

    model: str
    now: bool = False


_LOAD = msgspec.json.Decoder(LoadBody)
_UNLOAD = msgspec.json.Decoder(UnloadBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)


def decode_chat(data: bytes) -> ChatBody:
    """A chat request.

    Raises:
        MalformedJson: not JSON.
        InvalidValue: a field is missing, of the wrong type or without meaning; ``param`` names it.
        UnsupportedParameter: a known field asks for something this server does not do.
    """
    body = _decode(_CHAT, data)
    if not body.messages:
        raise InvalidValue("messages is empty; send at least one message", param="messages")
    for index, message in enumerate(body.messages):
        _check_message(message, f"messages[{index}]")
    if body.top_logprobs and not body.logprobs:
        raise InvalidValue("top_logprobs needs logprobs to be true", param="top_logprobs")
    return body


def decode_completion(data: bytes) -> CompletionBody:
    """A text completion request. Raises what :func:`decode_chat` raises."""
    body = _decode(_COMPLETION, data)
    prompts(body)
    return body


def decode_load(data: bytes) -> LoadBody:
    """What to load. Raises :class:`MalformedJson`, :class:`InvalidValue`."""
    with _refusals(data):
        return _LOAD.decode(data)


def decode_unload(data: bytes) -> UnloadBody:
    """What to unload. Raises :class:`MalformedJson`, :class:`InvalidValue`."""
    with _refusals(data):
        return _UNLOAD.decode(data)


def prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion, each a text or token ids, in order.

    Raises:
        InvalidValue: there are none, one is empty, or texts and token ids are mixed.
    """
    given = body.prompt
    if isinstance(given, str):
        return [given]
    found: list[str | list[int]] = []
    if given and all(isinstance(item, int) for item in given):
        found.append([item for item in given if isinstance(item, int)])
    else:
        found = [item for item in given if not isinstance(item, int)]
        if len(found) != len(given) or len({type(item) for item in found}) > 1:
            raise InvalidValue("prompt mixes texts and token ids; send one kind", param="prompt")
    if not found:
        raise InvalidValue("prompt is empty; send a text or token ids", param="prompt")
    for index, item in enumerate(found):
        if item == []:
            raise InvalidValue(f"prompt[{index}] has no tokens", param=f"prompt[{index}]")
    if len(found) * body.choices > MAX_CHOICES:
        raise InvalidValue(
            f"{len(found)} prompts with n={body.choices} ask for more than {MAX_CHOICES} choices; send fewer",
            param="prompt",
        )
    return found


def template_messages(body: ChatBody) -> list[dict[str, object]]:
    """The messages as chat templates expect them: content is one text, absent fields are absent."""
    found: list[dict[str, object]] = []
    for message in body.messages:
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        # No template we know has a developer turn; it is what OpenAI renamed system to.
        record: dict[str, object] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content or "",
        }
        if message.name is not None:
            record["name"] = message.name
        if message.tool_calls:
            record["tool_calls"] = message.tool_calls
        if message.tool_call_id is not None:
            record["tool_call_id"] = message.tool_call_id
        found.append(record)
    return found


def template_extra(body: ChatBody) -> dict[str, object]:
    """Variables for the chat template beside the messages."""
    extra = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        extra.setdefault("enable_thinking", body.enable_thinking)
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    return extra


def _check_message(message: Message, where: str) -> None:
    if message.role not in ROLES:
        raise InvalidValue(f"{message.role!r} is not a role; legal: {', '.join(ROLES)}", param=f"{where}.role")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise InvalidValue(f"{where}.content is missing; send a text", param=f"{where}.content")
    if not isinstance(message.content, list):
        return
    if not message.content:
        raise InvalidValue(f"{where}.content has no parts; send a text", param=f"{where}.content")
    for index, part in enumerate(message.content):
        param = f"{where}.content[{index}]"
        if part.type != "text":
            raise UnsupportedParameter(
                f"content parts of type {part.type!r} are not supported here; send parts of type 'text'",
                param=f"{param}.type",
            )
        if part.text is None:
            raise InvalidValue(f"{param}.text is missing", param=f"{param}.text")


def _decode(decoder: msgspec.json.Decoder[_BodyT], data: bytes) -> _BodyT:
    with _refusals(data):
        body = decoder.decode(data)
        refusable = {name: msgspec.json.decode(getattr(body, name)) for name in HARMLESS}
    if not 1 <= body.choices <= MAX_CHOICES:
        raise InvalidValue(f"n must be from 1 to {MAX_CHOICES}, got {body.n}", param="n")
    for name, value in refusable.items():
        _check_honoured(name, value, refusable, body)
    return body


@contextmanager
def _refusals(data: bytes) -> Iterator[None]:
    """msgspec's errors as ours."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except msgspec.DecodeError as error:
        raise _not_json(data, str(error)) from None
    except RecursionError:
        raise MalformedJson("the request body is nested too deeply") from None


def _check_honoured(name: str, value: object, fields: dict[str, object], body: Body) -> None:
    # 1 == True in Python: the types have to agree as well.
    if value is None or any(value == fine and type(value) is type(fine) for fine in HARMLESS[name]):
        return
    if name == "best_of" and value == body.choices:
        return
    if name == "tools" and fields["tool_choice"] == "none":
        return
    if name == "functions" and fields["function_call"] == "none":
        return
    raise UnsupportedParameter(f"{name} is not supported by this server; leave it out", param=name)


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


def _wrong_type(text: str) -> InvalidValue:
    """msgspec's words for a type error, as ours; its path becomes ``param``."""
    match = _PATH.match(text)
    assert match is not None
    what, path = match["what"], (match["path"] or "$").removeprefix("$").removeprefix(".")
    param = path.replace("[...]", "")
    missing = _MISSING.search(what)
    if missing is not None:
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return InvalidValue(f"{param} is required", param=param)
    what = what[:1].lower() + what[1:].replace("`", "")
    return InvalidValue(f"{param or 'the request body'}: {what}", param=param or None)


def _not_json(data: bytes, reason: str) -> ClientError:
    """Python clients send NaN and Infinity, which JSON has not; say which field it was instead of which byte."""
    if b"NaN" in data or b"Infinity" in data:
        try:
            loose = json.loads(data)
        except (ValueError, RecursionError):
            loose = None
        if isinstance(loose, dict):
            for name, value in loose.items():
                if isinstance(value, float) and not math.isfinite(value):
                    return InvalidValue(f"{name} must be a finite number, got {value}", param=name)
    return MalformedJson(f"the request body is not valid JSON: {reason[:1].lower()}{reason[1:]}")
