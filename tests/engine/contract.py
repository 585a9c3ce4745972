"""What every engine must do, whatever computes and wherever it runs. Test modules subclass :class:`Contract`.

A :class:`Driver` runs plans on an engine and checks, for every tick of every test, what holds for all: positions are
contiguous per request, and the report counts what was streamed. Lanes are compared with what the same prompt says
when it is alone (:meth:`Contract.alone`). ``exact`` engines must agree to the token for any prompt; the others only on
a prompt whose tokens lead by a clear margin, because sums of floats depend on what else is in a call.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import pytest
import trio

from superfluidd.engine.client import Engine
from superfluidd.engine.executor import Executor, StepStarting
from superfluidd.engine.port import EngineInfo, Feed, Runtime, StepFailed
from superfluidd.engine.wire import StepDone, TokenOut
from superfluidd.scheduling.plan import (
    Admit,
    Copy,
    Cut,
    Decode,
    Discard,
    Export,
    Free,
    Import,
    Plan,
    Prefill,
    TickReport,
)
from superfluidd.types import RequestId, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SURE = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
SURE_REPLY = "The capital of France is Paris."
OTHERS = ("Once upon a time", "<|im_start|>user\nCount to ten.<|im_end|>\n<|im_start|>assistant\n", "1, 2, 3, 4,")


class Tick:
    """What one plan did."""

    def __init__(self, report: TickReport, steps: Sequence[StepDone]) -> None:
        self.report = report
        self.steps = steps
        self.out: list[TokenOut] = [token for step in steps for token in step.tokens]

    def tokens(self, request: RequestId) -> list[int]:
        """A request's tokens, in order."""
        return [out.token for out in self.out if out.request == request]


class Driver(ABC):
    """Runs plans and checks what must hold for every one of them."""

    info: EngineInfo

    def __init__(self) -> None:
        self._ticks = itertools.count(1)
        self._lengths: dict[RequestId, int] = {}
        self._over: set[RequestId] = set()

    @abstractmethod
    async def _run(self, plan: Plan, stop_after: int | None) -> Tick:
        """Run it; if told to, ask it to stop once ``stop_after`` steps are known."""

    @abstractmethod
    async def tokenize(self, text: str) -> list[int]:
        """Token ids, special tokens recognised."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""

    async def run(self, *, stop_after: int | None = None, **fields: Any) -> Tick:
        """Run the next plan, and check it."""
        plan = Plan(next(self._ticks), **fields)
        tick = await self._run(plan, stop_after)
        report = tick.report
        assert report.tick == plan.tick
        if report.outcome == "replan":
            assert not tick.steps
            assert report.reason
            return tick
        for request in plan.retire:
            self._lengths.pop(request, None)
            self._over.discard(request)
        for seat in plan.admit:
            self._lengths[seat.request] = len(seat.tokens)
        for out in tick.out:
            assert out.position == self._lengths[out.request], "positions are contiguous"
            assert out.request not in self._over, "nothing follows the end"
            assert 0 <= out.token < self.info.vocabulary
            self._lengths[out.request] += 1
            if out.end:
                self._over.add(out.request)
        counted = {request: len(tick.tokens(request)) for request in {out.request for out in tick.out}}
        assert dict(report.decoded) == counted, "the report counts what was streamed"
        granted: dict[RequestId, int] = {}
        for chunk in plan.prefill:
            granted[chunk.request] = granted.get(chunk.request, 0) + chunk.tokens
        fed = dict(report.prefilled)
        failed = {fault.request for fault in report.faults}
        if report.outcome == "done":
            assert {request for request in granted if request not in failed} <= fed.keys()
            assert all(fed[request] == granted[request] for request in granted if request not in failed)
        else:
            assert all(fed[request] <= granted[request] for request in fed)
        reported = [dict(step.prefilled) for step in tick.steps if step.prefilled]
        assert (reported[-1] if reported else {}) == fed, "the last step with prefill tells as much as the report"
        assert report.cells_used <= self.info.cells
        return tick


class Local(Driver):
    """An executor in this process."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self.info = runtime.info
        self.executor = Executor(runtime)
        self._pieces: list[bytes] = []
        self.abandon_next = False
        """Give the next prefill step up."""

    async def _run(self, plan: Plan, stop_after: int | None) -> Tick:
        await trio.lowlevel.checkpoint()
        steps: list[StepDone] = []
        reports: list[TickReport] = []

        def run() -> Generator[StepDone | StepStarting, None, None]:
            reports.append((yield from self.executor.run(plan, lambda: len(steps) == stop_after)))

        for step in run():
            if isinstance(step, StepDone):
                steps += [step]
            elif self.abandon_next:
                self.abandon_next = False
                self.runtime.abandon(True)
        return Tick(reports[0], steps)

    async def tokenize(self, text: str) -> list[int]:
        """See :class:`Driver`."""
        await trio.lowlevel.checkpoint()
        return self.runtime.tokenize(text, add_bos=False, parse_special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """See :class:`Driver`."""
        self._pieces = self._pieces or self.runtime.pieces()
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", "replace")


class Remote(Driver):
    """An engine behind the daemon's own interface, for example a worker process."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.info = engine.info

    async def _run(self, plan: Plan, stop_after: int | None) -> Tick:
        steps: list[StepDone] = []

        def on_step(step: StepDone) -> None:
            steps.append(step)
            if stop_after is not None and len(steps) >= stop_after:
                self.engine.interrupt(plan.tick)

        report = await self.engine.tick(plan, on_step)
        assert isinstance(report, TickReport), report
        return Tick(report, steps)

    async def tokenize(self, text: str) -> list[int]:
        """See :class:`Driver`."""
        tokens = await self.engine.tokenize(text, add_bos=False, parse_special=True)
        assert tokens is not None
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """See :class:`Driver`."""
        return self.engine.vocabulary.decode(tokens)


class Faulty:
    """A runtime whose steps fail while they feed one sequence; everything else is the runtime behind it."""

    def __init__(self, runtime: Runtime, sequence: int) -> None:
        self._runtime = runtime
        self.sequence: int | None = sequence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def step(self, feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        """Fail whole, as the port demands: nothing of the step is kept."""
        if any(feed.sequence == self.sequence for feed in feeds):
            raise StepFailed("this sequence is broken")
        self._runtime.step(feeds, abandonable=abandonable)


def free(*sequences: int) -> tuple[Free, ...]:
    """Empty these."""
    return tuple(map(Free, sequences))


def seat(
    request: RequestId, sequence: int, tokens: Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any
) -> Admit:
    """An admission with nothing cached."""
    return Admit(request, sequence, tuple(tokens), fields.pop("prompt", len(tokens)), sampling, **fields)


class Contract:
    """The suite. A subclass overrides the fixture ``driver``, which starts with every sequence empty."""

    exact: ClassVar[bool] = True
    """Tokens do not depend on how they are grouped into calls, for any prompt."""

    slow: ClassVar[bool] = True
    """A tick takes longer than it takes to be told to stop: not so for a toy in a process of its own."""

    @pytest.fixture
    async def driver(self) -> Any:
        """The engine under test."""
        raise NotImplementedError

    @pytest.fixture
    async def prompt(self, driver: Driver) -> list[int]:
        """A prompt whose reply is certain."""
        return await driver.tokenize(SURE)

    @pytest.fixture
    async def others(self, driver: Driver) -> list[list[int]]:
        """Prompts for the lanes beside it, of different lengths."""
        return [await driver.tokenize(text) for text in OTHERS]

    async def alone(
        self, driver: Driver, tokens: Sequence[int], count: int, sampling: SamplingParams = GREEDY, **fields: Any
    ) -> list[int]:
        """What a prompt says, alone, fed whole; the engine is empty again afterwards."""
        tick = await driver.run(
            admit=(seat(999, 0, tokens, sampling, **fields),),
            prefill=(Prefill(999, len(tokens)),),
            decode=(Decode(999, count - 1),),
        )
        assert not tick.report.faults
        gone = await driver.run(retire=(999,), kv=free(0))
        assert gone.report.cells_used == 0
        return tick.tokens(999)

    # -- prefill --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("step_tokens", [1, 5, 512])
    async def test_prefill_in_any_micro_batch_says_the_same(
        self, driver: Driver, prompt: list[int], step_tokens: int
    ) -> None:
        expected = await self.alone(driver, prompt, 6)
        tick = await driver.run(
            admit=(seat(1, 0, prompt),),
            prefill=(Prefill(1, len(prompt)),),
            decode=(Decode(1, 5),),
            step_tokens=step_tokens,
        )
        assert tick.tokens(1) == expected
        assert tick.report.timing.prefill_tokens == len(prompt)
        feeding = [step for step in tick.steps if step.prefilled]
        assert len(feeding) == -(-len(prompt) // step_tokens)
        assert all(not step.tokens for step in feeding[:-1]), "only the last prompt token yields one"

    @pytest.mark.parametrize("chunk", [1, 4, 7])
    async def test_prefill_over_many_ticks_says_the_same(self, driver: Driver, prompt: list[int], chunk: int) -> None:
        expected = await self.alone(driver, prompt, 4)
        fed = 0
        tick = await driver.run(admit=(seat(1, 0, prompt),))
        while fed < len(prompt):
            assert not tick.out
            share = min(chunk, len(prompt) - fed)
            tick = await driver.run(prefill=(Prefill(1, share),))
            fed += share
            assert tick.report.prefilled == ((1, share),)
            assert tick.report.cells_used == fed
        rest = await driver.run(decode=(Decode(1, 3),))
        assert tick.tokens(1) + rest.tokens(1) == expected

    async def test_several_prompts_share_a_micro_batch(
        self, driver: Driver, prompt: list[int], others: list[list[int]]
    ) -> None:
        expected = await self.alone(driver, prompt, 1)
        prompts = [others[0], prompt, others[1]]
        tick = await driver.run(
            admit=tuple(seat(number, number, tokens) for number, tokens in enumerate(prompts, 1)),
            prefill=tuple(Prefill(number, len(tokens)) for number, tokens in enumerate(prompts, 1)),
        )
        assert len(tick.steps) == 1
        assert [out.request for out in tick.out] == [1, 2, 3]
        assert tick.tokens(2) == expected

    async def test_prefill_is_worked_off_in_the_plans_order(
        self, driver: Driver, prompt: list[int], others: list[list[int]]
    ) -> None:
        tick = await driver.run(
            admit=(seat(1, 0, prompt), seat(2, 1, others[0])),
            prefill=(Prefill(2, len(others[0])), Prefill(1, len(prompt))),
            step_tokens=len(others[0]),
        )
        assert [out.request for out in tick.out] == [2, 1]

    async def test_a_step_that_is_given_up_has_not_happened(
        self, driver: Driver, prompt: list[int], others: list[list[int]]
    ) -> None:
        if not isinstance(driver, Local) or not driver.info.abandons:
            return  # whoever is not asked in time computes the step: nothing can be told about when that is
        await driver.run(
            admit=(seat(1, 0, prompt), seat(2, 1, others[0])),
            prefill=(Prefill(1, 2), Prefill(2, len(others[0]))),
            decode=(Decode(2, 1),),
        )
        held = [driver.runtime.length(sequence) for sequence in (0, 1)]
        driver.abandon_next = True
        tick = await driver.run(prefill=(Prefill(1, len(prompt) - 2),), decode=(Decode(1, 3), Decode(2, 2)))
        assert tick.report.outcome == "stopped"
        assert tick.report.abandoned == ((1, len(prompt) - 2),)
        assert dict(tick.report.decoded) == {2: 1}, "the round before the step counts"
        assert tick.report.prefilled == ()
        assert [driver.runtime.length(sequence) for sequence in (0, 1)] == [held[0], held[1] + 1]
        again = await driver.run(prefill=(Prefill(1, len(prompt) - 2),), decode=(Decode(1, 3),))
        fresh = await driver.run(
            admit=(seat(3, 2, prompt),), prefill=(Prefill(3, len(prompt)),), decode=(Decode(3, 3),)
        )
        assert again.tokens(1) == fresh.tokens(3)

    async def test_a_preempted_lanes_tokens_stay_and_it_goes_on_in_another_lane(
        self, driver: Driver, prompt: list[int]
    ) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        whole = await driver.run(
            admit=(seat(1, 0, prompt, params),), prefill=(Prefill(1, len(prompt)),), decode=(Decode(1, 5),)
        )
        await driver.run(retire=(1,), kv=free(0))
        first = await driver.run(
            admit=(seat(2, 0, prompt, params),), prefill=(Prefill(2, len(prompt)),), decode=(Decode(2, 2),)
        )
        await driver.run(retire=(2,))
        known = [*prompt, *first.tokens(2)]
        rest = await driver.run(
            admit=(seat(2, 0, known, params, prompt=len(prompt), cached=len(known) - 1),),
            prefill=(Prefill(2, 1),),
            decode=(Decode(2, 2),),
        )
        assert first.tokens(2) + rest.tokens(2) == whole.tokens(1)

    # -- decode ---------------------------------------------------------------------------------------------------

    async def test_decode_grants_are_exact(self, driver: Driver, prompt: list[int], others: list[list[int]]) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        started = await driver.run(
            admit=(seat(1, 0, prompt, params), seat(2, 1, others[0], params), seat(3, 2, others[1], params)),
            prefill=(Prefill(1, len(prompt)), Prefill(2, len(others[0])), Prefill(3, len(others[1]))),
        )
        assert dict.fromkeys((1, 2, 3), 1) == dict(started.report.decoded)
        tick = await driver.run(decode=(Decode(1, 3), Decode(2, 5)))
        assert dict(tick.report.decoded) == {1: 3, 2: 5}
        assert tick.report.timing.decode_rounds == 5
        assert tick.report.timing.decode_tokens == 8
        assert tick.report.timing.decode_seconds > 0
        again = await driver.run(decode=(Decode(3, 1),))
        assert dict(again.report.decoded) == {3: 1}

    async def test_a_lane_decodes_in_the_tick_that_completes_its_prompt(
        self, driver: Driver, prompt: list[int]
    ) -> None:
        tick = await driver.run(admit=(seat(1, 0, prompt),), prefill=(Prefill(1, len(prompt)),), decode=(Decode(1, 4),))
        assert dict(tick.report.decoded) == {1: 5}

    async def test_a_decode_grant_waits_for_the_whole_prompt(self, driver: Driver, prompt: list[int]) -> None:
        tick = await driver.run(
            admit=(seat(1, 0, prompt),), prefill=(Prefill(1, len(prompt) - 1),), decode=(Decode(1, 4),)
        )
        assert not tick.out
        assert tick.report.outcome == "done"

    async def test_the_runtime_counts_what_it_computes(
        self, driver: Driver, prompt: list[int], others: list[list[int]]
    ) -> None:
        begun = await driver.run(
            admit=(seat(1, 0, prompt),), prefill=(Prefill(1, len(prompt)),), decode=(Decode(1, 2),)
        )
        other = others[0]
        both = await driver.run(
            admit=(seat(2, 1, other),),
            prefill=(Prefill(2, len(other)),),
            decode=(Decode(1, 3), Decode(2, 2)),
        )
        assert both.report.computed - begun.report.computed == len(other) + 3 + 2

    async def test_a_plan_with_nothing_to_do_does_nothing(self, driver: Driver) -> None:
        tick = await driver.run()
        again = await driver.run()
        timing, computed = tick.report.timing, tick.report.computed
        assert tick.report == TickReport(tick.report.tick, "done", timing=timing, computed=computed)
        assert again.report.computed == computed
        assert not tick.steps

    async def test_a_stopped_tick_goes_on_in_the_next_plan(
        self, driver: Driver, prompt: list[int], others: list[list[int]]
    ) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        expected = await self.alone(driver, prompt, 7, params)
        await driver.run(admit=(seat(1, 0, prompt, params), seat(2, 1, others[0], params)))
        first = await driver.run(
            prefill=(Prefill(1, len(prompt)), Prefill(2, len(others[0]))), step_tokens=4, stop_after=1
        )
        left = len(prompt) - dict(first.report.prefilled)[1]
        if self.slow:
            assert first.report.outcome == "stopped"
            assert left > 0, "the tick was stopped before the prompt was fed"
        second = await driver.run(prefill=(Prefill(1, left),) if left else (), decode=(Decode(1, 6),))
        assert first.tokens(1) + second.tokens(1) == expected

    # -- ends -----------------------------------------------------------------------------------------------------

    async def test_an_end_token_ends_the_lane(self, driver: Driver, prompt: list[int]) -> None:
        end = driver.info.end_tokens[-1]
        params = SamplingParams(temperature=0.0, logit_bias=((end, 100.0),))
        tick = await driver.run(
            admit=(seat(1, 0, prompt, params),), prefill=(Prefill(1, len(prompt)),), decode=(Decode(1, 5),)
        )
        assert [(out.token, out.end) for out in tick.out] == [(end, True)]
        assert dict(tick.report.prefilled) == {1: len(prompt)}
        more = await driver.run(decode=(Decode(1, 5),))
        assert not more.out

    async def test_end_tokens_can_be_ignored(self, driver: Driver, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        tokens = await self.alone(driver, prompt, 40, params)
        assert len(tokens) == 40
        assert not set(tokens) & set(driver.info.end_tokens)

    # -- lanes come and go ----------------------------------------------------------------------------------------

    async def test_retire_and_free_empties_and_the_sequence_serves_again(
        self, driver: Driver, prompt: list[int], others: list[list[int]]
    ) -> None:
        expected = await self.alone(driver, prompt, 5)
        await self.alone(driver, others[1], 9)
        assert await self.alone(driver, prompt, 5) == expected

    @pytest.mark.parametrize("phase", ["seated", "prefilling", "prompt fed", "decoding"])
    async def test_a_lane_is_cancelled_in_any_phase(
        self, driver: Driver, prompt: list[int], others: list[list[int]], phase: str
    ) -> None:
        expected = await self.alone(driver, prompt, 6)
        victim = others[1]
        tick = await driver.run(
            admit=(seat(1, 0, prompt), seat(2, 1, victim)), prefill=(Prefill(1, len(prompt)),), decode=(Decode(1, 1),)
        )
        said = tick.tokens(1)
        if phase != "seated":
            tick = await driver.run(prefill=(Prefill(2, len(victim) - (phase == "prefilling")),))
        if phase == "decoding":
            tick = await driver.run(decode=(Decode(2, 2),))
        after = await driver.run(retire=(2,), kv=free(1), decode=(Decode(1, 2),))
        said += after.tokens(1)
        assert after.report.cells_used == len(prompt) + 3, "only the other lane's tokens are left"
        # The freed sequence and the request's number are usable at once, even in the plan that frees them.
        again = await driver.run(
            retire=(1,),
            kv=free(0),
            admit=(seat(2, 1, prompt),),
            prefill=(Prefill(2, len(prompt)),),
            decode=(Decode(2, 5),),
        )
        assert again.tokens(2) == expected
        assert said == expected[: len(said)]

    async def test_lanes_join_and_leave_in_any_order_and_leave_the_others_alone(
        self, driver: Driver, prompt: list[int], others: list[list[int]]
    ) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        expected = await self.alone(driver, prompt, 8, params)
        beside = [await self.alone(driver, tokens, 8, params) for tokens in others] if self.exact else []
        prompts = {1: others[0], 2: prompt, 3: others[1], 4: others[2]}
        said: dict[int, list[int]] = {number: [] for number in prompts}

        async def run(**fields: Any) -> None:
            tick = await driver.run(**fields)
            for number, tokens in said.items():
                tokens.extend(tick.tokens(number))

        def join(number: int) -> dict[str, Any]:
            return {"admit": (seat(number, number - 1, prompts[number], params),)}

        await run(**join(3), prefill=(Prefill(3, 2),))
        await run(**join(2), prefill=(Prefill(2, len(prompt)), Prefill(3, len(prompts[3]) - 2)), step_tokens=7)
        await run(**join(1), prefill=(Prefill(1, len(prompts[1])),), decode=(Decode(2, 2), Decode(3, 3)), step_tokens=2)
        await run(retire=(3,), kv=free(2), decode=(Decode(1, 1), Decode(2, 2)))
        await run(**join(4), prefill=(Prefill(4, len(prompts[4])),), decode=(Decode(1, 4), Decode(4, 2)))
        await run(retire=(1,), kv=free(0), decode=(Decode(4, 1), Decode(2, 3)))
        assert said[2] == expected
        if self.exact:
            for number, whole in zip((1, 3, 4), beside, strict=True):
                assert said[number], number
                assert said[number] == whole[: len(said[number])]

    # -- draws ----------------------------------------------------------------------------------------------------

    async def test_draws_are_the_same_wherever_the_rounds_are_cut(
        self, driver: Driver, others: list[list[int]]
    ) -> None:
        params = SamplingParams(temperature=1.3, top_k=0, seed=77, ignore_eos=True)
        prompt = others[0]
        expected = await self.alone(driver, prompt, 12, params)
        for cuts in ((1,) * 11, (5, 6), (2, 9)):
            tick = await driver.run(admit=(seat(1, 0, prompt, params),), prefill=(Prefill(1, len(prompt)),))
            said = tick.tokens(1)
            for rounds in cuts:
                said += (await driver.run(decode=(Decode(1, rounds),))).tokens(1)
            await driver.run(retire=(1,), kv=free(0))
            assert said == expected, cuts

    async def test_another_seed_draws_something_else(self, driver: Driver, others: list[list[int]]) -> None:
        drawn = {
            tuple(await self.alone(driver, others[0], 8, SamplingParams(temperature=1.5, seed=seed, ignore_eos=True)))
            for seed in range(4)
        }
        assert len(drawn) == 4

    @pytest.mark.parametrize("known", [1, 4])
    async def test_a_request_resumes_from_prompt_and_generated_tokens(
        self, driver: Driver, prompt: list[int], others: list[list[int]], known: int
    ) -> None:
        params = SamplingParams(temperature=0.5, seed=5, presence_penalty=0.2, repeat_penalty=1.02)
        if self.exact:
            prompt = others[0]
            params = SamplingParams(temperature=1.5, seed=5)
        whole = await self.alone(driver, prompt, 7, params)
        tokens = [*prompt, *whole[:known]]
        resumed = await self.alone(driver, tokens, 7 - known, params, prompt=len(prompt))
        assert resumed == whole[known:]

    async def test_logprobs_come_where_asked_for(self, driver: Driver, prompt: list[int]) -> None:
        tick = await driver.run(
            admit=(
                seat(1, 0, prompt, SamplingParams(temperature=0.0, logprobs=20)),
                seat(2, 1, prompt, SamplingParams(temperature=0.0, logprobs=0)),
                seat(3, 2, prompt),
            ),
            prefill=tuple(Prefill(number, len(prompt)) for number in (1, 2, 3)),
            decode=tuple(Decode(number, 3) for number in (1, 2, 3)),
        )
        for out in tick.out:
            if out.request == 3:
                assert out.logprob is None
                assert out.top == ()
                continue
            assert out.logprob is not None
            assert out.logprob <= 0
            assert len(out.top) == (20 if out.request == 1 else 0)
            values = [entry.logprob for entry in out.top]
            assert values == sorted(values, reverse=True)
            assert len({entry.token for entry in out.top}) == len(out.top)
            if out.top:
                assert (out.top[0].token, out.top[0].logprob) == (out.token, out.logprob), "greedy takes the likeliest"
        assert len(tick.out) == 12

    @pytest.mark.parametrize("way", ["copied", "copied from a running lane", "cut", "saved and brought back", "left"])
    async def test_a_lane_seeded_from_another_says_what_it_says_alone(
        self, driver: Driver, prompt: list[int], others: list[list[int]], way: str
    ) -> None:
        if driver.info.cut != "anywhere":
            pytest.skip("this engine's sequences cannot be cut anywhere")
        other = [*prompt[:-2], *others[0]]
        expected = await self.alone(driver, prompt, 6)
        beside = await self.alone(driver, other, 4)
        shared = len(prompt) - 2
        tick = await driver.run(admit=(seat(1, 0, other),), prefill=(Prefill(1, len(other)),), decode=(Decode(1, 1),))
        said = tick.tokens(1)
        if way == "copied from a running lane":
            tick = await driver.run(
                kv=(Copy(0, 2, shared),),
                admit=(seat(2, 2, prompt, cached=shared),),
                prefill=(Prefill(2, 2),),
                decode=(Decode(2, 5), Decode(1, 2)),
            )
            assert [*said, *tick.tokens(1)] == beside
        else:
            sequence, moves = {
                "copied": (2, (Copy(0, 2, shared), Free(0))),
                "cut": (0, (Cut(0, shared),)),
                "saved and brought back": (2, (Export(0, 7), Free(0), Import(7, 2, shared), Discard(7))),
                "left": (0, (Cut(0, len(other)), Export(0, 7), Cut(0, shared))),
            }[way]
            tick = await driver.run(
                retire=(1,),
                kv=moves,
                admit=(seat(2, sequence, prompt, cached=shared),),
                prefill=(Prefill(2, 2),),
                decode=(Decode(2, 5),),
            )
        assert tick.report.emptied == ()
        assert tick.tokens(2) == expected
        assert all(size > 0 for _, size in tick.report.exported)
        if way != "copied from a running lane":
            assert tick.report.cells_used == len(prompt) + 5
        await driver.run(retire=(1, 2), kv=free(0, 2))


class SharedContract:
    """For the shared layout: the fixture ``driver`` has 4 sequences and 128 cells in one pool."""

    @pytest.fixture
    async def driver(self) -> Any:
        """The engine under test."""
        raise NotImplementedError

    async def test_more_than_the_pool_holds_is_sent_back_and_nothing_has_changed(self, driver: Driver) -> None:
        text = await driver.tokenize(SURE)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        long = (text * 20)[:100]
        await driver.run(admit=(seat(1, 0, long, params),), prefill=(Prefill(1, 100),))
        refused = await driver.run(retire=(1,), admit=(seat(2, 1, long, params),), prefill=(Prefill(2, 100),))
        assert refused.report.outcome == "replan"
        assert "100" in refused.report.reason
        assert "28" in refused.report.reason
        assert refused.report.cells_used == 100
        # The same plan without the admission runs, and request 1 still has its lane.
        tick = await driver.run(decode=(Decode(1, 3),))
        assert len(tick.tokens(1)) == 3
        # What a plan frees counts for what it admits.
        swapped = await driver.run(
            retire=(1,), kv=free(0), admit=(seat(2, 1, long, params),), prefill=(Prefill(2, 100),)
        )
        assert swapped.report.outcome == "done"
        assert len(swapped.tokens(2)) == 1

    async def test_the_pool_can_be_used_to_the_last_cell(self, driver: Driver) -> None:
        text = await driver.tokenize(SURE)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        half = (text * 20)[:64]
        tick = await driver.run(
            admit=(seat(1, 0, half, params), seat(2, 3, half, params)),
            prefill=(Prefill(1, 64), Prefill(2, 64)),
            step_tokens=50,
        )
        assert tick.report.cells_used == 128
        assert tick.tokens(1) == tick.tokens(2)
        assert not tick.report.faults


class FaultContract:
    """One lane's fault is its own. The fixture ``broken`` is a driver over :class:`Faulty`, sequence 1."""

    exact: ClassVar[bool] = True

    @pytest.fixture
    async def broken(self) -> Any:
        """The engine under test."""
        raise NotImplementedError

    @pytest.mark.parametrize("when", ["prefill", "decode"])
    async def test_a_lane_that_fails_takes_no_neighbour_along(self, broken: Local, when: str) -> None:
        faulty = broken.runtime
        assert isinstance(faulty, Faulty)
        bad, faulty.sequence = faulty.sequence, None
        prompt = await broken.tokenize(SURE)
        other = await broken.tokenize(OTHERS[1])
        run = Contract()
        expected = await run.alone(broken, prompt, 6)
        admit = (seat(1, 0, prompt), seat(2, 1, other), seat(3, 2, prompt))
        chunks = (Prefill(1, len(prompt)), Prefill(2, len(other)), Prefill(3, len(prompt)))
        if when == "prefill":
            faulty.sequence = bad
        first = await broken.run(admit=admit, prefill=chunks)
        faulty.sequence = bad
        second = await broken.run(decode=tuple(Decode(number, 5) for number in (1, 2, 3)))
        faults = (first if when == "prefill" else second).report.faults
        assert [(fault.request, fault.message) for fault in faults] == [(2, "this sequence is broken")]
        assert len(first.report.faults) + len(second.report.faults) == 1, "a fault is told once"
        assert first.tokens(1) + second.tokens(1) == expected
        assert first.tokens(3) + second.tokens(3) == expected
        assert len(first.tokens(2) + second.tokens(2)) == (0 if when == "prefill" else 1)
        # The sequence is usable once it is whole again.
        faulty.sequence = None
        after = await broken.run(
            retire=(1, 2, 3),
            kv=free(0, 1, 2),
            admit=(seat(4, 1, prompt),),
            prefill=(Prefill(4, len(prompt)),),
            decode=(Decode(4, 5),),
        )
        assert after.tokens(4) == expected

    async def test_every_lane_can_fail(self, broken: Local) -> None:
        prompt = await broken.tokenize(SURE)
        tick = await broken.run(admit=(seat(1, 1, prompt),), prefill=(Prefill(1, len(prompt)),), decode=(Decode(1, 3),))
        assert [fault.request for fault in tick.report.faults] == [1]
        assert not tick.out
        assert tick.report.outcome == "done"
