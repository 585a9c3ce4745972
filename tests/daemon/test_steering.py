"""What an operator does to a served model, and what they are told, on virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
import trio
from trio.testing import MockClock

from superfluidd.config import Settings
from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.daemon.streams import Done, Generation, GenerationRequest, Pause, Resume
from superfluidd.engine.runtimes.simulated import LANE_SECONDS, PREFILL_RATE, PREFILL_SECONDS, ROUND_SECONDS
from superfluidd.errors import InvalidValue, ModelLoading, UnknownRequest
from superfluidd.scheduling.entries import Cache
from superfluidd.types import FinishReason, QosClass, SamplingParams
from tests.conftest import Simulated, simulated_spec
from tests.daemon.test_model import prompt, read
from tests.http.raw import until

CHAT, COMPLETION, AGENT, BACKGROUND = QosClass


@pytest.fixture
def simulated() -> Simulated:
    """Two lanes and one spare sequence."""
    return Simulated(msgspec.structs.replace(simulated_spec(lanes=2), spare=1))


@pytest.fixture
def model(service: Service) -> Model:
    return service.resolve(None)


def ask(model: Model, tokens: Sequence[int], count: int, qos: QosClass, origin: str = "") -> Generation:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return model.submit(
        GenerationRequest(prompt=tuple(tokens), sampling=sampling, max_tokens=count, qos=qos, origin=origin)
    )


async def test_a_chat_meets_a_full_house_and_has_its_token_after_one_step(
    autojump_clock: MockClock, model: Model
) -> None:
    background = [ask(model, prompt(number, 20), 300, BACKGROUND) for number in range(2)]
    await trio.sleep(1.0)
    start = trio.current_time()
    chat = ask(model, prompt(9, 40), 3, CHAT)
    await chat.next()
    took = trio.current_time() - start
    round_of_two = ROUND_SECONDS + 2 * LANE_SECONDS
    prefill = PREFILL_SECONDS + 40 / PREFILL_RATE
    # What is left of the round in flight, then a round of the lane that stays and the chat's prompt.
    assert prefill < took <= round_of_two + ROUND_SECONDS + LANE_SECONDS + prefill + 1e-9
    await read(chat)
    alone = [await read(ask(model, prompt(number, 20), 300, BACKGROUND)) for number in range(2)]
    cut = [await read(generation) for generation in background]
    assert [text for text, _, _ in cut] == [text for text, _, _ in alone]
    events = [event for _, _, events in cut for event in events]
    assert [type(event) for event in events] == [Pause, Resume]
    assert model.view().preemptions["background"] == 1


async def test_the_trail_tells_the_story(autojump_clock: MockClock, service: Service, model: Model) -> None:
    first = ask(model, prompt(1, 20), 200, BACKGROUND, "job-1")
    other = ask(model, prompt(2, 20), 200, AGENT, "job-2")
    await trio.sleep(0.5)
    chat = ask(model, prompt(3, 20), 10, CHAT, "chat")
    await trio.sleep(0.05)
    (paused,) = service.explain("job-1")
    assert paused.state == "paused"
    assert paused.now == "number 1 of the background queue; it waits for a lane: all 2 are busy"
    assert paused.origin == "job-1"
    await read(chat)
    await trio.sleep(0.05)
    (running,) = service.explain(str(first.id))
    assert running.state == "running"
    assert running.now == f"in lane {running.trail[-1]['lane']}: decoding class=background"
    story = "\n".join(running.sentences)
    assert "queued as background, nobody ahead of it in its class" in story
    assert f"for request {chat.id} (interactive)" in story
    assert "resumed in lane" in story
    assert "tokens of KV were still there" in story
    await read(first)
    await read(other)
    (ended,) = service.explain("job-1")
    assert (ended.state, ended.now) == ("ended", "it has ended")
    assert ended.sentences[-1].endswith("ended: length after 200 tokens")
    with pytest.raises(UnknownRequest, match="ended lately"):
        service.explain("job-99")


async def test_a_waiting_requests_place_is_told(autojump_clock: MockClock, service: Service, model: Model) -> None:
    running = [ask(model, prompt(number, 20), 300, AGENT) for number in range(2)]
    waiting = [ask(model, prompt(5 + number, 20), 3, AGENT) for number in range(3)]
    await trio.sleep(0.2)
    assert [model.whereabouts(one.id) for one in waiting] == [
        f"queued class=agent position={place}" for place in (1, 2, 3)
    ]
    (last,) = service.explain(str(waiting[2].id))
    assert last.now == "number 3 of the agent queue; it waits for the 2 ahead of it in its class"
    assert [view.why for view in service.queue()] == ["a lane: all 2 are busy", "its turn", "its turn"]
    for one in (*running, *waiting):
        await read(one)
        assert model.whereabouts(one.id) == ""


async def test_caps_are_set_at_once_and_kill_nobody(autojump_clock: MockClock, service: Service, model: Model) -> None:
    agents = [ask(model, prompt(number, 20), 100, AGENT) for number in range(3)]
    await trio.sleep(0.2)
    service.set_caps({"foreground": 1, "background": 2})
    held = {view.qos: (view.cap, view.held, view.queued) for view in service.classes()}
    assert held["agent"] == (1, 2, 1)
    assert held["background"] == (2, 0, 0)
    assert held["interactive"] == (None, 0, 0)
    most: list[int] = []

    async def count() -> None:
        while True:
            if any(lane.request == agents[2].id for lane in service.lanes()):
                most.append(len(service.lanes()))
            await trio.sleep(0.005)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for agent in agents:
            _, done, _ = await read(agent)
            assert done.reason is FinishReason.LENGTH
        nursery.cancel_scope.cancel()
    assert len(most) > 10
    assert set(most) == {1}, "the third gets its lane when both are free again"
    service.set_caps({"agent": None})
    assert {view.qos: view.cap for view in service.classes()}["agent"] is None


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ({}, "no caps are named"),
        ({"agent": 1, "urgent": 1}, "not a QoS class"),
        ({"agent": 1, "foreground": 2}, "capped twice"),
        ({"background": 2, "agent": 3}, "from 1 to 2"),
        ({"agent": 0}, "from 1 to 2"),
        ({"agent": -1}, "from 1 to 2"),
    ],
)
async def test_wrong_caps_change_nothing(
    autojump_clock: MockClock, service: Service, caps: dict[str, int | None], message: str
) -> None:
    service.set_caps({"background": 1})
    with pytest.raises(InvalidValue, match=message):
        service.set_caps(caps)
    assert {view.qos: view.cap for view in service.classes() if view.cap} == {"background": 1}


async def test_a_paused_class_waits_until_it_is_resumed(
    autojump_clock: MockClock, service: Service, model: Model
) -> None:
    service.set_class_paused("background", True)
    batch = ask(model, prompt(1, 20), 3, BACKGROUND)
    await trio.sleep(5)
    assert [view.why for view in service.queue()] == ["an operator: background is paused"]
    assert [view.qos for view in service.classes() if view.paused] == ["background"]
    service.set_class_paused("background-agent", False)
    _, done, _ = await read(batch)
    assert done.reason is FinishReason.LENGTH


async def test_re_classing_a_queued_request_preempts_for_it(
    autojump_clock: MockClock, service: Service, model: Model
) -> None:
    running = [ask(model, prompt(number, 20), 300, BACKGROUND) for number in range(2)]
    waiting = ask(model, prompt(3, 20), 3, BACKGROUND, "mine")
    await trio.sleep(0.2)
    assert service.set_qos("mine", "interactive_chat") == ((waiting.id,), CHAT)
    await trio.sleep(0.2)
    assert waiting.done
    with pytest.raises(InvalidValue):
        service.set_qos("mine", "urgent")
    with pytest.raises(UnknownRequest):
        service.set_qos("mine", "agent")
    for one in running:
        await read(one)


async def test_before_a_model_is_loaded_nobody_knows_how_many_lanes_can_be_held(
    autojump_clock: MockClock, simulated: Simulated, nursery: trio.Nursery
) -> None:
    model = Model("m", "", simulated.start, itertools.count(1))
    service = Service(Settings(), {"m": model})
    assert service.classes() == ()
    with pytest.raises(ModelLoading, match="is being loaded"):
        service.set_caps({"agent": 1})
    with pytest.raises(UnknownRequest):
        service.explain("1")
    service.set_class_paused("agent", True)
    await nursery.start(model.run)
    assert [view.qos for view in service.classes() if view.paused] == ["agent"]
    nursery.cancel_scope.cancel()


async def test_a_worker_that_dies_is_in_the_trail(
    autojump_clock: MockClock, service: Service, model: Model, simulated: Simulated
) -> None:
    generation = ask(model, prompt(1, 20), 60, AGENT)
    await until(lambda: any(lane.generated > 5 for lane in service.lanes()))
    simulated.engines[-1].die("killed by a test")
    _, done, events = await read(generation)
    assert isinstance(done, Done)
    assert [type(event) for event in events] == [Pause, Resume]
    (story,) = service.explain(str(generation.id))
    kinds = [entry["kind"] for entry in story.trail]
    assert kinds == ["queued", "admitted", "first-token", "engine-lost", "resumed", "finished"]
    assert "its KV is prefilled again" in "\n".join(story.sentences)


@pytest.mark.parametrize("cache", [Cache(enabled=True)])
async def test_a_pin_ends_while_nothing_runs(autojump_clock: MockClock, service: Service, model: Model) -> None:
    await read(ask(model, prompt(1, 20), 40, AGENT, "job"))
    await read(ask(model, prompt(2, 20), 40, AGENT, "job"))
    start = trio.current_time()
    service.pin("job", 600.0)
    service.pin("1", None)
    shown = service.pins()
    assert [(pin.requests, pin.origin, pin.place, pin.left) for pin in shown.pins] == [
        ((2,), "job", "pool", 600.0),
        ((1,), "job", "pool", None),
    ]
    [budget] = shown.budgets
    assert budget.pinned == sum(pin.tokens for pin in shown.pins) == 2 * 59
    await trio.sleep(599.9)
    assert model.view().pins == 2
    await trio.sleep(0.2)
    assert trio.current_time() == pytest.approx(start + 600.1)
    assert (model.view().pins, model.view().pins_expired) == (1, 1)
    service.unpin("1")
    assert service.pins().pins == ()


@pytest.mark.parametrize("cache", [Cache(enabled=True)])
async def test_a_pin_on_a_running_request(autojump_clock: MockClock, service: Service, model: Model) -> None:
    running = ask(model, prompt(1, 20), 40, AGENT, "job")
    await trio.sleep(0.1)
    service.pin("job", 3600.0)
    [shown] = service.pins().pins
    assert (shown.place, shown.left) == ("running", 3600.0)
    await read(running)
    await trio.sleep(0.1)
    [shown] = service.pins().pins
    assert (shown.place, shown.tokens) == ("pool", 59)


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("cache", [Cache(enabled=True)])
async def test_a_time_that_is_none_pins_nothing(
    autojump_clock: MockClock, service: Service, model: Model, ttl: float
) -> None:
    await read(ask(model, prompt(1, 20), 40, AGENT, "job"))
    with pytest.raises(InvalidValue, match="more than 0 and at most 31622400"):
        service.pin("job", ttl)
    assert not service.pins().pins


@pytest.mark.parametrize("cache", [Cache(enabled=True)])
async def test_of_several_requests_those_with_kv_are_pinned(
    autojump_clock: MockClock, service: Service, model: Model
) -> None:
    await read(ask(model, prompt(1, 20), 40, AGENT, "job"))
    await read(ask(model, prompt(2, 1), 1, AGENT, "job"))
    service.pin("job", None)
    assert [pin.requests for pin in service.pins().pins] == [(1,)]
    with pytest.raises(InvalidValue, match="nothing of request 2 is kept any more"):
        service.pin("2", None)
    with pytest.raises(UnknownRequest):
        service.pin("nobody", None)
    with pytest.raises(UnknownRequest):
        service.unpin("nobody")
    with pytest.raises(InvalidValue, match="request 2 is not pinned"):
        service.unpin("2")
