"""Loading and unloading while the daemon runs, on virtual time."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from superfluidd.config import Settings
from superfluidd.daemon.model import Model, Refit
from superfluidd.daemon.service import Service
from superfluidd.daemon.streams import Generation
from superfluidd.engine.client import LoadRefused
from superfluidd.engine.inprocess import inprocess_starter
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.errors import (
    Draining,
    InvalidValue,
    ModelFailed,
    ModelFileError,
    ModelLoading,
    ModelUnloaded,
    UnknownModel,
)
from superfluidd.scheduling.entries import Cache
from superfluidd.scheduling.pressure import Rung
from superfluidd.scheduling.shares import Budget
from superfluidd.types import FinishReason, QosClass
from tests.conftest import Simulated, simulated_spec
from tests.daemon.test_model import ask, kill_every_engine, prompt, read

LOAD_SECONDS = 5.0


class Slow(Simulated):
    """Loading takes a while."""

    def __init__(self) -> None:
        super().__init__(simulated_spec(lanes=2))
        self.start = inprocess_starter(lambda: SimulatedRuntime(self.spec), LOAD_SECONDS)


@pytest.fixture
def simulated() -> Simulated:
    return Slow()


@pytest.fixture
def model(service: Service) -> Model:
    return service.resolve(None)


def again(generation: Callable[[], Generation]) -> Callable[[], Awaitable[str]]:
    """The text of a request, asked for anew each time."""

    async def text() -> str:
        return (await read(generation()))[0]

    return text


async def test_an_unloaded_model_takes_nothing_until_it_is_loaded_and_then_says_the_same(
    autojump_clock: MockClock, service: Service, model: Model
) -> None:
    text = again(lambda: ask(model, prompt(1, 20), 30))
    before = await text()
    await service.unload("simulated", now=False)
    view = model.view()
    assert (view.state, view.lanes, view.queued, view.tick_seconds) == ("unloaded", 0, 0, None)
    assert model.footprint.weights == 0
    assert not service.ready, "there is nothing to serve"
    for refused in (lambda: ask(model, prompt(1, 20), 1), lambda: model.window):
        with pytest.raises(ModelUnloaded, match="model simulated is not loaded; `sfctl load simulated` loads it again"):
            refused()
    with pytest.raises(ModelUnloaded):
        await model.tokenize("x", add_bos=False, parse_special=False)
    await model.wake()
    assert model.state == "unloaded", "nobody but an operator loads it"
    start = trio.current_time()
    await service.load("simulated", files=False)
    assert trio.current_time() - start == LOAD_SECONDS
    assert (model.state, service.ready) == ("ready", True)
    assert await text() == before
    await service.load("simulated", files=False)
    assert trio.current_time() - start < 2 * LOAD_SECONDS, "it was loaded"


async def test_streams_in_flight_are_finished_and_nothing_new_is_taken(
    autojump_clock: MockClock, service: Service, model: Model
) -> None:
    generations = [ask(model, prompt(number, 20), 100) for number in range(3)]
    done: list[FinishReason] = []

    async def follow(generation: Generation) -> None:
        _, end, _ = await read(generation)
        done.append(end.reason)
        assert end.usage.completion == 100

    async with trio.open_nursery() as nursery:
        for generation in generations:
            nursery.start_soon(follow, generation)
        await trio.sleep(0.1)
        nursery.start_soon(partial(service.unload, "simulated", now=False))
        await trio.sleep(0.1)
        assert model.view().state == "unloading"
        with pytest.raises(ModelUnloaded, match="is being unloaded"):
            ask(model, prompt(9, 20), 1)
        with pytest.raises(ModelUnloaded, match="is being unloaded"):
            await service.load("simulated", files=False)
    assert done == [FinishReason.LENGTH] * 3
    assert model.view().state == "unloaded"


@pytest.mark.parametrize("now", [True, False])
async def test_what_does_not_end_in_time_ends_with_an_error_that_says_why(
    autojump_clock: MockClock, nursery: trio.Nursery, now: bool
) -> None:
    model = Model("m", "", Simulated(simulated_spec()).start, itertools.count(1))
    await nursery.start(model.run)
    service = Service(Settings(drain_timeout=1.0), {"m": model})
    running = [ask(model, prompt(number, 20), 1000) for number in range(2)]
    await trio.sleep(0.5)
    start = trio.current_time()
    await service.unload("m", now=now)
    assert trio.current_time() - start < (0.5 if now else 1.5)
    for generation in running:
        text, done, _ = await read(generation)
        assert (done.reason, done.code) == (FinishReason.ABORT, "model_unloaded")
        assert done.error == "model m was unloaded before the request was complete"
        assert text
        assert done.usage.completion > 10
    nursery.cancel_scope.cancel()


async def test_who_loses_patience_ends_them(autojump_clock: MockClock, service: Service, model: Model) -> None:
    running = ask(model, prompt(1, 20), 1000)
    await trio.sleep(0.5)
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(service.unload, "simulated", now=False))
        await trio.sleep(1.0)
        await service.unload("simulated", now=True)
    assert trio.current_time() - start < 2.0
    _, done, _ = await read(running)
    assert done.code == "model_unloaded"


async def test_a_wait_that_is_given_up_changes_nothing(
    autojump_clock: MockClock, service: Service, model: Model
) -> None:
    running = ask(model, prompt(1, 20), 100)
    await trio.sleep(0.1)
    with trio.move_on_after(0.1):
        await service.unload("simulated", now=False)
    _, done, _ = await read(running)
    assert done.reason is FinishReason.LENGTH
    await trio.sleep(1.0)
    assert model.state == "unloaded"
    with trio.move_on_after(1.0):
        await service.load("simulated", files=False)
    assert model.state == "loading"
    await trio.sleep(LOAD_SECONDS)
    assert model.state == "ready"


async def test_loading_can_be_given_up(autojump_clock: MockClock, service: Service, model: Model) -> None:
    await service.unload("simulated", now=True)
    refused: list[ModelUnloaded] = []

    async def load() -> None:
        try:
            await service.load("simulated", files=False)
        except ModelUnloaded as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(load)
        nursery.start_soon(load)
        await trio.sleep(1.0)
        await service.unload("simulated", now=False)
    assert len(refused) == 2
    assert model.state == "unloaded"


async def test_what_an_operator_has_set_outlives_the_model(
    autojump_clock: MockClock, service: Service, model: Model
) -> None:
    service.set_caps({"background": 1})
    service.set_class_paused("agent", True)
    await service.unload("simulated", now=True)
    assert service.classes() == (), "nothing holds a lane"
    service.set_caps({"completion": 2})
    service.set_class_paused("background", True)
    service.set_class_paused("background", False)
    with pytest.raises(InvalidValue):
        service.set_caps({"completion": 3})
    await service.load("simulated", files=False)
    held = {view.qos: (view.cap, view.paused) for view in service.classes()}
    assert held["background"] == (1, False)
    assert held["completion"] == (2, False)
    assert held["agent"] == (None, True)


async def test_a_failed_model_is_loaded_again(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    simulated = Simulated(simulated_spec(lanes=1))
    model = Model("m", "", simulated.start, itertools.count(1))
    await nursery.start(model.run)
    generation = ask(model, prompt(1, 900), 30)
    async with trio.open_nursery() as killers:
        killers.start_soon(kill_every_engine, simulated, 4)
        await read(generation)
    assert model.view().state == "failed"
    await model.load()
    assert (model.view().state, model.view().error) == ("ready", "")
    _, done, _ = await read(ask(model, prompt(1, 20), 30))
    assert done.reason is FinishReason.LENGTH
    async with trio.open_nursery() as killers:
        killers.start_soon(kill_every_engine, simulated, 4)
        await read(ask(model, prompt(1, 900), 30))
    await model.unload(0.0)
    assert (model.view().state, model.view().error) == ("unloaded", "")
    nursery.cancel_scope.cancel()


async def test_one_that_is_loaded_again_at_once_is_not_loaded_once_more_after_it_was_unloaded(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    simulated = Simulated(simulated_spec(lanes=1))
    model = Model("m", "", simulated.start, itertools.count(1))
    await nursery.start(model.run)
    generation = ask(model, prompt(1, 900), 30)
    async with trio.open_nursery() as killers:
        killers.start_soon(kill_every_engine, simulated, 4)
        await read(generation)
        # The dead engine is only being closed now: its end and the wish meet.
        await model.load()
    engines = len(simulated.engines)
    await model.unload(0.0)
    await trio.sleep(10.0)
    assert (model.standing, len(simulated.engines)) == ("unloaded", engines)
    nursery.cancel_scope.cancel()


def refitting(outcomes: list[Exception | None], model_start: Simulated) -> Refit:
    async def refit() -> tuple[object, Cache]:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return model_start.start, Cache(enabled=True)

    return refit  # type: ignore[return-value]


async def test_a_model_is_fitted_anew_and_may_not_fit_any_more(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    smaller = Simulated(simulated_spec(lanes=1, window=256))
    outcomes: list[Exception | None] = [ModelFileError("it does not fit into memory: 3 + 4 = 7 MiB of 5"), None]
    caps = {QosClass.BACKGROUND: 2}
    model = Model(
        "m", "", Simulated(simulated_spec()).start, itertools.count(1), caps=caps, refit=refitting(outcomes, smaller)
    )
    await nursery.start(model.run)
    assert len(outcomes) == 2, "the first time it was fitted by who made it"
    await model.unload(0.0)
    with pytest.raises(ModelFailed, match=r"cannot be loaded: it does not fit into memory: 3 \+ 4 = 7 MiB of 5"):
        await model.load()
    assert model.view().state == "failed"
    await model.load()
    view = model.view()
    assert (view.state, view.lanes, view.window) == ("ready", 1, 256)
    assert model.scheduler is not None
    assert model.scheduler.statistics().caps == {QosClass.BACKGROUND: 1}
    nursery.cancel_scope.cancel()


async def test_the_daemon_does_not_unload_what_it_is_still_starting(autojump_clock: MockClock) -> None:
    slow = Slow()
    model = Model("m", "", slow.start, itertools.count(1))
    with pytest.raises(ModelLoading, match="unload it when it has been"):
        await model.unload(0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.run)
        await trio.sleep(1.0)
        with pytest.raises(ModelLoading):
            await model.unload(0.0)
        await model.load()
        assert model.state == "ready"
        nursery.cancel_scope.cancel()


# -- want of work -------------------------------------------------------------------------------------------------


@pytest.fixture
async def resting(nursery: trio.Nursery, autojump_clock: MockClock) -> AsyncIterator[Model]:
    """A model that rests after ten seconds."""
    model = Model("m", "", Slow().start, itertools.count(1), cache=Cache(enabled=True), idle_timeout=10.0, refit=None)
    await nursery.start(model.run)
    yield model
    nursery.cancel_scope.cancel()


async def test_a_model_rests_when_nothing_is_asked_of_it_and_the_next_request_wakes_it(
    autojump_clock: MockClock, resting: Model
) -> None:
    text = again(lambda: ask(resting, prompt(1, 20), 30))
    before = await text()
    ended = trio.current_time()
    await trio.sleep(9.9)
    assert resting.state == "ready"
    await trio.sleep(0.2)
    assert resting.view().state == "resting"
    assert Service(Settings(), {"m": resting}).ready
    await trio.sleep(100.0)
    start = trio.current_time()
    assert start > ended
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(resting.wake)
    assert trio.current_time() - start == LOAD_SECONDS, "once for all of them"
    assert await text() == before


async def test_a_long_request_is_no_want_of_work(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    model = Model("m", "", Simulated(simulated_spec()).start, itertools.count(1), idle_timeout=2.0)
    await nursery.start(model.run)
    _, done, _ = await read(ask(model, prompt(1, 20), 1000))
    assert done.reason is FinishReason.LENGTH
    assert trio.current_time() > 4.0
    assert model.state == "ready"
    nursery.cancel_scope.cancel()


async def test_a_pin_keeps_a_model_awake(autojump_clock: MockClock, resting: Model) -> None:
    service = Service(Settings(), {"m": resting})
    generation = ask(resting, prompt(1, 60), 30)
    await read(generation)
    service.pin(str(generation.id), 60.0)
    await trio.sleep(59.0)
    assert resting.state == "ready"
    await trio.sleep(3.0)
    assert resting.state == "resting"


async def test_who_comes_while_it_lies_down_waits(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    model = Model("m", "", Slow().start, itertools.count(1), idle_timeout=10.0)
    await nursery.start(model.run)
    while not model.leaving:
        await trio.lowlevel.checkpoint() if trio.current_time() >= 15.0 else await trio.sleep(0.5)
    await model.wake()
    assert model.state == "ready"
    nursery.cancel_scope.cancel()


async def test_an_operator_has_the_last_word(autojump_clock: MockClock, resting: Model) -> None:
    await trio.sleep(11.0)
    assert resting.state == "resting"
    await resting.unload(0.0)
    assert resting.state == "unloaded"
    await resting.wake()
    assert resting.state == "unloaded"
    await resting.load()
    assert resting.state == "ready"
    await trio.sleep(11.0)
    assert resting.state == "resting"


async def test_a_request_that_wakes_what_cannot_be_loaded_is_told(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    simulated = Simulated(simulated_spec())
    refit = refitting([ModelFileError("the file is gone")], simulated)
    model = Model("m", "", simulated.start, itertools.count(1), idle_timeout=1.0, refit=refit)
    await nursery.start(model.run)
    await trio.sleep(3.0)
    with pytest.raises(ModelFailed, match="the file is gone"):
        await model.wake()
    await model.wake()
    with pytest.raises(ModelFailed, match="`sfctl load m` tries it again: the file is gone"):
        ask(model, prompt(1, 20), 1)
    nursery.cancel_scope.cancel()


# -- several models -----------------------------------------------------------------------------------------------


async def test_models_are_added_by_path_and_only_by_who_may(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    models: dict[str, Model] = {}
    ids = itertools.count(1)

    async def add(path: str) -> Model:
        if not path.startswith("/"):
            raise ModelFileError(f"{path}: no such file")
        name = Path(path).stem
        refused = inprocess_refusal if name == "broken" else Simulated(simulated_spec()).start
        models[name] = Model(name, path, refused, ids)
        await nursery.start(partial(models[name].run, must_load=False))
        return models[name]

    models["first"] = Model("first", "", Simulated(simulated_spec()).start, ids)
    await nursery.start(models["first"].run)
    service = Service(Settings(), models, add=add)
    service._apply_pressure(Rung.WARNING)
    with pytest.raises(UnknownModel):
        await service.load("/models/second.gguf", files=False)
    with pytest.raises(ModelFileError, match="no such file"):
        await service.load("second", files=True)
    second = await service.load("/models/second.gguf", files=True)
    assert [model.name for model in service.models.values()] == ["first", "second"]
    assert second._rung is Rung.WARNING
    assert service.resolve("second") is second
    assert service.resolve(None) is models["first"]
    await read(ask(second, prompt(1, 20), 3))
    assert service.ended.since(0).entries
    await service.unload("first", now=True)
    assert service.resolve(None) is second, "who names none gets one that is loaded"
    assert service.ready
    with pytest.raises(ModelFailed, match="not today"):
        await service.load("/models/broken.gguf", files=True)
    assert service.ready, "what was never there cannot be missing"
    assert service.named("broken").state == "unloaded"
    service.drain()
    with pytest.raises(Draining):
        await service.load("first", files=False)
    nursery.cancel_scope.cancel()


async def inprocess_refusal(nursery: object, on_lost: object, on_progress: object) -> LoadRefused:
    return LoadRefused("not today")


async def test_what_a_model_held_of_shared_memory_is_free_when_it_has_gone(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    budgets = Budget(1 << 30), Budget(0)
    cache = Cache(enabled=True, host_bytes=1 << 30, cell_bytes=1 << 20)
    models = [
        Model("m", "", Simulated(simulated_spec(lanes=1)).start, itertools.count(1), cache=cache, budgets=budgets)
        for _ in range(2)
    ]
    for model in models:
        await nursery.start(model.run)
    one = models[0]
    for number in range(3):
        await read(ask(one, prompt(number, 100), 3))
    assert one.view().host_bytes > 0
    assert budgets[0].part == 1 << 29
    await one.unload(0.0)
    assert budgets[0].part == 1 << 30
    await one.load()
    assert budgets[0].part == 1 << 29
    nursery.cancel_scope.cancel()
