"""What ``superfluidd simulate`` does."""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import time
from pathlib import Path

from superfluidd import config
from superfluidd.errors import UsageError
from superfluidd.scheduling.entries import Cache
from superfluidd.simulate import plot, report
from superfluidd.simulate.arguments import BASELINE, SETTINGS
from superfluidd.simulate.record import record
from superfluidd.simulate.stats import Stats, Timeline
from superfluidd.simulate.trace import generate, read, write
from superfluidd.simulate.world import Engine, World


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        StartupError: the arguments or the trace are wrong, or there is nothing to record from.
    """
    if args.record:
        print(record(Path(args.record), args.socket, args.seconds))
        return 0
    if args.generate is not None:
        return _generate(args)
    if args.trace is None:
        raise UsageError("give a TRACE to simulate, or --generate N, or --record OUT; see superfluidd simulate --help")
    if not args.speed > 0 or not 64 <= args.window <= 16_777_216:
        raise UsageError("--speed must be more than 0, and --window from 64 to 16777216")
    if args.trace == "-" and args.sets:
        raise UsageError("standard input can be read only once; write the trace to a file to compare settings")
    if args.plot:
        plot.check()
    runs = [(BASELINE, _settings(args.config, [])), *((text, _settings(args.config, [text])) for text in args.sets)]
    results: dict[str, Stats] = {}
    timelines: dict[str, Timeline] = {}
    started = time.perf_counter()
    for name, settings in runs:
        timelines[name] = Timeline()
        engine = Engine(lanes=settings.max_batch, window=args.window, speed=args.speed, cache=_cache(settings))
        world = World(engine, settings.policy, settings.caps, timelines[name] if args.plot else None)
        results[name] = _simulate(world, args.trace, args.window)
    took = time.perf_counter() - started
    if args.plot:
        plot.draw(Path(args.plot), results, timelines)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    if args.json:
        print(json.dumps({name: report.plain(stats) for name, stats in results.items()}))
    else:
        print(report.table(results))
    print(f"simulated in {took:.1f} s, {peak:.0f} MB at most", file=sys.stderr)
    return 0


def _simulate(world: World, trace: str, window: int) -> Stats:
    if trace == "-":
        return world.run(read(sys.stdin, window))
    try:
        with Path(trace).open() as file:
            return world.run(read(file, window))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {trace}: {error}") from error


def _cache(settings: config.Settings) -> Cache:
    """In the pool alone: host memory is another machine's."""
    return Cache(
        enabled=settings.prefix_cache == "on", high=settings.pressure_high / 100, low=settings.pressure_low / 100
    )


def _generate(args: argparse.Namespace) -> int:
    if not 1 <= args.generate <= 1_000_000_000:
        raise UsageError("--generate takes a number of requests, at least 1")
    lines = generate(args.generate, args.seed)
    if args.out == "-":
        write(lines, sys.stdout)
        return 0
    try:
        with Path(args.out).open("w") as file:
            print(f"{write(lines, file)} arrivals written to {args.out}")
    except OSError as error:
        raise UsageError(f"cannot write {args.out}: {error}") from error
    return 0


def _settings(file: str | None, texts: list[str]) -> config.Settings:
    flags: dict[str, object] = {}
    for text in texts:
        for word in shlex.split(text):
            name, equals, value = word.partition("=")
            if name not in SETTINGS or not equals:
                raise UsageError(f"--set {word}: write NAME=VALUE with one of {', '.join(SETTINGS)}")
            flags[name.replace("-", "_")] = value
    return config.load(flags, config=Path(file) if file else None, environ={})
