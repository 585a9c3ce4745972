"""The model's task on virtual time: exact moments, death and recovery, pools, stalls. The simulated engine says
something else whenever it was fed something else, so equal text means that nothing was lost, repeated or invented."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from superfluidd.daemon.model import Model
from superfluidd.daemon.service import Service
from superfluidd.daemon.streams import Delta, Done, Event, Generation, GenerationRequest, Pause, Resume
from superfluidd.engine.inprocess import InProcessEngine
from superfluidd.engine.runtimes.simulated import (
    LANE_SECONDS,
    PREFILL_RATE,
    PREFILL_SECONDS,
    ROUND_SECONDS,
)
from superfluidd.errors import ContextLengthExceeded, Draining, ModelFailed, UnknownModel, UnknownRequest
from superfluidd.types import FinishReason, QosClass, SamplingParams
from tests.conftest import Simulated, simulated_spec

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture
def model(service: Service) -> Model:
    return service.resolve(None)


def prompt(number: int, length: int) -> tuple[int, ...]:
    """A prompt of its own for every number."""
    return tuple(97 + (number * 7 + index) % 26 for index in range(length))


def ask(
    model: Model,
    tokens: Sequence[int],
    count: int | None,
    *,
    stop: tuple[str, ...] = (),
    sampling: SamplingParams = GREEDY,
    qos: QosClass = QosClass.AGENT,
) -> Generation:
    return model.submit(
        GenerationRequest(prompt=tuple(tokens), sampling=sampling, max_tokens=count, stop=stop, qos=qos)
    )


async def read(generation: Generation) -> tuple[str, Done, list[Event]]:
    """Text, end, and every event that is not text."""
    text, others = "", []
    while True:
        event = await generation.next()
        match event:
            case Delta():
                text += event.text
            case Done():
                return text, event, others
            case _:
                others.append(event)


async def say(model: Model, tokens: Sequence[int], count: int | None) -> str:
    text, done, _ = await read(ask(model, tokens, count))
    assert done.reason is FinishReason.LENGTH
    return text


async def test_first_token_and_end_come_at_the_exact_moment(autojump_clock: MockClock, model: Model) -> None:
    start = trio.current_time()
    generation = ask(model, prompt(1, 100), 3)
    first = await generation.next()
    prefill = PREFILL_SECONDS + 100 / PREFILL_RATE
    assert trio.current_time() - start == pytest.approx(prefill, abs=1e-9)
    assert isinstance(first, Delta)
    _, done, _ = await read(generation)
    assert trio.current_time() - start == pytest.approx(prefill + 2 * (ROUND_SECONDS + LANE_SECONDS), abs=1e-9)
    assert done.usage.prompt == 100
    assert done.usage.completion == 3


async def test_an_agent_that_arrives_in_mid_tick_is_seated_at_the_next_step(
    autojump_clock: MockClock, model: Model
) -> None:
    long = ask(model, prompt(1, 900), 1)
    await trio.sleep(0.1)
    start = trio.current_time()
    short = ask(model, prompt(2, 10), 1)
    _, done, _ = await read(short)
    # The step in flight feeds a chunk of 512 tokens and is not given up for an agent. Then the short prompt goes first,
    # packed with what is left of the long one.
    chunk = PREFILL_SECONDS + 512 / PREFILL_RATE
    both = PREFILL_SECONDS + (10 + 388) / PREFILL_RATE
    assert trio.current_time() - start == pytest.approx(chunk - 0.1 + both, abs=1e-9)
    assert done.reason is FinishReason.LENGTH
    await read(long)


async def test_a_chat_that_arrives_in_mid_step_has_the_step_given_up(autojump_clock: MockClock, model: Model) -> None:
    long = ask(model, prompt(1, 900), 1)
    await trio.sleep(0.1)
    start = trio.current_time()
    _, done, _ = await read(ask(model, prompt(2, 10), 1, qos=QosClass.INTERACTIVE))
    # The step in flight is given up at once, and nothing is fed beside a chat that finishes.
    assert trio.current_time() - start == pytest.approx(PREFILL_SECONDS + 10 / PREFILL_RATE, abs=1e-9)
    assert done.reason is FinishReason.LENGTH
    assert model.view().abandoned_prefill_tokens == 512
    await read(long)
    await trio.sleep(0.1)  # its last token comes before the report that counts the last tick
    assert model.view().prefill_tokens == 910, "what was given up was not counted as fed"


async def test_no_lane_is_given_up_twice_without_getting_on(autojump_clock: MockClock, model: Model) -> None:
    """Chats that come faster than the long prompt's steps cannot keep it from being prefilled."""
    long = ask(model, prompt(1, 600), 1)
    done: list[float] = []

    async def chats() -> None:
        while True:
            await read(ask(model, prompt(2, 4), 1, qos=QosClass.INTERACTIVE))
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chats)
        await read(long)
        done.append(trio.current_time())
        nursery.cancel_scope.cancel()
    assert model.view().abandoned_prefill_tokens > 0
    # A step in two is finished at the least: 600 tokens in steps of 64 and more, each at most twice, and the chats.
    assert done[0] < 2 * 600 / PREFILL_RATE + 20 * 0.1


async def test_more_requests_than_lanes_all_finish_in_order_of_arrival(autojump_clock: MockClock, model: Model) -> None:
    finished: list[int] = []

    async def one(number: int) -> None:
        with ask(model, prompt(number, 20), 10) as generation:
            _, done, _ = await read(generation)
            assert done.usage.completion == 10
            finished.append(generation.id)

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(one, number)
            await trio.testing.wait_all_tasks_blocked()
    assert len(finished) == 12
    assert sorted(finished[:4]) == [1, 2, 3, 4]
    assert sorted(finished[-4:]) == [9, 10, 11, 12]
    await trio.sleep(0.1)
    assert model.view().lanes_busy == 0
    assert model.view().cells_used == 0


async def test_text_does_not_depend_on_traffic(autojump_clock: MockClock, model: Model) -> None:
    alone = [await say(model, prompt(number, 30 + number), 40) for number in range(6)]
    together: dict[int, str] = {}

    async def one(number: int) -> None:
        await trio.sleep(0.013 * number)
        together[number] = await say(model, prompt(number, 30 + number), 40)

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(one, number)
    assert [together[number] for number in range(6)] == alone


@pytest.mark.parametrize("moment", [0.01, 0.2, 0.4, 0.45, 0.61])
async def test_an_engine_that_dies_costs_time_and_no_token(
    autojump_clock: MockClock, model: Model, simulated: Simulated, moment: float
) -> None:
    expected = [await say(model, prompt(number, 50), 60) for number in range(6)]
    got: dict[int, str] = {}
    pauses: list[Event] = []

    async def one(number: int) -> None:
        text, done, others = await read(ask(model, prompt(number, 50), 60))
        assert done.reason is FinishReason.LENGTH
        assert done.usage.completion == 60
        got[number] = text
        pauses.extend(others)

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(one, number)
        await trio.sleep(moment)
        simulated.engines[-1].die("killed by the test")
    assert [got[number] for number in range(6)] == expected
    assert any(isinstance(event, Pause) for event in pauses)
    await trio.sleep(0.1)
    view = model.view()
    assert (view.state, view.respawns) == ("ready", 1)
    assert view.cells_used == 0


async def test_a_stream_is_told_when_it_pauses_and_resumes(
    autojump_clock: MockClock, model: Model, simulated: Simulated
) -> None:
    generation = ask(model, prompt(1, 10), 30)
    await generation.next()
    simulated.engines[-1].die("killed by the test")
    _, _, others = await read(generation)
    assert [type(event) for event in others] == [Pause, Resume]


async def test_an_idle_engine_that_dies_is_replaced(
    autojump_clock: MockClock, model: Model, simulated: Simulated
) -> None:
    simulated.engines[-1].die("killed while idle")
    await trio.sleep(1)
    assert len(simulated.engines) == 2
    assert model.view().state == "ready"
    await say(model, prompt(1, 10), 5)


async def test_too_many_deaths_without_a_good_tick_fail_the_model_with_a_typed_error(
    autojump_clock: MockClock, service: Service, model: Model, simulated: Simulated
) -> None:
    generation = ask(model, prompt(1, 900), 30)
    waiting = ask(model, prompt(2, 900), 30)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_every_engine, simulated, 4)
        _, done, _ = await read(generation)
    assert done.reason is FinishReason.ERROR
    assert done.code == "model_failed"
    assert "without a good tick" in done.error
    _, second, _ = await read(waiting)
    assert second.code == "model_failed"
    assert len(simulated.engines) == 4
    assert model.view().state == "failed"
    assert not service.ready
    with pytest.raises(ModelFailed, match="`sfctl load simulated` tries it again"):
        ask(model, prompt(3, 5), 1)
    with pytest.raises(ModelFailed):
        await model.tokenize("x", add_bos=False, parse_special=False)


async def kill_every_engine(simulated: Simulated, count: int) -> None:
    seen: list[InProcessEngine] = []
    while len(seen) < count:
        await trio.sleep(0.001)
        if simulated.engines[-1] not in seen:
            seen.append(simulated.engines[-1])
            await trio.sleep(0.05)
            simulated.engines[-1].die(f"death {len(seen)}")


async def test_a_good_tick_forgives_earlier_deaths(
    autojump_clock: MockClock, model: Model, simulated: Simulated
) -> None:
    for _ in range(6):
        simulated.engines[-1].die("again")
        await trio.sleep(1)
        await say(model, prompt(1, 10), 5)
        await trio.sleep(1)  # the last token is out before its tick has ended
    assert model.view().state == "ready"
    assert model.view().respawns == 6


async def test_cancel_frees_the_lane_at_the_next_step(
    autojump_clock: MockClock, model: Model, simulated: Simulated
) -> None:
    neighbour = ask(model, prompt(1, 20), 200)
    generation = ask(model, prompt(2, 20), 900)
    await generation.next()
    await trio.sleep(0.05)
    assert model.view().lanes_busy == 2
    generation.close()
    assert model.view().lanes_busy == 1
    await trio.sleep(ROUND_SECONDS + 2 * LANE_SECONDS + 1e-6)
    runtime = simulated.engines[-1]._runtime
    assert runtime.length(1) == 0, "the cancelled lane's cells are still held"
    assert runtime.length(0) > 20
    assert generation.done
    await read(neighbour)


@pytest.mark.parametrize("moment", [0.0, 0.3, 3.0])
async def test_cancel_queued_prefilling_and_decoding(autojump_clock: MockClock, model: Model, moment: float) -> None:
    busy = [ask(model, prompt(number, 500), 100) for number in range(4)] if moment == 0.0 else []
    generation = ask(model, prompt(9, 900), 100)
    await trio.sleep(moment)
    generation.close()
    _, done, _ = await read(generation)
    assert done.reason is FinishReason.ABORT
    for other in busy:
        await read(other)
    await trio.sleep(5)
    assert model.view().cells_used == 0
    assert model.view().queued == 0


async def test_leaving_the_block_cancels(autojump_clock: MockClock, model: Model) -> None:
    with ask(model, prompt(1, 20), 500) as generation:
        await generation.next()
    await trio.sleep(0.1)
    assert model.view().lanes_busy == 0
    assert model.view().cells_used == 0


async def test_a_stop_text_ends_the_reply_and_frees_the_lane(autojump_clock: MockClock, model: Model) -> None:
    whole = await say(model, prompt(3, 12), 200)
    stop = whole[100:104]
    text, done, _ = await read(ask(model, prompt(3, 12), 200, stop=(stop,)))
    assert text == whole[: whole.index(stop)]
    assert done.reason is FinishReason.STOP
    await trio.sleep(0.1)
    assert model.view().lanes_busy == 0


async def test_a_prompt_fills_the_window_exactly_or_is_refused(autojump_clock: MockClock, model: Model) -> None:
    window = model.window
    for length, produced in ((window - 1, 2), (window, 1)):
        _, done, _ = await read(ask(model, prompt(1, length), None))
        assert done.reason is FinishReason.LENGTH
        assert done.usage.completion == produced
    with pytest.raises(ContextLengthExceeded, match=rf"{window + 1}.*{window}"):
        ask(model, prompt(1, window + 1), 1)


async def test_a_client_that_stops_reading_slows_nobody_and_is_dropped(autojump_clock: MockClock, model: Model) -> None:
    model._stall_timeout = 5.0
    reading = await say(model, prompt(1, 20), 700)
    stalled = ask(model, prompt(2, 20), 900)
    start = trio.current_time()
    assert await say(model, prompt(1, 20), 700) == reading
    beside = trio.current_time() - start
    assert beside < 700 * (ROUND_SECONDS + 2 * LANE_SECONDS) + 1
    text, done, _ = await read(stalled)
    assert done.reason is FinishReason.ABORT
    assert 0 < done.usage.completion < 900
    assert text


async def test_stalled_engine_is_visible(autojump_clock: MockClock, model: Model, simulated: Simulated) -> None:
    generation = ask(model, prompt(1, 20), 5)
    simulated.engines[-1]._runtime._speed = 0.001  # type: ignore[attr-defined]
    assert not model.view().stalled
    await trio.sleep(30)
    view = model.view()
    assert view.stalled
    assert view.silent_seconds == pytest.approx(30, abs=0.1)
    generation.close()


async def test_service_verbs(autojump_clock: MockClock, service: Service, model: Model) -> None:
    generation = model.submit(
        GenerationRequest(prompt=prompt(1, 10), sampling=GREEDY, max_tokens=500, origin="req-abc")
    )
    await generation.next()
    assert [view.origin for view in service.lanes()] == ["req-abc"]
    assert service.cancel("req-abc") == (generation.id,)
    with pytest.raises(UnknownRequest, match="sfctl lanes"):
        service.cancel("req-abc")
    with pytest.raises(UnknownModel, match="simulated"):
        service.resolve("other")
    last = ask(model, prompt(2, 10), 20)
    service.drain()
    with pytest.raises(Draining):
        service.resolve(None)
    await service.wait_idle()
    assert last.done
    assert service.status().draining


async def test_queue_view_says_what_is_waited_for(autojump_clock: MockClock, service: Service, model: Model) -> None:
    running = [ask(model, prompt(number, 10), 300) for number in range(4)]
    waiting = [ask(model, prompt(9, 10), 5, qos=QosClass.BACKGROUND), ask(model, prompt(9, 10), 5)]
    await trio.sleep(0.2)
    views = service.queue()
    assert [(view.request, view.qos, view.position) for view in views] == [
        (waiting[1].id, "agent", 1),
        (waiting[0].id, "background", 1),
    ]
    assert "all 4 are busy" in views[0].why
    assert views[0].waited == pytest.approx(0.2, abs=1e-9)
    for generation in running + waiting:
        generation.close()


class TestSharedPool:
    @pytest.fixture
    def simulated(self) -> Simulated:
        return Simulated(simulated_spec(lanes=4, window=1024, layout="shared", cells=1024))

    async def test_requests_whose_totals_exceed_the_pool_all_finish_and_some_wait(
        self, autojump_clock: MockClock, service: Service, model: Model
    ) -> None:
        done: list[Done] = []

        async def one(number: int) -> None:
            _, end, _ = await read(ask(model, prompt(number, 20), 400))
            done.append(end)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
            await trio.sleep(0.5)
            assert len(service.lanes()) == 2
            assert [view.why for view in service.queue()] == ["KV cells: needs 419, 186 of 1024 are free", "its turn"]
        assert [(end.reason, end.usage.completion) for end in done] == [(FinishReason.LENGTH, 400)] * 4

    async def test_more_than_the_pool_is_fitted_to_it(self, autojump_clock: MockClock, model: Model) -> None:
        _, done, _ = await read(ask(model, prompt(1, 1000), 400))
        assert done.usage.completion == 25


class TestPerSequence:
    @pytest.fixture
    def simulated(self) -> Simulated:
        return Simulated(simulated_spec(lanes=3, window=256))

    async def test_a_stream_that_fills_its_window_ends_with_length_and_harms_no_neighbour(
        self, autojump_clock: MockClock, model: Model
    ) -> None:
        neighbours = [await say(model, prompt(number, 30), 200) for number in (1, 2)]
        got: dict[int, str] = {}

        async def one(number: int) -> None:
            got[number] = await say(model, prompt(number, 30), 200)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 1)
            nursery.start_soon(one, 2)
            _, done, _ = await read(ask(model, prompt(3, 200), None))
        assert (done.reason, done.usage.completion) == (FinishReason.LENGTH, 57)
        assert [got[1], got[2]] == neighbours
