"""What it costs to go on with a preempted lane, in our own engine: ``python -m tests.bench.resume``.

A lane of 1,500 tokens whose KV stayed in the pool, one whose KV moved to host memory and back, and one that is fed
again, on the bundled model. No server runs: a tick of the engine is what is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from superfluidd.engine.executor import Executor
from superfluidd.engine.runtimes.llamacpp import LlamaCppRuntime
from superfluidd.engine.wire import LoadSpec, StepDone
from superfluidd.scheduling.plan import Admit, Cut, Export, Free, Import, KvOp, Plan, Prefill
from superfluidd.types import SamplingParams
from tests.bench import plots
from tests.bench.plots import goal_for
from tests.bench.prepare_model import bundled_model
from tests.bench.prompts import Prompts
from tests.bench.report import markdown, spread

MAX_SHARE = 0.05
"""Goal: going on against feeding the lane again."""


class Bench:
    """An engine, and a lane in it that is preempted again and again."""

    def __init__(self, model: Path, tokens: list[int]) -> None:
        spec = LoadSpec("llamacpp", str(model), 1, 2048, "per-sequence", 0, spare=1)
        self._executor = Executor(LlamaCppRuntime(spec, lambda _: None))
        self._tokens = tokens
        self._tick = 0

    def run(self, *, fed: int = 0, kv: tuple[KvOp, ...] = ()) -> tuple[float, int]:
        """Seconds until the lane has said one more token, and that token."""
        self._tick += 1
        admit = Admit(1, 0, tuple(self._tokens), len(self._tokens), SamplingParams(temperature=0.0), fed)
        plan = Plan(
            self._tick,
            retire=(1,),
            kv=kv,
            admit=(admit,),
            prefill=(Prefill(1, len(self._tokens) - fed),),
        )
        begun = time.perf_counter()
        said = -1
        steps = self._executor.run(plan, lambda: False)
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                if end.value.emptied:
                    raise SystemExit("the engine could not go on from what was kept") from None
                return time.perf_counter() - begun, said
            if isinstance(step, StepDone):
                said = next((out.token for out in step.tokens), said)

    def empty(self, *kv: KvOp) -> None:
        """Nobody runs; move KV."""
        self._tick += 1
        for _ in self._executor.run(Plan(self._tick, retire=(1,), kv=kv), lambda: False):
            pass


def main() -> int:
    """Measure, and print table and verdict; 0 unless the goal was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="GGUF file; by default the bundled model")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the lane (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    model: Path = args.model or bundled_model()
    tokens = Prompts(model).document("resume", args.tokens)
    bench, held = Bench(model, tokens), args.tokens - 1
    bench.run(kv=(Free(0),))
    again: list[float] = []
    resident: list[float] = []
    host: list[float] = []
    for number in range(1, args.rounds + 1):
        seconds, expected = bench.run(kv=(Free(0),))
        again.append(seconds)
        # What a preempted lane has: all of its tokens but the last.
        seconds, said = bench.run(fed=held, kv=(Cut(0, held),))
        resident.append(seconds)
        bench.empty(Cut(0, held), Export(0, number), Free(0))
        seconds, brought = bench.run(fed=held, kv=(Import(number, 0, held),))
        host.append(seconds)
        if not said == brought == expected:
            print(f"round {number}: another token than the one before; a near-tie fell the other way")
    rows = [["fed again", spread(again, 3), ""]]
    shares = {}
    for name, found in (("KV in the pool", resident), ("KV in host memory", host)):
        shares[name] = [one / whole for one, whole in zip(found, again, strict=True)]
        rows.append([name, spread(found, 4), spread([100 * share for share in shares[name]], 2)])
    goals = [
        goal_for(f"{name}: <= {MAX_SHARE:.0%} of feeding it again", found, MAX_SHARE.__ge__)
        for name, found in shares.items()
    ]
    print(markdown([f"a lane of {args.tokens} tokens goes on", "seconds", "% of feeding it again"], rows))
    print(f"\n{plots.verdicts(goals)}")
    return 0 if all(goal.passed for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
