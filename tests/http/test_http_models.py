"""Loading and unloading over HTTP, and what requests and pages say meanwhile."""

from __future__ import annotations

import itertools
import json

import pytest
import trio
from quart_trio import QuartTrio
from quart_trio.testing import TrioClient
from trio.testing import MockClock

from superfluidd.config import Settings
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.http.app import create_app
from tests.conftest import Simulated, simulated_spec
from tests.http.raw import Server, frames, until

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


async def test_a_model_is_unloaded_and_loaded(autojump_clock: MockClock, client: TrioClient, service: Service) -> None:
    response = await client.post("/v1/models/unload", json={"model": "simulated"})
    shown = await response.get_json()
    assert response.status_code == 200
    assert (shown["id"], shown["object"], shown["loaded"], shown["state"]) == ("simulated", "model", False, "unloaded")
    refused = await client.post("/v1/chat/completions", json=CHAT)
    error = (await refused.get_json())["error"]
    assert (refused.status_code, error["code"], error["type"]) == (503, "model_unloaded", "server_error")
    assert error["message"] == "model simulated is not loaded; `sfctl load simulated` loads it again"
    for page, status in (("/health", 503), ("/readyz", 503), ("/livez", 200)):
        assert (await client.get(page)).status_code == status
    metrics = (await (await client.get("/metrics")).get_data()).decode()
    assert 'superfluid_model_state{model="simulated",state="unloaded"} 1.0' in metrics
    assert (await (await client.get("/slots")).get_json()) == []
    response = await client.post("/v1/models/load", json={"model": "simulated"})
    assert (await response.get_json())["state"] == "ready"
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    listed = (await (await client.get("/v1/models")).get_json())["data"]
    assert [(one["id"], one["loaded"]) for one in listed] == [("simulated", True)]


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_what_is_wrong_is_said(autojump_clock: MockClock, client: TrioClient, verb: str) -> None:
    path = f"/v1/models/{verb}"
    for body, status, code, param in (
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"model": "/models/other.gguf"}, 404, "model_not_found", "model"),
        ({"model": 7}, 400, "invalid_value", "model"),
        ({}, 400, "invalid_value", "model"),
        ([], 400, "invalid_value", None),
    ):
        response = await client.post(path, json=body)
        error = (await response.get_json())["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    response = await client.post(path, data="{", headers={"content-type": "application/json"})
    assert (await response.get_json())["error"]["code"] == "malformed_json"
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = await client.post(path, data='{"model": "simulated"}', headers={"content-type": kind})
        assert response.status_code == 415, "what any page in a browser may send changes nothing"
        assert "application/json" in (await response.get_json())["error"]["message"]
    response = await client.get(path)
    assert response.status_code in (404, 405)


async def test_now_ends_a_stream_with_an_error_in_it(
    autojump_clock: MockClock, server: Server, service: Service
) -> None:
    stream, operator = await server.connect(), await server.connect()
    await stream.send("POST", "/v1/chat/completions", CHAT | {"max_tokens": 900, "stream": True, "ignore_eos": True})
    await stream.response()
    await until(lambda: bool(service.lanes()) and service.lanes()[0].generated > 5)
    body = {"model": "simulated", "now": True}
    status, data = await operator.ask("POST", "/v1/models/unload", body, content_type="application/json")
    assert (status, json.loads(data)["state"]) == (200, "unloaded")
    *_, error, done = frames(await stream.rest())
    assert (error["error"]["code"], done) == ("model_unloaded", "[DONE]")


async def test_a_request_wakes_a_resting_model(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    model = Model("m", "", Simulated(simulated_spec()).start, itertools.count(1), idle_timeout=5.0)
    await nursery.start(model.run)
    app: QuartTrio = create_app(Service(Settings(), {"m": model}))
    client = app.test_client()
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello", "max_tokens": 5})):
        await trio.sleep(6.0)
        assert model.view().state == "resting"
        for page in ("/health", "/readyz"):
            assert (await client.get(page)).status_code == 200
        response = await client.post(path, json=body)
        assert response.status_code == 200
        assert model.view().state == "ready"
    nursery.cancel_scope.cancel()
