"""Chat messages to a prompt, by the model's own Jinja template.

A template comes with the model file and is as trustworthy as a download. It runs in Jinja's immutable sandbox, which
keeps it from Python's internals but not from running for ever; that is what :class:`_Budget` is for. Loop rounds and
calls are counted while it renders and whatever it repeats or joins is measured; over the limit, the one request fails.

What templates may use beyond plain Jinja is what Hugging Face's renderer offers: ``break`` and ``continue``,
``raise_exception``, ``strftime_now``, a ``tojson`` that escapes nothing for HTML, and ``generation`` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from superfluidd.errors import InvalidValue, UnsupportedParameter

MAX_STEPS = 1_000_000
CALL_STEPS = 5
"""A loop round is one step, a call is five: all of them take about half a second. Real templates need a few dozen steps
per message."""

MAX_TEXT = 32 * 1024 * 1024
"""Longest text a rendering may build anywhere, in characters."""

MAX_DIGITS = 4096
"""Powers and products of integers stop here; their cost grows faster than their length."""


class ChatTemplate:
    """A compiled chat template.

    A template that is missing or does not compile is no reason not to serve the model: text completions need none.
    So the constructor never fails; look at :attr:`missing` and :attr:`compile_error` to report it at load, and
    :meth:`render` refuses each request with the reason.

    Args:
        source: Jinja, as the model file has it; empty if it has none.
        bos, eos: what the template sees as ``bos_token`` and ``eos_token``.
        now: the clock behind ``strftime_now``.
    """

    def __init__(self, source: str, *, bos: str, eos: str, now: Callable[[], datetime] = datetime.now) -> None:
        self.missing = not source.strip()
        self.compile_error = ""
        """Why the template cannot be used, with the line; empty if it can."""
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template: Template | None = None
        if self.missing:
            return
        environment = _environment(now)
        try:
            self._template = environment.from_string(_Instrument().visit(environment.parse(source)))
        except TemplateSyntaxError as error:
            self.compile_error = f"{error.message} (line {error.lineno})"
        except Exception as error:
            # Python's own compiler has limits as well, such as 20 nested blocks.
            self.compile_error = f"{type(error).__name__}: {error}"

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: as the template expects them: ``role``, ``content`` and whatever else it looks at.
            add_generation_prompt: open the assistant's turn.
            tools: tool definitions, for templates that know them.
            extra: further variables; they cannot replace the ones above.

        Raises:
            UnsupportedParameter: the model has no usable template.
            InvalidValue: the template refuses the messages or fails on them; its own words are in the message.
        """
        if self._template is None:
            trouble = f"does not compile: {self.compile_error}" if self.compile_error else ""
            raise UnsupportedParameter(
                (f"the model's chat template {trouble}; " if trouble else "the model has no chat template; ")
                + "send a finished prompt to /v1/completions instead",
                param="messages",
            )
        token = _budget.set(_Budget())
        try:
            return self._template.render(
                {
                    **(extra or {}),
                    **self._tokens,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _Refused as error:
            raise InvalidValue(
                f"the model's chat template refuses these messages: {error.message}", param="messages"
            ) from error
        # Any error at all: a template can add None to a text or index past an end as easily as misuse Jinja.
        except Exception as error:
            raise InvalidValue(
                f"the model's chat template cannot render these messages: {_words(error)}", param="messages"
            ) from error
        finally:
            _budget.reset(token)


class _Refused(TemplateError):
    """The template called ``raise_exception``."""


class _Exceeded(TemplateError):
    """The rendering ran over its budget."""


class _Budget:
    """What is left of one rendering's budget."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Count a loop round or a call."""
        self._steps -= steps
        if self._steps < 0:
            raise _Exceeded(f"it takes more than {MAX_STEPS} steps")


_budget: ContextVar[_Budget] = ContextVar("_budget")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with everything that can grow without end counted or measured."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend(CALL_STEPS)
        return _measured(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        return _measured(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _PADDING)

    concat = staticmethod(lambda parts: _joined(parts))
    """Jinja joins with it: the output, the body of every macro, every captured block."""


_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
"""Methods whose result has nothing to do with the size of what goes in."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.filters[_COUNTED] = _counted
    environment.filters[_JOINED] = _joined
    del environment.filters["center"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


_COUNTED = "superfluidd counted"
_JOINED = "superfluidd joined"
"""Filters with a space in their names: a template cannot replace what :class:`_Instrument` puts in."""


class _Instrument(NodeTransformer):
    """Counts the rounds of every loop and measures what ``~`` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return _filtered(parts, _JOINED)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.spend(1)
        yield value


def _joined(parts: Iterable[Any]) -> str:
    """Joins texts, up to the limit."""
    kept: list[str] = []
    size = 0
    for part in parts:
        text = str(part)
        size += len(text)
        if size > MAX_TEXT:
            raise _too_long()
        kept.append(text)
    return "".join(kept)


def _measured(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_TEXT:
        raise _too_long()
    return value


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        digits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if digits > MAX_DIGITS:
            raise _Exceeded("it computes with huge numbers")
    for text, times in ((left, right), (right, left)):
        if isinstance(text, (str, list, tuple)) and isinstance(times, int) and len(text) * times > MAX_TEXT:
            raise _too_long()


def _too_long() -> _Exceeded:
    return _Exceeded(f"it builds a text of more than {MAX_TEXT} characters")


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    if isinstance(error, SecurityError):
        return f"it does what the sandbox forbids: {error.message}"
    if isinstance(error, TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"
