"""The benchmarks' own arithmetic: what counts as a token, what voids a measurement, and how tables are made of records.

No server runs here and nothing is timed.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import msgspec
import pytest

from tests.bench import machine, report, soak, streaming
from tests.bench.harness import OURS, PEER, Cell

EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"Par"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"text":"is","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b"data: [DONE]\n\n",
)


def chunked(events: tuple[bytes, ...]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


def test_only_events_with_text_are_stamped() -> None:
    head, *rest = chunked(EVENTS).partition(b"\r\n\r\n")
    pieces = [head + rest[0]] + [b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS] + [b"0\r\n\r\n"]
    reply = streaming.read_reply(10.0, [(11.0 + index, piece) for index, piece in enumerate(pieces)])
    assert reply.error is None
    assert reply.text == "Paris"
    assert reply.stamps == [13.0, 14.0]
    assert reply.finished == 15.0
    assert reply.ttft == 3.0
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (9, 2, 4)
    assert reply.finish_reason == "length"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_a_reply_reads_the_same_however_it_was_cut(size: int) -> None:
    data = chunked(EVENTS)
    arrived = [(float(start), data[start : start + size]) for start in range(0, len(data), size)]
    reply = streaming.read_reply(0.0, arrived)
    assert (reply.text, reply.error, reply.completion_tokens) == ("Paris", None, 2)
    assert reply.stamps == sorted(reply.stamps)
    assert len(reply.stamps) == 2


def test_an_answer_without_chunks_is_read_too() -> None:
    data = b"HTTP/1.0 200 OK\r\n\r\n" + b"".join(EVENTS)
    assert streaming.read_reply(0.0, [(1.0, data)]).text == "Paris"


def test_a_stream_that_stops_early_is_no_reply() -> None:
    reply = streaming.read_reply(0.0, [(1.0, chunked(EVENTS[:3]))])
    assert reply.error == "the stream ended before the reply did"
    assert reply.text == "Paris"


def test_refusals_and_errors_in_the_stream_are_told() -> None:
    refused = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 17\r\n\r\n{"error":"words"}'
    assert streaming.read_reply(0.0, [(1.0, refused)]).error == 'status 400: {"error":"words"}'
    broken = chunked((b'data: {"error":{"message":"gone"}}\n\n',))
    assert "gone" in str(streaming.read_reply(0.0, [(1.0, broken)]).error)


def test_the_client_keeps_to_its_number_of_connections() -> None:
    open_now, most = 0, 0
    lock = threading.Lock()

    def serve(listener: socket.socket, count: int) -> None:
        nonlocal open_now, most
        answered = []

        def answer(connection: socket.socket) -> None:
            nonlocal open_now
            with connection:
                connection.recv(65536)
                with lock:
                    open_now -= 1
                connection.sendall(chunked(EVENTS))

        for _ in range(count):
            connection, _ = listener.accept()
            with lock:
                open_now += 1
                most = max(most, open_now)
            thread = threading.Thread(target=answer, args=(connection,))
            thread.start()
            answered.append(thread)
        for thread in answered:
            thread.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener, 7))
        server.start()
        replies = streaming.run(listener.getsockname()[1], "/", [{"n": index} for index in range(7)], at_once=2)
        server.join()
    assert [reply.text for reply in replies] == ["Paris"] * 7
    assert [reply.error for reply in replies] == [None] * 7
    assert 1 <= most <= 2


def test_foreign_cores_are_what_no_group_used() -> None:
    assert machine.foreign_cores(15.0, {"client": 1.0, "worker": 12.0}, 10.0) == pytest.approx(0.2)
    assert machine.foreign_cores(9.99, {"worker": 10.0}, 10.0) == 0.0
    assert machine.Window(10.0, {}, 0.12).void
    assert not machine.Window(10.0, {}, 0.11).void


def cell(
    system: str, name: str, number: int, *, void: bool = False, texts: tuple[str, ...] = (), **figures: float
) -> Cell:
    ours = system == OURS
    return Cell(
        name=name,
        system=system,
        round=number,
        attempts=1,
        void=void,
        window=machine.Window(10.0, {"daemon": 0.5, "worker": 19.0} if ours else {"server": 19.0}, 0.0),
        values=figures,
        rss={"daemon": 80_000_000, "worker": 500_000_000} if ours else {"server": 450_000_000},
        texts=list(texts),
        argv=(system,),
        versions={},
        machine={},
        at="2030-01-01T00:00:00+00:00",
    )


def test_ratios_compare_rounds_that_are_clean_on_both_sides() -> None:
    cells = [
        cell(OURS, "greedy-1", 1, tokens_per_s=110.0, tokens=500.0),
        cell(PEER, "greedy-1", 1, tokens_per_s=100.0, tokens=500.0),
        cell(OURS, "greedy-1", 2, tokens_per_s=90.0, tokens=500.0),
        cell(PEER, "greedy-1", 2, tokens_per_s=100.0, tokens=500.0),
        cell(OURS, "greedy-1", 3, tokens_per_s=1.0, tokens=500.0, void=True),
        cell(PEER, "greedy-1", 3, tokens_per_s=100.0, tokens=500.0),
    ]
    ours = report.values(cells, OURS, "greedy-1", "tokens_per_s")
    peer = report.values(cells, PEER, "greedy-1", "tokens_per_s")
    assert report.ratios(ours, peer) == pytest.approx([1.1, 0.9])
    assert report.cpu_per_1k(cells, OURS, "greedy-1") == pytest.approx(39.0)
    text = report.tables(cells)
    assert "1.00 (0.90-1.10)" in text
    assert "Void cells: superfluidd greedy-1 round 3." in text


def test_a_shorter_wait_is_a_better_ratio() -> None:
    assert report.ratios({1: 0.1}, {1: 0.2}, lower_is_better=True) == pytest.approx([2.0])
    assert report.ratios({1: 0.1, 2: 5.0}, {1: 0.2}) == pytest.approx([0.5])


def test_daemon_share_is_of_one_core() -> None:
    text = report.daemon_table([cell(OURS, "greedy-8", 1, tokens_per_s=1.0)])
    assert "| daemon while 8 streams decode, % of a core | 5 (5-5)" in text
    assert "| daemon resident, MB" in text


def test_equal_texts_are_counted_per_round() -> None:
    cells = [
        cell(OURS, "greedy-2", 1, texts=("a", "b")),
        cell(PEER, "greedy-2", 1, texts=("a", "c")),
        cell(OURS, "greedy-2", 2, texts=("a", "b")),
    ]
    assert report.same_texts(cells) == (1, 2)


def test_records_survive_the_disk(tmp_path: Path) -> None:
    made = cell(OURS, "greedy-1", 1, tokens_per_s=2.5)
    (tmp_path / "one.json").write_bytes(msgspec.json.encode(made))
    assert report.read(tmp_path) == [made]


def sample(chats: int, speed: float, daemon: int, foreign: float = 0.0) -> soak.Sample:
    return soak.Sample(chats, speed, foreign, {"daemon": daemon, "worker": 1000})


def test_soak_judges_speed_by_clean_windows_and_memory_by_all() -> None:
    good = soak.judge([sample(50, 100.0, 1000), sample(100, 99.0, 1010), sample(150, 10.0, 1010, foreign=0.5)])
    assert good.speed == pytest.approx(0.99)
    assert good.growth == pytest.approx({"daemon": 0.01, "worker": 0.0})
    assert good.passed
    assert not soak.judge([sample(50, 100.0, 1000), sample(100, 94.0, 1000)]).passed
    assert not soak.judge([sample(50, 100.0, 1000), sample(100, 100.0, 1100)]).passed
    with pytest.raises(ValueError):
        soak.judge([sample(50, 100.0, 1000), sample(100, 100.0, 1000, foreign=0.5)])
