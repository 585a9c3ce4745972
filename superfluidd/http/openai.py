"""OpenAI's calls: chat completions, text completions, models."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import trio
from quart import Blueprint
from quart.wrappers import Response

from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.daemon.streams import GenerationRequest, Usage
from superfluidd.errors import InvalidValue
from superfluidd.http import generate, sampling, schema, sse
from superfluidd.http.body import json_reply, read_body
from superfluidd.http.lifetime import lifetime
from superfluidd.http.qos import CACHED_HEADER, QOS_HEADER, read_headers
from superfluidd.http.replies import ChatWriter, TextWriter, Writer


def blueprint(service: Service) -> Blueprint:
    """The routes under ``/v1``."""
    routes = Blueprint("openai", __name__)

    @routes.post("/v1/chat/completions")
    async def chat() -> Response:
        body = schema.decode_chat(await read_body())
        model = service.resolve(body.model)
        alternatives = sampling.alternatives("top_logprobs", body.top_logprobs) or 0
        logprobs = alternatives if body.logprobs else None
        pattern = _pattern(service, model, body, logprobs, "messages")
        await model.wake()
        prompt = await chat_prompt(model, body)
        writer = ChatWriter(model.name, _now(), logprobs=logprobs is not None, include_usage=body.include_usage)
        return await _answer(model, pattern, [prompt], body, writer)

    @routes.post("/v1/completions")
    async def completions() -> Response:
        body = schema.decode_completion(await read_body())
        model = service.resolve(body.model)
        logprobs = sampling.alternatives("logprobs", body.logprobs)
        pattern = _pattern(service, model, body, logprobs, "prompt")
        await model.wake()
        prompts = [await text_prompt(model, prompt) for prompt in schema.prompts(body)]
        writer = TextWriter(model.name, _now(), logprobs=logprobs is not None, include_usage=body.include_usage)
        return await _answer(model, pattern, prompts, body, writer)

    @routes.get("/v1/models")
    async def models() -> Response:
        return json_reply({"object": "list", "data": [model_object(model) for model in service.models.values()]})

    @routes.get("/v1/models/<path:name>")
    async def one_model(name: str) -> Response:
        return json_reply(model_object(service.named(name)))

    return routes


async def chat_prompt(model: Model, body: schema.ChatBody) -> tuple[int, ...]:
    """The messages as tokens.

    Raises:
        ClientError: the model's template refuses them.
    """
    messages, extra = schema.template_messages(body), schema.template_extra(body)

    def render() -> str:
        return model.template.render(messages, add_generation_prompt=True, tools=None, extra=extra)

    size = sum(len(str(message["content"])) for message in messages)
    if size > generate.THREAD_BYTES:
        text = await trio.to_thread.run_sync(render, abandon_on_cancel=True)
    else:
        text = render()
    info = model.info
    # Most templates write the first token out; a second one would shift every position the model was trained on.
    add_bos = info.add_bos and not (info.bos_text and text.startswith(info.bos_text))
    return _not_empty(await model.tokenize(text, add_bos=add_bos, parse_special=True), "messages")


async def text_prompt(model: Model, prompt: str | list[int]) -> tuple[int, ...]:
    """One prompt of a text completion as tokens; token ids are taken as they are.

    Raises:
        InvalidValue: it has no tokens, or ids that the model does not have.
    """
    if isinstance(prompt, str):
        tokens = await model.tokenize(prompt, add_bos=model.info.add_bos, parse_special=True)
        return _not_empty(tokens, "prompt")
    size = model.info.vocabulary
    for token in prompt:
        if not 0 <= token < size:
            raise InvalidValue(f"{token} is not a token id of this model, 0 to {size - 1}", param="prompt")
    return _not_empty(prompt, "prompt")


def _pattern(service: Service, model: Model, body: schema.Body, logprobs: int | None, param: str) -> GenerationRequest:
    """Everything about the request but its prompt: checked before any work is spent on that."""
    asked = read_headers(service.settings)
    return GenerationRequest(
        prompt=(),
        sampling=sampling.sampling(body, service.settings, logprobs=logprobs, vocabulary=model.info.vocabulary),
        max_tokens=sampling.max_tokens(body, service.settings),
        stop=sampling.stops(body),
        qos=asked.qos,
        batch_invariant=asked.batch_invariant,
        origin=lifetime().id,
        param=param,
    )


async def _answer(
    model: Model,
    pattern: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    body: schema.Body,
    writer: Writer,
) -> Response:
    """Submit every choice of every prompt, then stream or wait."""
    life = lifetime()
    draws = [sampling.for_choice(pattern.sampling, index) for index in range(body.choices)]
    requests = [msgspec.structs.replace(pattern, prompt=prompt, sampling=draw) for prompt in prompts for draw in draws]
    generations = generate.submit(model, requests, life)

    def totals(usages: Sequence[Usage]) -> Usage:
        return generate.total(usages, body.choices)

    def progress() -> str:
        return next((words for generation in generations if (words := model.whereabouts(generation.id))), "")

    reply: Response
    if body.stream:
        source = generate.source(generations, life)
        reply = sse.response(sse.frames(source, writer, len(generations), totals, progress))
    else:
        replies = await generate.collect(generations)
        usage = totals([reply.usage for reply in replies])
        reply = Response(writer.whole(replies, usage), content_type="application/json")
        reply.headers[CACHED_HEADER] = str(usage.cached)
    reply.headers[QOS_HEADER] = pattern.qos.label
    return reply


def _not_empty(tokens: Sequence[int], param: str) -> tuple[int, ...]:
    if not tokens:
        raise InvalidValue(f"{param} has no tokens; send some text", param=param)
    return tuple(tokens)


def model_object(model: Model) -> dict[str, object]:
    """A model as OpenAI's clients read it; ``loaded`` and ``state`` are ours."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "superfluidd",
        "loaded": model.standing in ("ready", "recovering"),
        "state": model.standing,
    }


def _now() -> int:
    return int(time.time())
