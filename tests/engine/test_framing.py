"""Frames over a byte stream that is cut anywhere, and every message there is."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluidd.engine import wire
from superfluidd.engine.framing import MAX_FRAME, BadFrame, FrameDecoder, FrameEncoder
from superfluidd.engine.parking import Parked
from superfluidd.engine.port import EngineInfo
from superfluidd.scheduling.plan import (
    Admit,
    Copy,
    Cut,
    Decode,
    Discard,
    Export,
    Forget,
    Free,
    Import,
    LaneFault,
    Park,
    Plan,
    Prefill,
    Recall,
    TickReport,
    Timing,
)
from superfluidd.types import SamplingParams, TokenLogprob

SAMPLING = SamplingParams(
    temperature=0.7, top_k=0, top_p=0.9, min_p=0.05, seed=(1 << 64) - 1, repeat_penalty=1.1, presence_penalty=-0.5,
    frequency_penalty=0.25, logit_bias=((5, -100.0), (6, 1.5)), logprobs=3, ignore_eos=True,
)  # fmt: skip
PARKING = (Park("ab", b"\0\xff", sequence=1), Park("cd", b"", blob=9), Recall("ab", 2, 3), Forget("cd"))
PLAN = Plan(
    tick=7,
    retire=(1, 2),
    kv=(Free(0), Cut(1, 5), Copy(1, 0, 5), Export(1, 9), Import(9, 2, 3), Discard(9), *PARKING),
    admit=(Admit(3, 0, (1, 2, 3), 2, SAMPLING, cached=0), Admit(4, 1, (9,), 1, SamplingParams())),
    prefill=(Prefill(3, 3), Prefill(4, 1)),
    decode=(Decode(3, 8), Decode(4, 4)),
    step_tokens=128,
)
REPORT = TickReport(
    tick=7,
    outcome="stopped",
    prefilled=((3, 3), (4, 1)),
    decoded=((3, 9),),
    faults=(LaneFault(4, "it broke"),),
    cells_used=12,
    timing=Timing(8, 9, 0.5, 4, 0.25, 2),
    reason="",
    emptied=(2,),
    exported=((9, 40),),
)
INFO = EngineInfo(
    runtime="simulated", version="1", architecture="none", description="for a test", layout="shared", cells=10,
    lanes=2, sequences=4, window=5, trained_context=5, bytes_per_cell=1, weights_bytes=1 << 40, cut="window",
    round_granular=False, abandons=True, packs_prefill_with_decode=True, max_step=4, threads=3, vocabulary=100,
    add_bos=True, bos=-1, eos=2, end_tokens=(2, 3), fim=(4, 5, 6), chat_template="{{ 日本 }}", bos_text="<s>",
    eos_text="</s>",
)  # fmt: skip
TO_WORKER: list[wire.ToWorker] = [
    wire.Load(
        wire.PROTOCOL,
        wire.LoadSpec("llamacpp", "/models/é.gguf", 4, 256, "shared", 512, 2, 128, 2.0, 1, park="/parked"),
    ),
    wire.Tick(PLAN),
    wire.Interrupt(7),
    wire.Interrupt(7, abandon=True),
    wire.Tokenize(1, "text \0 😀", True, False),
    wire.Shutdown(),
]
FROM_WORKER: list[wire.FromWorker] = [
    wire.Loading(0.5),
    wire.Refused("because"),
    wire.Hello(wire.PROTOCOL, 123, INFO, b"\xffab", b"\x01\0\0\0\x03\0\0\0", (Parked("ab", b"\0\xff", 9),)),
    wire.StepDone(
        7,
        (
            wire.TokenOut(3, 3, 42, True, -0.25, (TokenLogprob(42, -0.25), TokenLogprob(1, -3.0))),
            wire.TokenOut(4, 1, 2),
        ),
        ((3, 3),),
        last=True,
    ),
    wire.TickDone(REPORT),
    wire.Tokenized(1, (1, 2, 3), ""),
    wire.Sealed("ab", 1 << 40),
    wire.Fatal("no more"),
]


def to_worker(limit: int = MAX_FRAME) -> FrameDecoder[wire.ToWorker]:
    return FrameDecoder(msgspec.msgpack.Decoder(wire.ToWorker), limit)


def from_worker() -> FrameDecoder[wire.FromWorker]:
    return FrameDecoder(msgspec.msgpack.Decoder(wire.FromWorker))


def stream(messages: Sequence[msgspec.Struct]) -> bytes:
    encoder = FrameEncoder()
    return b"".join(map(encoder.encode, messages))


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def test_every_message_of_both_unions_is_tried_here() -> None:
    assert {type(message) for message in TO_WORKER} == set(typing.get_args(wire.ToWorker))
    assert {type(message) for message in FROM_WORKER} == set(typing.get_args(wire.FromWorker))


@given(cuts=st.lists(st.integers(0, 1 << 16), max_size=12))
def test_messages_survive_any_chunking(cuts: list[int]) -> None:
    for decoder, messages in ((to_worker(), TO_WORKER), (from_worker(), FROM_WORKER)):
        data = stream(messages)
        places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        came: list[object] = []
        for start, end in pairwise(places):
            came += decoder.feed(data[start:end])
        assert came == messages


def test_messages_survive_byte_by_byte_and_come_as_soon_as_they_are_whole() -> None:
    decoder = from_worker()
    data = stream(FROM_WORKER)
    ends = [len(stream(FROM_WORKER[:count])) for count in range(1, len(FROM_WORKER) + 1)]
    came: list[wire.FromWorker] = []
    for at in range(len(data)):
        came += decoder.feed(data[at : at + 1])
        assert len(came) == sum(end <= at + 1 for end in ends)
    assert came == FROM_WORKER
    assert decoder.feed(b"") == []


def test_a_truncated_frame_yields_nothing() -> None:
    assert from_worker().feed(stream([FROM_WORKER[2]])[:-1]) == []
    assert from_worker().feed(b"\0\0\0") == []


def test_a_frame_over_the_limit_is_refused_by_its_length_alone() -> None:
    payload = msgspec.msgpack.encode(wire.Interrupt(1))
    assert to_worker(len(payload)).feed(frame(payload)) == [wire.Interrupt(1)]
    with pytest.raises(BadFrame, match=f"a frame of {len(payload)} bytes is longer than the limit"):
        to_worker(len(payload) - 1).feed(frame(payload))
    with pytest.raises(BadFrame, match="4294967295 bytes"):
        to_worker().feed(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"{}",
        b"\xc0",
        b"\x80",
        b"\x91" * 20000,
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": "interrupt"}),
        msgspec.msgpack.encode({"type": "interrupt", "tick": "7"}),
        msgspec.msgpack.encode({"type": "interrupt", "tick": 7}) + b"\0",
        msgspec.msgpack.encode({"type": "interrupt", "tick": 7})[:-1],
        b"\x82\xa4type\xa8tokenize\xa4text\xa2\xff\xfe",
    ],
)
def test_what_is_no_message_is_a_bad_frame(payload: bytes) -> None:
    with pytest.raises(BadFrame, match=f"undecodable frame of {len(payload)} bytes"):
        to_worker().feed(frame(payload))


def test_the_other_directions_messages_are_bad_frames() -> None:
    for message in FROM_WORKER:
        with pytest.raises(BadFrame):
            to_worker().feed(stream([message]))
    for request in TO_WORKER:
        with pytest.raises(BadFrame):
            from_worker().feed(stream([request]))


@given(noise=st.binary(max_size=64), at=st.integers(0, 1 << 16))
def test_noise_is_messages_or_a_bad_frame_and_nothing_else(noise: bytes, at: int) -> None:
    data = bytearray(stream(FROM_WORKER))
    at %= len(data)
    data[at : at + len(noise)] = noise
    try:
        came = from_worker().feed(bytes(data))
    except BadFrame:
        return
    assert all(isinstance(message, msgspec.Struct) for message in came)


def test_fields_a_newer_peer_adds_are_ignored_but_missing_ones_are_not() -> None:
    payload = msgspec.msgpack.encode({"type": "interrupt", "tick": 7, "new": 1})
    assert to_worker().feed(frame(payload)) == [wire.Interrupt(7)]
    assert len(stream([wire.Interrupt(7)])) < 32
