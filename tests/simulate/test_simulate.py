"""``superfluidd simulate``: traces, the equality with a daemon on virtual time, figures, comparisons, recording."""

from __future__ import annotations

import itertools
import json
import random
import threading
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from superfluidd import cli
from superfluidd.control.protocol import TraceEntry
from superfluidd.daemon.ended import AT_ONCE, KEPT, Ended
from superfluidd.daemon.model import Model
from superfluidd.daemon.streams import Done, GenerationRequest
from superfluidd.errors import UsageError
from superfluidd.scheduling.entries import Cache
from superfluidd.scheduling.policy import Policy
from superfluidd.simulate.stats import Durations, Stats, Timeline
from superfluidd.simulate.trace import Arrival, generate, read
from superfluidd.simulate.world import Engine, World
from superfluidd.types import QosClass
from tests.conftest import Simulated, simulated_spec
from tests.daemon.test_model import GREEDY
from tests.process.harness import Daemon

# -- traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not an arrival"),
        ("[]", "line 2 is not an arrival"),
        ('{"t": 1}', "line 2 is not an arrival: .*missing required field"),
        ('{"t": 1, "class": "agent", "prompt": 5, "output": 2, "text": "hi"}', "line 2 is not an arrival: .*unknown"),
        ('{"t": 1, "class": "urgent", "prompt": 5, "output": 2}', "line 2: 'urgent' is not a QoS class; legal"),
        (
            '{"t": 0.1, "class": "agent", "prompt": 5, "output": 2}',
            "line 2: t is 0.1 after 0.5; times must not",
        ),
        ('{"t": 1, "class": "agent", "prompt": 0, "output": 2}', "line 2: prompt and output are at least 1"),
        ('{"t": 1, "class": "agent", "prompt": 5, "output": 0}', "line 2: prompt and output are at least 1"),
        ('{"t": 1, "class": "agent", "prompt": 101, "output": 2}', "line 2: a prompt of 101 tokens does not fit the w"),
        (
            '{"t": 1, "class": "agent", "prompt": 5, "output": 2, "prefix": "a", "prefix_tokens": 6}',
            "no prefix is longer",
        ),
        ('{"t": 1, "class": "agent", "prompt": 5, "output": 2, "prefix_tokens": 4}', "prefix_tokens without prefix"),
        ('{"t": 1e12, "class": "agent", "prompt": 5, "output": 2}', "line 2: t is 1e"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(line: str, message: str) -> None:
    good = '{"t": 0.5, "class": "agent", "prompt": 5, "output": 2}'
    with pytest.raises(UsageError, match=message):
        list(read([good, line], window=100))


def test_a_trace_is_read_line_by_line() -> None:
    def lines() -> itertools.chain[str]:
        first = '{"t": 0, "class": "3", "prompt": 9, "output": 2, "prefix": "a", "prefix_tokens": 4}'
        return itertools.chain([first, "", "  "], iter(["no json"]))

    arrivals = read(lines(), window=100)
    assert next(arrivals) == Arrival(0.0, QosClass.BACKGROUND, 9, 2, "a", 4)
    with pytest.raises(UsageError, match="line 4"):
        next(arrivals)


def test_a_made_up_day_is_the_same_for_the_same_seed_and_can_be_read() -> None:
    first, again, other = (list(generate(3000, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert 60_000 < first[-1].t < 110_000
    assert {line.qos for line in first} == {"interactive", "completion", "agent", "background"}
    assert 20 < sum(line.output for line in first) / len(first) < 45
    lines = [msgspec.json.encode(line).decode() for line in first]
    assert len(list(read(lines, window=8192))) == 3000


# -- the same as the daemon ---------------------------------------------------------------------------------------


def mixed(seed: int, count: int) -> list[Arrival]:
    """Arrivals that meet ticks, steps and full lanes. Odd times, so that no two things happen at the same moment."""
    chance = random.Random(seed)
    now = 0.0
    arrivals: list[Arrival] = []
    for _ in range(count):
        now += chance.expovariate(3.0)
        qos = chance.choice(list(QosClass))
        prompt = chance.randint(300, 900) if chance.random() < 0.3 else chance.randint(2, 60)
        prefix, part = chance.choice("abc"), chance.choice((0, 0.5, 0.9, 1))
        arrivals.append(Arrival(now, qos, prompt, chance.randint(1, 40), prefix, int(prompt * part)))
    return arrivals


def prompt_of(arrival: Arrival, number: int) -> tuple[int, ...]:
    """Token ids of the simulated vocabulary that are as much alike as the trace says."""
    shared = arrival.prefix_tokens
    return (ord(arrival.prefix),) * shared + (128 + number,) * (arrival.prompt - shared)


@pytest.mark.parametrize("cache", [Cache(), Cache(enabled=True)], ids=["no cache", "cache"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [Policy(), Policy(starvation_ticks=3, prefill_budget=0, decode_budget=12)])
async def test_first_tokens_come_at_the_moment_at_which_a_daemon_has_them(
    autojump_clock: MockClock, nursery: trio.Nursery, seed: int, policy: Policy, cache: Cache
) -> None:
    arrivals = mixed(seed, 60)
    spec = msgspec.structs.replace(simulated_spec(lanes=3, window=1024), spare=2)
    starts = Simulated(spec).start
    model = Model("m", "", starts, itertools.count(1), policy=policy, caps={QosClass.BACKGROUND: 2}, cache=cache)
    await nursery.start(model.run)
    start = trio.current_time()
    seen: dict[int, float] = {}

    async def one(arrival: Arrival, number: int) -> None:
        await trio.sleep_until(start + arrival.t)
        prompt = prompt_of(arrival, number)
        request = GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=arrival.output, qos=arrival.qos)
        generation = model.submit(request)
        while not isinstance(await generation.next(), Done):
            pass

    firsts: dict[int, float] = {}
    watch = model.on_ended

    def ended(record: object) -> None:
        watch(record)  # type: ignore[arg-type]
        firsts[record.id] = record.first_token - start  # type: ignore[attr-defined]

    model.on_ended = ended
    async with trio.open_nursery() as clients:
        for number, arrival in enumerate(arrivals):
            clients.start_soon(one, arrival, number)
    assert model.scheduler is not None
    stats = model.scheduler.statistics()
    nursery.cancel_scope.cancel()

    world = World(Engine(lanes=3, spare=2, window=1024, cache=cache), policy, {QosClass.BACKGROUND: 2})
    world.first_tokens = seen
    result = world.run(iter(arrivals))
    assert seen.keys() == firsts.keys()
    assert {request: pytest.approx(at, abs=1e-9) for request, at in firsts.items()} == seen
    assert result.ticks == pytest.approx(stats.ticks, abs=3), "a daemon also empties lanes in ticks of their own"
    assert {qos: one.preemptions for qos, one in result.classes.items()} == stats.preemptions
    assert (result.prefill_tokens, result.abandoned_tokens) == (stats.prefill_tokens, stats.abandoned_tokens)
    assert result.cached_tokens == stats.kv.cached_tokens
    assert (result.cached_tokens > 1000) == cache.enabled
    if seed == 0:
        assert sum(stats.preemptions.values()) > 0


# -- figures ------------------------------------------------------------------------------------------------------


def test_percentiles_are_right_to_a_part_in_a_hundred() -> None:
    durations = Durations()
    assert durations.percentile(0.5) == 0.0
    chance = random.Random(1)
    values = [chance.lognormvariate(-2, 1.5) for _ in range(5000)]
    for value in values:
        durations.add(value)
    values.sort()
    for share in (0.5, 0.95, 0.99):
        assert durations.percentile(share) == pytest.approx(values[int(share * 5000) - 1], rel=0.011)
    assert durations.percentile(1.0) <= durations.most == values[-1]
    assert len(durations.buckets) < 1000
    durations = Durations()
    durations.add(0.0)
    assert durations.percentile(0.99) == 0.0


def test_one_request_takes_what_the_cost_model_says() -> None:
    stats = World(Engine()).run(iter([Arrival(5.0, QosClass.AGENT, 100, 3)]))
    agent = stats.classes[QosClass.AGENT]
    assert (agent.requests, agent.finished, agent.tokens) == (1, 1, 3)
    # 2 ms and 100 tokens at 400 a second; then rounds of 8 + 1 ms.
    assert agent.ttft.most == pytest.approx(0.252)
    assert agent.gap.most == pytest.approx(0.009)
    assert stats.seconds == pytest.approx(0.252 + 0.018)
    assert stats.utilisation == pytest.approx(1.0)
    assert stats.mean_lanes <= 1.0


def test_a_shared_prefix_is_fed_once_and_paid_for_once() -> None:
    def day(cache: Cache) -> Stats:
        turns = [Arrival(10.0 * turn, QosClass.AGENT, 420, 3, "session", 400) for turn in range(5)]
        return World(Engine(cache=cache)).run(iter([*turns, Arrival(60.0, QosClass.AGENT, 420, 3)]))

    without, cached = day(Cache()), day(Cache(enabled=True))
    assert (without.prefill_tokens, without.cached_tokens) == (6 * 420, 0)
    assert (cached.prefill_tokens, cached.cached_tokens) == (2 * 420 + 4 * 20, 4 * 400)
    assert cached.classes[QosClass.AGENT].ttft.percentile(0.5) == pytest.approx(0.002 + 20 / 400, rel=0.011)
    assert without.classes[QosClass.AGENT].ttft.percentile(0.5) == pytest.approx(0.002 + 420 / 400, rel=0.011)


def test_a_timeline_stays_small_and_keeps_the_sum() -> None:
    timeline = Timeline()
    for second in range(10_000):
        timeline.add(float(second), 1.0, [1, 0, 2, 0])
    assert len(timeline.rows) <= Timeline.MOST
    assert sum(row[0] for row in timeline.rows) == pytest.approx(10_000)
    assert sum(row[2] for row in timeline.rows) == pytest.approx(20_000)
    assert timeline.mean_lanes()[0][:3] == pytest.approx([1, 0, 2])


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "day.jsonl"
    assert cli.main(["simulate", "--generate", "2000", "--seed", "3", "--out", str(path)]) == 0
    return path


def test_settings_are_compared_side_by_side(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", str(day), "--speed", "0.05", "--set", "class-lanes=background=1"]
    assert cli.main([*argv, "--set", "max-batch=2 agent-preempts-background=on"]) == 0
    out, err = capsys.readouterr()
    heading, *rows = out.splitlines()
    assert heading.split("  ")[-1].strip() == "max-batch=2 agent-preempts-background=on"
    assert "class-lanes=background=1" in heading
    (requests,) = [row for row in rows if row.strip().startswith("tokens generated")]
    assert len(set(requests.split()[2:])) == 1, "the same work under every setting"
    assert "simulated in " in err
    assert " MB at most" in err
    assert cli.main([*argv, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert list(results) == ["as it is", "class-lanes=background=1"]
    plain = results["as it is"]["classes"]
    assert sum(one["requests"] for one in plain.values()) == 2000
    assert sum(one["finished"] for one in plain.values()) == 2000
    assert plain["interactive"]["ttft"]["p95"] < plain["background"]["ttft"]["p95"]
    capped = results["class-lanes=background=1"]["classes"]["background"]["queue_wait"]["max"]
    assert capped >= plain["background"]["queue_wait"]["max"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a TRACE to simulate"),
        (["/nowhere/trace.jsonl"], "cannot read /nowhere/trace.jsonl"),
        (["-", "--set", "max-batch=2"], "standard input can be read only once"),
        (["x", "--speed", "0"], "--speed must be more than 0"),
        (["x", "--window", "1"], "--window from 64"),
        (["x", "--set", "temperature=1"], "write NAME=VALUE with one of max-batch, class-lanes"),
        (["x", "--set", "max-batch"], "write NAME=VALUE"),
        (["x", "--set", "prefill-budget=1"], "is not a whole number from 64 to 4096, or 0"),
        (["--generate", "0"], "at least 1"),
        (["--generate", "3", "--out", "/nowhere/x"], "cannot write /nowhere/x"),
    ],
)
def test_wrong_arguments_are_told(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_a_picture_is_drawn(day: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    assert cli.main(["simulate", str(day), "--plot", str(out), "--set", "max-batch=2"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["simulate", str(day), "--plot", str(tmp_path / "no" / "out.png")]) == 2


def test_without_matplotlib_it_is_said_before_anything_is_simulated(
    day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert cli.main(["simulate", str(day), "--plot", str(tmp_path / "out.png")]) == 2
    assert "pip install 'superfluidd[plot]'" in capsys.readouterr().err


# -- recording ----------------------------------------------------------------------------------------------------


def test_the_ring_of_ended_requests_says_what_was_lost() -> None:
    ended = Ended()
    assert ended.since(-1).cursor == 0
    for number in range(KEPT + 10):
        ended.add(TraceEntry(float(number), "agent", 1, 1))
    first = ended.since(0)
    assert (first.lost, len(first.entries), first.entries[0].arrived) == (10, AT_ONCE, 10.0)
    second = ended.since(first.cursor)
    assert (second.lost, second.entries[0].arrived) == (0, 10.0 + AT_ONCE)
    last = ended.since(second.cursor)
    assert (last.entries, last.cursor) == ((), KEPT + 10)
    assert ended.since(KEPT + 99).cursor == KEPT + 10, "a cursor from before a restart"


@pytest.mark.process
def test_a_trace_is_recorded_from_a_running_daemon_and_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.jsonl"
    with Daemon(tmp_path, "--engine", "simulated") as daemon:
        daemon.complete("before", max_tokens=2)

        def ask() -> None:
            for number in range(3):
                headers = {"x-superfluid-qos": "background" if number else "interactive"}
                body = {"prompt": "a secret", "max_tokens": 3 + number, "ignore_eos": True}
                assert daemon.http.post("/v1/completions", json=body, headers=headers).status_code == 200

        client = threading.Timer(0.7, ask)
        client.start()
        argv = ["simulate", "--record", str(out), "--socket", str(daemon.socket), "--seconds", "4"]
        assert cli.main(argv) == 0
        client.join()
    assert f"3 requests written to {out}" in capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["class"], line["output"]) for line in lines] == [
        ("interactive", 3), ("background", 4), ("background", 5)
    ]  # fmt: skip
    assert lines[0]["t"] == 0
    assert set(lines[0]) == {"t", "class", "prompt", "output"}, "no text"
    assert cli.main(["simulate", str(out)]) == 0
    assert cli.main(["simulate", "--record", str(out), "--socket", str(tmp_path / "gone.sock")]) == 1
    assert "no daemon answers" in capsys.readouterr().err
