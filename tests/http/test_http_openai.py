"""The generation calls and the model list, on virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from quart_trio import QuartTrio
from quart_trio.testing import TrioClient
from trio.testing import MockClock

from superfluidd.daemon.service import Service
from tests.http.raw import frames, text_of, until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def ask(client: TrioClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, await response.get_data()
    return await response.get_json()


async def receive(client: TrioClient, path: str, body: Any, **headers: str) -> tuple[Any, bytes]:
    """Headers and body of a stream, read as it comes: ``post`` would wait for the end with a full buffer."""
    data = b""
    async with client.request(path, method="POST", headers=headers) as connection:
        await connection.send(json.dumps(body).encode())
        await connection.send_complete()
        try:
            while True:
                data += await connection.receive()
        except trio.EndOfChannel:
            pass
    assert connection.status_code == 200, data
    return connection.headers, data


async def stream(client: TrioClient, path: str, **body: Any) -> list[Any]:
    headers, data = await receive(client, path, {**body, "stream": True})
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    return frames(data)


async def refused(client: TrioClient, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request, which have to be the same whether it streams or not."""
    plain = await client.post(path, json=body)
    streamed = await client.post(path, json={**body, "stream": True})
    assert plain.status_code == streamed.status_code >= 400
    assert streamed.headers["content-type"] == "application/json"
    error = (await plain.get_json())["error"]
    assert error == (await streamed.get_json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return plain.status_code, error


async def test_a_chat_reply_has_openais_shape(autojump_clock: MockClock, client: TrioClient) -> None:
    reply = await ask(client, CHAT, model="simulated", messages=HELLO, max_tokens=12, ignore_eos=True)
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"]) == ("chat.completion", "simulated")
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = reply["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("path, prompt", [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "Hello"})])
@pytest.mark.parametrize("temperature", [0, 1.0])
async def test_what_streams_is_what_does_not(
    autojump_clock: MockClock, client: TrioClient, path: str, prompt: dict[str, Any], temperature: float
) -> None:
    fields = {**prompt, "max_tokens": 200, "ignore_eos": True, "seed": 7, "temperature": temperature}
    whole = (await ask(client, path, **fields))["choices"][0]
    text = whole["message"]["content"] if path == CHAT else whole["text"]
    chunks = await stream(client, path, **fields)
    assert "\ufffd" not in text
    assert text_of(chunks) == text
    assert chunks[-1] == "[DONE]"
    reasons = [choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert all("usage" not in chunk for chunk in chunks[:-1])
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
        assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}


async def test_the_usage_chunk_comes_last_and_only_when_asked_for(
    autojump_clock: MockClock, client: TrioClient
) -> None:
    chunks = await stream(
        client, CHAT, messages=HELLO, max_tokens=5, ignore_eos=True, stream_options={"include_usage": True}
    )
    *others, last, done = chunks
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in others)


@pytest.mark.parametrize("path, prompt", [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "Hello"})])
async def test_choices_differ_and_can_be_repeated(
    autojump_clock: MockClock, client: TrioClient, path: str, prompt: dict[str, Any]
) -> None:
    fields = {**prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 5, "n": 3}
    reply = await ask(client, path, **fields)
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert reply["usage"]["completion_tokens"] == 60
    alone = await ask(client, path, **{**fields, "n": 1})
    assert reply["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    chunks = await stream(client, path, **fields, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert chunks[-2]["usage"] == reply["usage"]
    finished = [part["index"] for chunk in chunks[:-1] for part in chunk["choices"] if part["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


async def test_more_choices_than_lanes_take_turns(
    autojump_clock: MockClock, client: TrioClient, service: Service
) -> None:
    reply = await ask(client, CHAT, messages=HELLO, max_tokens=10, ignore_eos=True, n=9)
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 9
    assert service.lanes() == ()


async def test_several_prompts_count_each_once(autojump_clock: MockClock, client: TrioClient) -> None:
    fields = {"max_tokens": 4, "ignore_eos": True}
    texts = [(await ask(client, TEXT, prompt=prompt, **fields)) for prompt in ("one", "three")]
    both = await ask(client, TEXT, prompt=["one", "three"], n=2, **fields)
    assert [choice["text"] for choice in both["choices"]] == [
        texts[0]["choices"][0]["text"],
        texts[0]["choices"][0]["text"],
        texts[1]["choices"][0]["text"],
        texts[1]["choices"][0]["text"],
    ]
    assert both["usage"]["prompt_tokens"] == sum(text["usage"]["prompt_tokens"] for text in texts)
    assert both["usage"]["completion_tokens"] == 16


async def test_token_ids_are_a_prompt(autojump_clock: MockClock, client: TrioClient) -> None:
    fields = {"max_tokens": 8, "ignore_eos": True}
    ids = list(b"abc")
    as_text = await ask(client, TEXT, prompt="abc", **fields)
    as_ids = await ask(client, TEXT, prompt=ids, **fields)
    assert as_ids["choices"] == as_text["choices"]
    assert as_ids["usage"] == as_text["usage"]
    status, error = await refused(client, TEXT, prompt=[1, 10**6])
    assert (status, error["param"]) == (400, "prompt")


async def test_stop_texts_end_a_reply_before_them(autojump_clock: MockClock, client: TrioClient) -> None:
    fields = {"messages": HELLO, "max_tokens": 60, "ignore_eos": True}
    text = (await ask(client, CHAT, **fields))["choices"][0]["message"]["content"]
    stop = text[10:14]
    cut = (await ask(client, CHAT, **fields, stop=[stop, "never said"]))["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == text[: text.index(stop)]
    assert text_of(await stream(client, CHAT, **fields, stop=stop)) == cut["message"]["content"]


async def test_chat_logprobs(autojump_clock: MockClock, client: TrioClient) -> None:
    fields = {"messages": HELLO, "max_tokens": 30, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    choice = (await ask(client, CHAT, **fields))["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == 30
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == choice["message"]["content"]
    assert all(len(token["top_logprobs"]) <= 2 and token["logprob"] < 0 for token in tokens)
    assert tokens[0]["top_logprobs"][0]["token"] == tokens[0]["token"]
    chunks = await stream(client, CHAT, **fields)
    streamed = [
        token
        for chunk in chunks[:-1]
        for part in chunk["choices"]
        if part["logprobs"] is not None
        for token in part["logprobs"]["content"]
    ]
    assert streamed == tokens


async def test_completion_logprobs(autojump_clock: MockClock, client: TrioClient) -> None:
    fields = {"prompt": "Hello", "max_tokens": 30, "ignore_eos": True, "logprobs": 3}
    choice = (await ask(client, TEXT, **fields))["choices"][0]
    found = choice["logprobs"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {30}
    assert found["text_offset"][0] == 0
    streamed: list[int] = []
    for chunk in (await stream(client, TEXT, **fields))[:-1]:
        logprobs = chunk["choices"][0]["logprobs"]
        streamed += logprobs["text_offset"] if logprobs else []
    assert streamed == found["text_offset"]


async def test_logit_bias_reaches_the_draw(autojump_clock: MockClock, client: TrioClient) -> None:
    reply = await ask(client, TEXT, prompt="x", max_tokens=5, logit_bias={str(ord("Z")): 100})
    assert reply["choices"][0]["text"] == "ZZZZZ"


async def test_a_prompt_beyond_the_window_is_refused_before_any_stream(
    autojump_clock: MockClock, client: TrioClient
) -> None:
    status, error = await refused(client, TEXT, prompt="x" * 1025)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "1025" in error["message"]
    assert "1024" in error["message"]
    status, error = await refused(client, CHAT, messages=[{"role": "user", "content": "x" * 2000}], n=2)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_refusals_are_statuses_even_for_streams(autojump_clock: MockClock, client: TrioClient) -> None:
    status, error = await refused(client, CHAT, messages=HELLO, temperature=-1)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "temperature")
    status, error = await refused(client, CHAT, messages=HELLO, model="gpt-9")
    assert (status, error["code"]) == (404, "model_not_found")
    assert "simulated" in error["message"]
    status, error = await refused(client, CHAT, messages=HELLO, response_format={"type": "json_object"})
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "response_format")
    status, error = await refused(client, TEXT, prompt="")
    assert (status, error["param"]) == (400, "prompt")


async def test_the_class_header_is_parsed_strictly(
    autojump_clock: MockClock, client: TrioClient, service: Service
) -> None:
    bad = await client.post(CHAT, json={"messages": HELLO}, headers={"x-superfluid-qos": "urgent"})
    assert bad.status_code == 400
    assert (await bad.get_json())["error"]["param"] == "x-superfluid-qos"
    seen: list[str] = []

    async def post(headers: dict[str, str]) -> None:
        await client.post(CHAT, json={"messages": HELLO, "max_tokens": 50, "ignore_eos": True}, headers=headers)

    for headers in ({}, {"x-superfluid-qos": " Interactive_Chat "}):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, headers)
            await until(lambda: bool(service.lanes()))
            seen.append(service.lanes()[0].qos)
    assert seen == ["agent", "interactive"]


async def test_a_request_id_is_taken_over_or_made(
    autojump_clock: MockClock, client: TrioClient, service: Service
) -> None:
    async def ident(**headers: str) -> str:
        response = await client.get("/v1/models", headers=headers)
        return str(response.headers["x-request-id"])

    assert await ident(**{"x-request-id": "job-42"}) == "job-42"
    for unfit in ("", "x" * 129, "with space", "tab\t", "é"):
        made = await ident(**{"x-request-id": unfit})
        assert made.startswith("req-")
        assert made != unfit
    assert await ident() != await ident()


@pytest.mark.parametrize("streams", [False, True])
async def test_an_operators_cancel_ends_a_reply_as_what_it_is(
    autojump_clock: MockClock, client: TrioClient, service: Service, streams: bool
) -> None:
    responses: list[Any] = []

    async def post() -> None:
        body = {"messages": HELLO, "ignore_eos": True, "stream": streams}
        if streams:
            responses.append((200, (await receive(client, CHAT, body, **{"x-request-id": "mine"}))[1]))
        else:
            response = await client.post(CHAT, json=body, headers={"x-request-id": "mine"})
            responses.append((response.status_code, await response.get_data()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(post)
        await until(lambda: any(lane.generated > 5 for lane in service.lanes()))
        service.cancel("mine")
    ((status, data),) = responses
    if streams:
        *chunks, error, done = frames(data)
        assert (status, error["error"]["code"], done) == (200, "cancelled", "[DONE]")
        assert all(part["finish_reason"] is None for chunk in chunks for part in chunk["choices"])
    else:
        assert (status, json.loads(data)["error"]["code"]) == (503, "cancelled")


async def test_a_draining_daemon_takes_no_more(autojump_clock: MockClock, client: TrioClient, service: Service) -> None:
    service.drain()
    status, error = await refused(client, CHAT, messages=HELLO)
    assert (status, error["code"]) == (503, "draining")
    response = await client.post(CHAT, json={"messages": HELLO})
    assert int(response.headers["retry-after"]) >= 1


async def test_the_models_are_listed(autojump_clock: MockClock, client: TrioClient) -> None:
    listed = await (await client.get("/v1/models")).get_json()
    assert [model["id"] for model in listed["data"]] == ["simulated"]
    one = await (await client.get("/v1/models/simulated")).get_json()
    assert one == listed["data"][0]
    assert one["object"] == "model"
    missing = await client.get("/v1/models/some/where")
    assert missing.status_code == 404
    assert (await missing.get_json())["error"]["code"] == "model_not_found"


async def test_what_is_not_routed_gets_an_envelope(autojump_clock: MockClock, client: TrioClient) -> None:
    unknown = await client.get("/v1/nothing")
    assert unknown.status_code == 404
    assert (await unknown.get_json())["error"]["code"] == "not_found"
    wrong = await client.get(CHAT)
    assert wrong.status_code == 405
    assert (await wrong.get_json())["error"]["code"] == "method_not_allowed"
    assert "POST" in wrong.headers["allow"]
    assert wrong.headers["x-request-id"]


async def test_malformed_json_is_a_400(autojump_clock: MockClock, client: TrioClient) -> None:
    response = await client.post(CHAT, data=b"{not json")
    assert response.status_code == 400
    assert (await response.get_json())["error"]["code"] == "malformed_json"


async def test_a_fault_of_ours_is_a_typed_500_and_logged(
    autojump_clock: MockClock, app: QuartTrio, client: TrioClient, caplog: pytest.LogCaptureFixture
) -> None:
    @app.get("/fault")
    async def fault() -> str:
        raise ZeroDivisionError("secret detail")

    response = await client.get("/fault", headers={"x-request-id": "abc"})
    body = await response.get_json()
    assert response.status_code == 500
    assert (body["error"]["type"], body["error"]["code"]) == ("server_error", "internal_error")
    assert "secret" not in body["error"]["message"]
    assert response.headers["x-request-id"] == "abc"
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "abc" in record.getMessage()
