"""A stand-in for the daemon's service, and records to fill it with."""

from __future__ import annotations

from typing import Any, cast

import trio

from superfluidd.control.protocol import (
    ClassView,
    Explanation,
    LaneView,
    MemoryOwner,
    MemResult,
    ModelView,
    PinBudget,
    PinsResult,
    PinView,
    PressureResult,
    QueueView,
    StatusResult,
)
from superfluidd.daemon.ended import Ended
from superfluidd.daemon.service import Service
from superfluidd.errors import UnknownRequest
from superfluidd.scheduling.qos import parse_class
from superfluidd.types import QosClass

LANE = LaneView(
    model="m",
    lane=0,
    request=7,
    origin="req-7",
    qos="agent",
    phase="decode",
    prompt=1200,
    prefilled=1230,
    generated=30,
    max_tokens=128,
    cells=1328,
    age=12.34,
    ttft=0.34,
)
WAITING = QueueView(
    model="m",
    request=8,
    origin="req-8",
    qos="background",
    position=1,
    prompt=10,
    generated=0,
    waited=65.0,
    why="a lane",
)
MODEL = ModelView(
    name="m",
    path="/models/m.gguf",
    state="ready",
    error="",
    engine="simulated 1",
    architecture="simulated",
    layout="per-sequence",
    window=2048,
    lanes=8,
    lanes_busy=2,
    queued=1,
    cells=16384,
    cells_promised=4096,
    cells_used=1230,
    ticks=9,
    tick_seconds=0.04,
    silent_seconds=0.012,
    stalled=False,
    decode_rate=45.14,
    prefill_rate=1234.5,
    threads=2,
    worker_pid=4243,
    respawns=0,
)
STATUS = StatusResult(
    version="0.1.0",
    pid=4242,
    uptime=11520.0,
    http="127.0.0.1:8453",
    socket="/run/user/1000/superfluidd/control.sock",
    draining=False,
    models=(MODEL,),
)


CLASSES = (
    ClassView(model="m", qos="interactive", cap=None, held=0, queued=0, lanes=8, paused=False),
    ClassView(model="m", qos="completion", cap=None, held=0, queued=0, lanes=8, paused=False),
    ClassView(model="m", qos="agent", cap=6, held=2, queued=1, lanes=8, paused=False),
    ClassView(model="m", qos="background", cap=2, held=0, queued=4, lanes=8, paused=True),
)
STORY = Explanation(
    model="m",
    request=7,
    origin="req-7",
    state="running",
    now="in lane 0: decoding class=agent",
    sentences=("    0.000 s  queued as agent, nobody ahead of it in its class", "    0.010 s  got lane 0"),
    trail=({"at": 1.0, "tick": 3, "kind": "queued", "qos": "agent"}, {"at": 1.01, "tick": 4, "kind": "admitted"}),
)


PRESSURE = PressureResult(
    mode="on",
    source="/proc/pressure/memory trigger",
    refused=("/sys/fs/cgroup/x/memory.pressure trigger: Permission denied",),
    level="warning",
    rung="warning",
    does="something",
    since=12.0,
    some=11.5,
    full=0.5,
    events=3,
    false_alarms=1,
)
MEMORY = MemResult(
    owners=(
        MemoryOwner("m", "weights", 90 << 20, 90 << 20),
        MemoryOwner("m", "pool", 512 << 20, 512 << 20),
        MemoryOwner("m", "host tier", 3 << 19, 1 << 30),
        MemoryOwner("m", "parked", 7 << 30, 8 << 30, disk=True),
        MemoryOwner("", "daemon", 52 << 20),
    ),
    resident=700 << 20,
    available=3000 << 20,
    total=4096 << 20,
)


PINS = PinsResult(
    pins=(
        PinView("m", (3, 7), "req-7", 1230, "pool", 5400.0),
        PinView("m", (), "", 900, "disk", None),
    ),
    budgets=(PinBudget("m", 2130, 8192),),
)


class FakeModel:
    """What is loaded and unloaded."""

    def view(self) -> ModelView:
        return MODEL


class FakeService:
    """Answers with the records above; ``idle`` decides when a drain has waited long enough."""

    def __init__(self) -> None:
        self.drained = False
        self.cancelled: list[str] = []
        self.steered: list[tuple[object, ...]] = []
        self.ended = Ended()
        self.idle = trio.Event()

    def status(self) -> StatusResult:
        return STATUS

    def lanes(self) -> tuple[LaneView, ...]:
        return (LANE,)

    def queue(self) -> tuple[QueueView, ...]:
        return (WAITING,)

    def cancel(self, ident: str) -> tuple[int, ...]:
        if ident == "bug":
            raise ZeroDivisionError
        if ident != "7":
            raise UnknownRequest(f"no request {ident}")
        self.cancelled.append(ident)
        return (7,)

    def explain(self, ident: str) -> tuple[Explanation, ...]:
        if ident != "7":
            raise UnknownRequest(f"no request {ident}")
        return (STORY,)

    def classes(self) -> tuple[ClassView, ...]:
        return CLASSES

    def set_caps(self, caps: dict[str, int | None]) -> None:
        self.steered.append(("caps", caps))

    def set_qos(self, ident: str, qos: str) -> tuple[tuple[int, ...], QosClass]:
        self.steered.append(("qos", ident, qos))
        return (7,), parse_class(qos)

    def set_class_paused(self, qos: str, paused: bool) -> None:
        self.steered.append(("paused", qos, paused))

    async def load(self, name: str, *, files: bool) -> FakeModel:
        self.steered.append(("load", name, files))
        return FakeModel()

    async def unload(self, name: str, *, now: bool) -> FakeModel:
        self.steered.append(("unload", name, now))
        return FakeModel()

    def pressure(self) -> PressureResult:
        return PRESSURE

    def memory(self) -> MemResult:
        return MEMORY

    def pins(self) -> PinsResult:
        return PINS

    def pin(self, ident: str, ttl: float | None) -> None:
        self.steered.append(("pin", ident, ttl))

    def unpin(self, ident: str) -> None:
        self.steered.append(("unpin", ident))

    def drain(self) -> None:
        self.drained = True

    async def wait_idle(self) -> None:
        await self.idle.wait()

    def as_service(self) -> Service:
        """For the type checker."""
        return cast("Service", cast("Any", self))
