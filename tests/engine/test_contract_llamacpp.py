"""The contract on llama.cpp with the bundled model: in process, and a few cases behind a real worker process."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from superfluidd.engine.client import LoadRefused, WorkerEngine, worker_starter
from superfluidd.engine.port import Feed, LoadFailed, Runtime, StepFailed
from superfluidd.engine.runtimes.llamacpp import LlamaCppRuntime
from superfluidd.engine.wire import LoadSpec
from superfluidd.scheduling.plan import Decode, Prefill
from superfluidd.types import SamplingParams
from tests.engine import contract
from tests.engine.contract import GREEDY, SURE, SURE_REPLY, Driver, Local, free, seat

pytestmark = pytest.mark.engine_llamacpp


def spec(model: Path, layout: str = "per-sequence", cells: int = 1024) -> LoadSpec:
    # One compute thread: fixed threads wait for each other at every operation, and a test machine is busy.
    return LoadSpec("llamacpp", str(model), lanes=4, window=256, layout=layout, cells=cells, threads=1)


@pytest.fixture(scope="module")
def loaded(bundled_model: Path) -> Iterator[Runtime]:
    """One runtime for the module; ``runtime`` hands it out empty."""
    runtime = LlamaCppRuntime(spec(bundled_model), lambda share: None)
    yield runtime
    runtime.close()
    runtime.close()


@pytest.fixture
def runtime(loaded: Runtime) -> Runtime:
    for sequence in range(loaded.info.sequences):
        loaded.free(sequence)
    assert loaded.cells_used() == 0
    return loaded


class TestInProcess(contract.Contract):
    exact = False

    @pytest.fixture
    async def driver(self, runtime: Runtime) -> Driver:
        return Local(runtime)

    async def test_it_knows_the_capital_of_france(self, driver: Driver, prompt: list[int]) -> None:
        tokens = await self.alone(driver, prompt, 20)
        assert driver.decode(tokens) == SURE_REPLY
        assert tokens[-1] in driver.info.end_tokens


class TestFaults(contract.FaultContract):
    exact = False

    @pytest.fixture
    async def broken(self, runtime: Runtime) -> Driver:
        return Local(contract.Faulty(runtime, 1))


class TestShared(contract.SharedContract):
    @pytest.fixture
    async def driver(self, bundled_model: Path) -> AsyncIterator[Driver]:
        shared = LlamaCppRuntime(spec(bundled_model, "shared", cells=128), lambda share: None)
        assert (shared.info.layout, shared.info.cells, shared.info.window) == ("shared", 128, 128)
        yield Local(shared)
        shared.close()


@pytest.mark.process
class TestWorker:
    @pytest.fixture
    async def driver(self, bundled_model: Path, nursery: trio.Nursery) -> AsyncIterator[Driver]:
        shares: list[float] = []
        engine = await worker_starter(spec(bundled_model))(nursery, lambda: None, shares.append)
        assert isinstance(engine, WorkerEngine), engine
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        yield contract.Remote(engine)
        await engine.close(5.0)

    async def test_lanes_say_through_a_worker_what_they_say_alone(self, driver: Driver) -> None:
        prompt = await driver.tokenize(SURE)
        other = await driver.tokenize(contract.OTHERS[1])
        tick = await driver.run(
            admit=(seat(1, 0, prompt), seat(2, 1, other)),
            prefill=(Prefill(1, len(prompt)), Prefill(2, len(other))),
            decode=(Decode(1, 19), Decode(2, 10)),
            step_tokens=16,
        )
        assert driver.decode(tick.tokens(1)) == SURE_REPLY
        assert tick.report.timing.threads >= 1
        # A lane leaves, its neighbour goes on, and what was stopped continues.
        stopped = await driver.run(retire=(1,), kv=free(0), decode=(Decode(2, 60),), stop_after=2)
        assert stopped.report.outcome in ("stopped", "done")
        await driver.run(
            retire=(2,),
            kv=free(1),
            admit=(seat(3, 1, prompt),),
            prefill=(Prefill(3, len(prompt)),),
            decode=(Decode(3, 4),),
        )


@pytest.mark.process
async def test_a_file_that_is_no_model_is_refused_with_llama_cpps_reason(tmp_path: Path, nursery: trio.Nursery) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"this is not a model at all" * 100)
    for path, words in ((tmp_path / "none.gguf", "No such file"), (garbage, "magic")):
        answer = await worker_starter(spec(path), log_level="critical")(nursery, lambda: None, lambda share: None)
        assert isinstance(answer, LoadRefused), answer
        assert "llama.cpp cannot load the model" in answer.message
        assert words in answer.message


def test_too_many_sequences_are_refused_with_the_number(bundled_model: Path) -> None:
    with pytest.raises(LoadFailed, match="at most 256 sequences; lower --max-batch from 1000"):
        LlamaCppRuntime(LoadSpec("llamacpp", str(bundled_model), 1000, 256, "per-sequence", 0), lambda share: None)


# -- what only a real model shows -----------------------------------------------------------------------------------


def test_what_it_says_about_itself(runtime: Runtime) -> None:
    info = runtime.info
    assert (info.runtime, info.architecture, info.layout) == ("llamacpp", "llama", "per-sequence")
    assert (info.sequences, info.window, info.cells, info.trained_context) == (4, 256, 1024, 8192)
    assert info.cut == "anywhere"
    assert info.vocabulary == 49152
    assert len(runtime.pieces()) == info.vocabulary
    assert info.eos in info.end_tokens
    assert info.eos_text == "<|im_end|>"
    assert "{%" in info.chat_template
    assert 50e6 < info.weights_bytes < 200e6


async def test_a_token_that_does_not_exist_fails_its_lane_only(runtime: Runtime) -> None:
    driver = Local(runtime)
    prompt = await driver.tokenize(SURE)
    bad = [*prompt[:5], 10**6]
    tick = await driver.run(
        admit=(seat(1, 0, prompt), seat(2, 1, bad), seat(3, 2, prompt)),
        prefill=(Prefill(1, len(prompt)), Prefill(2, len(bad)), Prefill(3, len(prompt))),
        decode=(Decode(1, 19), Decode(2, 19), Decode(3, 19)),
    )
    assert [fault.request for fault in tick.report.faults] == [2]
    assert "llama_decode returned -1" in tick.report.faults[0].message
    assert driver.decode(tick.tokens(1)) == SURE_REPLY
    assert driver.decode(tick.tokens(3)) == SURE_REPLY
    assert runtime.length(1) == 0, "nothing of the failed lane was kept"


async def test_a_lane_whose_tokens_are_all_forbidden_fails_alone(runtime: Runtime) -> None:
    driver = Local(runtime)
    prompt = await driver.tokenize(SURE)
    nothing = SamplingParams(temperature=0.0, logit_bias=tuple((token, -100.0) for token in range(49152)))
    tick = await driver.run(
        admit=(seat(1, 0, prompt, nothing), seat(2, 1, prompt)),
        prefill=(Prefill(1, len(prompt)), Prefill(2, len(prompt))),
        decode=(Decode(1, 19), Decode(2, 19)),
    )
    assert [(fault.request, fault.message) for fault in tick.report.faults] == [
        (1, "sampling failed: the model produced no finite logit")
    ]
    assert driver.decode(tick.tokens(2)) == SURE_REPLY


async def test_a_sequence_runs_to_its_windows_end_and_not_further(runtime: Runtime) -> None:
    """Each sequence has its own window: a full one neither spills into its neighbour nor keeps it from going on."""
    driver = Local(runtime)
    prompt = await driver.tokenize(SURE)
    long = (prompt * 20)[:250]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    tick = await driver.run(
        admit=(seat(1, 0, long, params), seat(2, 1, prompt)),
        prefill=(Prefill(1, 250), Prefill(2, len(prompt))),
        decode=(Decode(1, 20), Decode(2, 19)),
    )
    assert len(tick.tokens(1)) == 7, "positions 250 to 256: six more fit, the seventh needs no cell yet"
    assert [fault.request for fault in tick.report.faults] == [1]
    assert "no room" in tick.report.faults[0].message
    assert runtime.length(0) == 256
    assert driver.decode(tick.tokens(2)) == SURE_REPLY


async def test_a_cut_sequence_goes_on_as_if_it_had_never_been_longer(runtime: Runtime) -> None:
    driver = Local(runtime)
    prompt = await driver.tokenize(SURE)
    other = await driver.tokenize("<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n")
    await driver.run(admit=(seat(1, 0, other),), prefill=(Prefill(1, len(other)),), decode=(Decode(1, 5),))
    await driver.run(retire=(1,))
    same = next(index for index, (one, two) in enumerate(zip(prompt, other, strict=False)) if one != two)
    assert same > 3
    assert runtime.cut(0, same)
    assert runtime.length(0) == same
    assert runtime.cut(0, same), "to its own length is no change"
    assert not runtime.cut(0, same + 1), "nothing can be lengthened"
    tick = await driver.run(
        admit=(seat(2, 0, prompt, GREEDY, cached=same),),
        prefill=(Prefill(2, len(prompt) - same),),
        decode=(Decode(2, 19),),
    )
    assert driver.decode(tick.tokens(2)) == SURE_REPLY


async def test_the_alternatives_are_a_distribution(runtime: Runtime) -> None:
    driver = Local(runtime)
    prompt = await driver.tokenize(SURE)
    tick = await driver.run(
        admit=(seat(1, 0, prompt, SamplingParams(temperature=0.0, logprobs=20)),),
        prefill=(Prefill(1, len(prompt)),),
        decode=(Decode(1, 6),),
    )
    for out in tick.out:
        mass = sum(math.exp(entry.logprob) for entry in out.top)
        assert 0.5 < mass <= 1.0 + 1e-6
        assert {entry.token: entry.logprob for entry in out.top}[out.token] == out.logprob
    assert math.exp(tick.out[-1].logprob or -math.inf) > 0.5, "Paris is certain"


def test_tokenizing_round_trips_and_respects_special_tokens(runtime: Runtime) -> None:
    pieces = runtime.pieces()
    for text in ("Hello, world!", "Zürich 日本 😀", "", " ", "\n\n\t", "<|im_start|>", "a" * 5000):
        tokens = runtime.tokenize(text, add_bos=False, parse_special=False)
        assert b"".join(pieces[token] for token in tokens).decode() == text
    (start,) = runtime.tokenize("<|im_start|>", add_bos=False, parse_special=True)
    assert pieces[start] == b"", "control tokens have no text"
    assert len(runtime.tokenize("<|im_start|>", add_bos=False, parse_special=False)) > 1


def test_a_step_larger_than_a_call_is_refused_untouched(runtime: Runtime) -> None:
    with pytest.raises(StepFailed, match="larger than 2048"):
        runtime.step([Feed(0, 0, [1] * 2049, True)])
    assert runtime.cells_used() == 0
