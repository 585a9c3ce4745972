"""What the daemon and a worker say to each other: one closed union per direction. No sockets here.

The daemon speaks first (:class:`Load`); the worker answers :class:`Loading` any number of times, then
:class:`Hello` or :class:`Refused`. After that the daemon may send one :class:`Tick` at a time, and at any moment
:class:`Interrupt`, :class:`Tokenize` or :class:`Shutdown`. A peer that breaks these types is dropped, not guessed at.
"""

from __future__ import annotations

import msgspec

from superfluidd.engine.parking import Parked
from superfluidd.engine.port import EngineInfo
from superfluidd.scheduling.plan import Plan, TickReport
from superfluidd.types import RequestId, TokenLogprob

PROTOCOL = 5
"""Raised whenever a message changes its meaning. Both ends must agree."""


class LoadSpec(msgspec.Struct, frozen=True):
    """How to load a model.

    Attributes:
        runtime: ``llamacpp``, ``mlx``, ``basert`` or ``simulated``.
        path: the model file, or its directory for MLX; empty for the simulated runtime.
        lanes: sequences that run at once; ``spare``: sequences beside them, for KV that is kept.
        window: context of one sequence, tokens.
        layout: ``per-sequence`` or ``shared``.
        cells: cells of the shared pool; ignored per-sequence.
        threads: compute threads at most; 0 lets the worker count the machine's cores.
        micro_batch: largest prefill micro-batch.
        park: directory for this model's KV on disk; empty for none.
        dense: MLX: unpack quantized weights to floats, which is faster on a CPU.
        trust_code: MLX: run Python that the model brings along.
        library: baseRT: path of libbaseRT; empty to look for it.
        simulated_speed: divides the simulated runtime's costs; 1 is its nominal machine.
    """

    runtime: str
    path: str
    lanes: int
    window: int
    layout: str
    cells: int
    threads: int = 0
    micro_batch: int = 512
    simulated_speed: float = 1.0
    spare: int = 0
    park: str = ""
    dense: bool = False
    trust_code: bool = False
    library: str = ""


# -- daemon to worker ---------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load this model. Always the first message."""

    protocol: int
    spec: LoadSpec


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """Run one plan. The next may be sent once its report has come."""

    plan: Plan


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt", omit_defaults=True):
    """End the tick of that number at the next step; ``abandon`` gives a prefill step that is running up. A number that
    is not running is ignored."""

    tick: int
    abandon: bool = False


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Turn a text into token ids; answered by :class:`Tokenized`, never after waiting for a tick."""

    call: int
    text: str
    add_bos: bool
    parse_special: bool


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Release the model and exit 0."""


ToWorker = Load | Tick | Interrupt | Tokenize | Shutdown


# -- worker to daemon ---------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of loading, 0 to 1."""

    fraction: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The model could not be loaded; the worker exits."""

    message: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The model is loaded.

    ``pieces`` is the text of all tokens joined; token ``i`` is ``pieces[ends[i-1]:ends[i]]`` where ``ends`` is an
    array of little-endian 32-bit integers. ``parked`` is what was found on disk, longest unused first.
    """

    protocol: int
    pid: int
    info: EngineInfo
    pieces: bytes
    ends: bytes
    parked: tuple[Parked, ...] = ()


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One token a lane produced.

    Attributes:
        request: whose.
        position: its index among the request's tokens, prompt included: 0 is the prompt's first token.
        token: its id.
        end: it is an end-of-generation token that the request respects; the lane produces no more.
        logprob, top: where asked for.
    """

    request: RequestId
    position: int
    token: int
    end: bool = False
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """A step ended: the tokens it produced, and prompt tokens fed so far in this tick per lane.

    ``last``: the tick's report follows at once, so whoever receives it may plan first and deliver after.
    """

    tick: int
    tokens: tuple[TokenOut, ...]
    prefilled: tuple[tuple[RequestId, int], ...] = ()
    last: bool = False


class TickDone(msgspec.Struct, frozen=True, tag="tick_done"):
    """A tick ended."""

    report: TickReport


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    """Answer to :class:`Tokenize`; ``error`` is empty unless it failed."""

    call: int
    tokens: tuple[int, ...]
    error: str = ""


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """What was to be parked under a key is safe on disk, where it takes so many bytes; or (0) it could not be."""

    key: str
    size: int


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The worker cannot go on and exits."""

    message: str


FromWorker = Loading | Refused | Hello | StepDone | TickDone | Tokenized | Sealed | Fatal
