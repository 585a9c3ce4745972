"""Health, slots and metrics."""

from __future__ import annotations

import itertools
import re
from typing import Any

import trio
from prometheus_client.parser import text_string_to_metric_families
from quart_trio.testing import TrioClient
from trio.testing import MockClock

from superfluidd.config import Settings
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.engine.inprocess import inprocess_starter
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.http.app import create_app
from tests.conftest import simulated_spec
from tests.http.raw import until

LONG = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}


async def page(client: TrioClient, path: str) -> tuple[int, Any]:
    response = await client.get(path)
    return response.status_code, await response.get_json()


async def test_health_while_serving_and_draining(
    autojump_clock: MockClock, client: TrioClient, service: Service
) -> None:
    assert await page(client, "/health") == (200, {"status": "ok", "models_loaded": 1, "models_known": 1})
    assert await page(client, "/livez") == (200, {"status": "ok"})
    assert await page(client, "/readyz") == (200, {"status": "ready", "models": {"simulated": "ready"}})
    service.drain()
    assert (await page(client, "/health"))[1]["status"] == "draining"
    assert (await page(client, "/readyz"))[0] == 503
    assert (await page(client, "/livez"))[0] == 200


async def test_every_page_answers_while_a_model_loads(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    start = inprocess_starter(lambda: SimulatedRuntime(simulated_spec()), load_seconds=30)
    model = Model("slow", "", start, itertools.count(1))
    client = create_app(Service(Settings(engine="simulated"), {"slow": model})).test_client()
    nursery.start_soon(model.run)
    assert await page(client, "/health") == (503, {"status": "loading", "models_loaded": 0, "models_known": 1})
    assert (await page(client, "/readyz"))[0] == 503
    assert (await page(client, "/livez"))[0] == 200
    assert await page(client, "/slots") == (200, [])
    assert (await page(client, "/v1/models"))[1]["data"][0]["id"] == "slow"
    assert (await client.get("/metrics")).status_code == 200
    response = await client.post("/v1/chat/completions", json={**LONG, "stream": True})
    assert response.status_code == 503
    assert (await response.get_json())["error"]["code"] == "model_loading"
    assert int(response.headers["retry-after"]) >= 1
    await trio.sleep(31)
    assert (await page(client, "/health"))[0] == 200
    nursery.cancel_scope.cancel()


async def metrics(client: TrioClient) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, in the order of the labels' names."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    text = await response.get_data(as_text=True)
    families = list(text_string_to_metric_families(text))
    assert all(re.match("superfluid_", family.name) and family.documentation for family in families)
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def test_slots_and_metrics_show_what_runs(
    autojump_clock: MockClock, client: TrioClient, service: Service
) -> None:
    async def post(qos: str) -> None:
        await client.post("/v1/chat/completions", json=LONG, headers={"x-superfluid-qos": qos, "x-request-id": qos})

    before = await metrics(client)
    assert before["superfluid_lanes_active", "simulated"] == 0
    async with trio.open_nursery() as nursery:
        for qos in ["interactive"] * 2 + ["background"] * 4:
            nursery.start_soon(post, qos)
        await until(lambda: len(service.queue()) == 2 and len(service.lanes()) == 4)
        _, slots = await page(client, "/slots")
        assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
        assert all(slot["is_processing"] and slot["n_ctx"] == 1024 for slot in slots)
        assert {slot["request_id"] for slot in slots} == {slot["class"] for slot in slots}
        seen = await metrics(client)
        waiting = [entry.qos for entry in service.queue()]
        assert seen["superfluid_lanes_active", "simulated"] == 4
        for qos in ("interactive", "completion", "agent", "background"):
            assert seen["superfluid_queue_depth", qos, "simulated"] == waiting.count(qos)
        assert seen["superfluid_pool_cells_total", "simulated"] == 4 * 1024
        assert seen["superfluid_pool_cells_promised", "simulated"] > 0
        nursery.cancel_scope.cancel()
    await until(lambda: not service.lanes())
    _, slots = await page(client, "/slots")
    assert [slot["is_processing"] for slot in slots] == [False] * 4
    after = await metrics(client)
    assert after["superfluid_ticks_total", "simulated"] > before["superfluid_ticks_total", "simulated"]
    assert after["superfluid_model_state", "simulated", "ready"] == 1
    assert after["superfluid_http_requests_total", "/slots", "200"] == 2
    await client.get("/made/up/path")
    assert (await metrics(client))["superfluid_http_requests_total", "unknown", "404"] == 1
