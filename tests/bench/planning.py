"""What a plan costs while others wait: ``python -m tests.bench.planning``. No server, no engine, no clock but ours.

64 lanes are busy, some reading prompts and some decoding, and N requests of all classes wait. Whoever ends is replaced
at the end of the queue, so most plans seat somebody. Timed are ``plan`` and ``apply`` alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from superfluidd.scheduling.books import Limits
from superfluidd.scheduling.plan import Plan, TickReport, Timing
from superfluidd.scheduling.scheduler import Observed, Scheduler
from superfluidd.types import QosClass, RequestId, SamplingParams
from tests.bench import harness, machine, plots
from tests.bench.plots import Goal, goal_for
from tests.bench.report import markdown, spread

LANES = 64
WINDOW = 2048
QUEUES = (0, 10, 100, 1_000, 10_000)

MAX_PLAN = 1e-3
"""Goal: median seconds of a plan."""
MAX_GROWTH = 1.5
"""Goal: the median behind the longest queue against that behind the shortest one that is not empty."""

TICK = 0.05
"""Seconds between two ticks on the scheduler's clock."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Some ticks behind a queue of one length.

    Attributes:
        queued: requests waiting.
        round: counted from 1.
        attempts: measurements until one was clean.
        foreign: cores that other processes took.
        plan, apply: seconds of each tick.
        seated: requests seated over all ticks.
    """

    queued: int
    round: int
    attempts: int
    foreign: float
    plan: list[float]
    apply: list[float]
    seated: int

    @property
    def clean(self) -> bool:
        """Nobody else was busy."""
        return self.foreign < machine.MAX_FOREIGN


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A run as kept on disk; the table is made from it."""

    at: str
    versions: dict[str, str]
    machine: dict[str, str]
    samples: list[Sample]


def scheduler() -> Scheduler:
    """An empty one."""
    return Scheduler(Limits(lanes=LANES, shared=False, cells=LANES * WINDOW, sequences=LANES + 2, window=WINDOW))


class Load:
    """A scheduler with all lanes busy and a queue that stays as long as it is: who ends is replaced.

    Args:
        queued: requests to keep waiting.
        prompt: tokens of every prompt.
    """

    def __init__(self, queued: int, prompt: int = 500) -> None:
        self._scheduler = scheduler()
        self._prompt = tuple(range(prompt))
        self._now = 0.0
        self._came = 0
        self._known: dict[RequestId, int] = {}
        self._fed: dict[RequestId, int] = {}
        self.seated = 0
        for _ in range(LANES + queued):
            self._submit()

    def _submit(self) -> None:
        # Lengths differ, or all lanes would end in the same tick.
        tokens, qos = 10 + 7 * (self._came % 13), QosClass(self._came % len(QosClass))
        sampling = SamplingParams(temperature=0.0)
        self._scheduler.submit(self._prompt, sampling=sampling, max_tokens=tokens, qos=qos, now=self._now)
        self._came += 1

    def tick(self) -> tuple[float, float]:
        """Plan a tick, work it off and report it; seconds of the first and of the last."""
        self._now += TICK
        begun = time.perf_counter()
        plan = self._scheduler.plan(self._now)
        planned = time.perf_counter()
        assert plan is not None, "lanes are busy, so there is something to do"
        self.seated += len(plan.admit)
        report = self._work(plan)
        worked = time.perf_counter()
        self._scheduler.apply(report, self._now)
        return planned - begun, time.perf_counter() - worked

    def _work(self, plan: Plan) -> TickReport:
        """Feed what was granted, and one token for every lane that decodes."""
        for seat in plan.admit:
            self._known[seat.request], self._fed[seat.request] = len(seat.tokens), seat.cached
        fed = tuple((chunk.request, chunk.tokens) for chunk in plan.prefill)
        reading = {chunk.request for chunk in plan.prefill}
        # A resumed lane reads its last token again and then decodes: here, too, one token is all it gets.
        decoding = (lane.request for lane in plan.decode if lane.request not in reading)
        speaking = [request for request in decoding if self._fed[request] == self._known[request] - 1]
        for chunk in plan.prefill:
            self._fed[chunk.request] += chunk.tokens
            if self._fed[chunk.request] == self._known[chunk.request]:
                speaking.append(chunk.request)
        for request in speaking:
            position = self._known[request]
            self._known[request], self._fed[request] = position + 1, position
            if self._scheduler.observe(request, position, 7, end=False, now=self._now) is Observed.FINISHED:
                del self._known[request], self._fed[request]
                self._submit()
        timing = Timing(1, len(speaking), TICK / 2, sum(count for _, count in fed), TICK / 2)
        return TickReport(plan.tick, "done", fed, tuple((request, 1) for request in speaking), timing=timing)


def measure(queued: int, ticks: int, round_number: int, attempts: int) -> Sample:
    """Time so many ticks, again if somebody else was busy."""
    attempt = 0
    while True:
        attempt += 1
        load = Load(queued)
        for _ in range(ticks // 10):
            load.tick()
        load.seated = 0
        meter = machine.Meter({})
        times = [load.tick() for _ in range(ticks)]
        foreign = meter.stop().foreign
        if foreign < machine.MAX_FOREIGN or attempt >= attempts:
            return Sample(
                queued=queued,
                round=round_number,
                attempts=attempt,
                foreign=foreign,
                plan=[planned for planned, _ in times],
                apply=[applied for _, applied in times],
                seated=load.seated,
            )
        time.sleep(1.0)


def percentile(found: Sequence[float], share: float) -> float:
    """The figure that so large a share of the others does not exceed."""
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def by_length(samples: Sequence[Sample], figure: Callable[[Sequence[float]], float]) -> dict[int, list[float]]:
    """A figure of the plans of each clean round, by length of the queue."""
    found: dict[int, list[float]] = {sample.queued: [] for sample in samples}
    for sample in samples:
        if sample.clean:
            found[sample.queued].append(figure(sample.plan))
    return found


def table(samples: Sequence[Sample]) -> str:
    """Medians over rounds, and their range, in microseconds."""
    lines = []
    for queued in sorted({sample.queued for sample in samples}):
        clean = [sample for sample in samples if sample.queued == queued and sample.clean]
        line = [f"{queued:,}"]
        for times in ([sample.plan for sample in clean], [sample.apply for sample in clean]):
            line.append(spread([1e6 * statistics.median(one) for one in times]))
            line.append(spread([1e6 * percentile(one, 0.99) for one in times]))
        lines.append([*line, str(sum(sample.seated for sample in clean)), str(len(clean))])
    head = ["queued", "plan, median µs", "plan, p99 µs", "apply, median µs", "apply, p99 µs", "seated", "rounds"]
    return markdown(head, lines)


def goals(samples: Sequence[Sample]) -> list[Goal]:
    """What a plan may cost."""
    found = by_length(samples, statistics.median)
    every = sorted(found)
    short, long = next((number for number in every if number), every[0]), every[-1]
    growth = [late / early for early, late in zip(found[short], found[long], strict=False)]
    return [
        goal_for(f"seconds a plan with {long:,} queued, < {MAX_PLAN:g}", found[long], MAX_PLAN.__gt__),
        goal_for(f"as a multiple of that with {short:,}, <= {MAX_GROWTH:g}", growth, MAX_GROWTH.__ge__),
    ]


def picture(samples: Sequence[Sample], path: Path) -> None:
    """Draw the time of a plan against the length of the queue."""
    middle = by_length(samples, lambda found: 1e6 * statistics.median(found))
    worst = by_length(samples, lambda found: 1e6 * percentile(found, 0.99))
    lines = [plots.Line(label="median", points=middle), plots.Line(label="p99", points=worst, dashed=True)]
    plots.lines(path, lines, title="A plan for 64 lanes", x="requests queued", y="µs", log_x=True)


def main() -> int:
    """Measure, and print table and verdict; 0 unless a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few ticks, to see that it works; no figures to publish")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with every length (default: %(default)s)")
    parser.add_argument("--ticks", type=int, default=5000, help="ticks a measurement (default: %(default)s)")
    parser.add_argument("--attempts", type=int, default=6, help="tries before one is void (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="folder for the JSON file (default: .bench/results/TIME)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the times (needs matplotlib)")
    args = parser.parse_args()
    plots.require(args.plot)
    if args.quick:
        args.rounds, args.ticks, args.attempts = 1, 1000, 1
    samples = []
    for number in range(1, args.rounds + 1):
        for queued in QUEUES if number % 2 else QUEUES[::-1]:
            sample = measure(queued, args.ticks, number, args.attempts)
            samples.append(sample)
            note = "" if sample.clean else f", void: {sample.foreign:.2f} foreign cores"
            print(
                f"round {number}, {queued:6,} queued: {1e6 * statistics.median(sample.plan):.0f} µs{note}", flush=True
            )
    at = datetime.now(UTC).isoformat(timespec="seconds")
    record = Record(at=at, versions=harness.versions(), machine=machine.describe(), samples=samples)
    folder = harness.results_folder(args, "planning")
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "planning.json"
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    samples = msgspec.json.decode(kept.read_bytes(), type=Record).samples
    found = goals(samples)
    print(f"\n{table(samples)}\n\n{plots.verdicts(found)}\n\nmade from {kept}")
    if args.plot:
        picture(samples, args.plot)
    return 0 if args.quick or all(goal.passed for goal in found) else 1


if __name__ == "__main__":
    sys.exit(main())
