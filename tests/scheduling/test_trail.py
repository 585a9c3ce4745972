"""The decision record: bounded, repetitions counted, every kind told in a sentence of its own."""

from __future__ import annotations

from typing import get_args

import pytest

from superfluidd.scheduling.trail import BEGINNING, MOST, Entry, Kind, Trail, sentences

SAID: tuple[tuple[Entry, str], ...] = (
    (Entry(1.0, 1, "queued", "agent", count=0), "queued as agent, nobody ahead of it in its class"),
    (Entry(1.0, 1, "queued", "agent", count=3, why="paused"), "queued as agent, 3 ahead of it in its class; paused"),
    (Entry(1.0, 1, "overtaken", "agent", other=7, other_qos="interactive"), "overtaken by request 7 (interactive)"),
    (
        Entry(1.0, 1, "overtaken", "agent", until=3.5, other=7, other_qos="interactive", count=4),
        "overtaken by request 7 (interactive) and others: 4 times, the last time at 2.500 s",
    ),
    (
        Entry(1.0, 1, "capped", "agent", until=2.0, count=2, why="2 of 2"),
        "passed over 2 times, the last time at 1.000 s: agent holds all the lanes that its cap allows (2 of 2)",
    ),
    (
        Entry(1.0, 1, "awaits-prefix", "agent", other=5, other_qos="agent", count=2, until=2.0),
        "waits 2 times, the last time at 1.000 s until request 5 (agent) has been fed "
        "what both their prompts begin with",
    ),
    (
        Entry(1.0, 1, "admitted", lane=1, tokens=40, why="why not"),
        "got lane 1; why not; 40 tokens of its prompt were cached",
    ),
    (
        Entry(1.0, 1, "held-back", "agent", other=5, other_qos="agent"),
        "held back while batch-invariant request 5 (agent) waits",
    ),
    (
        Entry(1.0, 1, "memory-critical", "background"),
        "passed over: memory is short, and no lanes go to background requests",
    ),
    (
        Entry(1.0, 1, "memory-critical", "interactive", tokens=2000, count=2, until=2.0),
        "passed over 2 times, the last time at 1.000 s: memory is short, and no lanes go to "
        "interactive requests of 2000 tokens",
    ),
    (
        Entry(1.0, 1, "preempted", lane=1, tokens=40, why="memory is critical"),
        "gave lane 1 up; 40 tokens of its KV are held (memory is critical)",
    ),
    (Entry(1.0, 1, "class-paused", "agent"), "passed over: an operator has paused the class agent"),
    (Entry(1.0, 1, "admitted", "agent", lane=2), "got lane 2"),
    (Entry(1.0, 1, "admitted", "agent", lane=2, why="a lane was free"), "got lane 2; a lane was free"),
    (Entry(1.0, 1, "resumed", "agent", lane=2, tokens=90), "resumed in lane 2; 90 tokens of KV were still there"),
    (Entry(1.0, 1, "resumed", "agent", lane=2), "resumed in lane 2; its KV is prefilled again"),
    (
        Entry(1.0, 1, "starved-up", "agent", other=9, other_qos="completion", why="completion"),
        "had waited long enough to count as completion, and went ahead of request 9 (completion)",
    ),
    (
        Entry(1.0, 1, "preempted", "agent", other=9, other_qos="interactive", lane=1, tokens=40),
        "gave lane 1 up for request 9 (interactive); 40 tokens of its KV are held",
    ),
    (
        Entry(1.0, 1, "preempted", "agent", other=9, other_qos="interactive", lane=1, why="the pool was short"),
        "gave lane 1 up for request 9 (interactive); 0 tokens of its KV are held (the pool was short)",
    ),
    (
        Entry(1.0, 1, "engine-lost", "agent", lane=3),
        "lost lane 3 with the engine; it keeps its tokens and is prefilled again",
    ),
    (Entry(1.0, 1, "refused-by-engine", "agent", why="full"), "sent back to the head of its queue: full"),
    (
        Entry(1.0, 1, "abandoned", "agent", tokens=512, why="something more urgent"),
        "a prefill step was given up so that something more urgent need not wait; 512 tokens again",
    ),
    (Entry(1.0, 1, "first-token", "agent", why="0.4 s"), "first token, 0.4 s after it arrived"),
    (Entry(1.0, 1, "reclassed", "completion"), "re-classed to completion by an operator"),
    (
        Entry(1.0, 1, "pinned", tokens=62),
        "pinned by an operator: what it leaves is kept, 62 tokens by now",
    ),
    (Entry(1.0, 1, "unpinned"), "unpinned by an operator"),
    (Entry(1.0, 1, "finished", "agent", why="stop"), "ended: stop"),
)


@pytest.mark.parametrize("entry, said", SAID, ids=lambda value: getattr(value, "kind", ""))
def test_every_decision_has_its_sentence(entry: Entry, said: str) -> None:
    assert sentences([entry]) == [f"    0.000 s  {said}"]


def test_no_kind_was_forgotten() -> None:
    assert {entry.kind for entry, _ in SAID} == set(get_args(Kind))


def test_times_are_counted_from_the_first_decision_and_no_trail_is_no_story() -> None:
    assert sentences([]) == []
    told = sentences([SAID[0][0], Entry(3.25, 9, "finished", why="stop")])
    assert [line[:11] for line in told] == ["    0.000 s", "    2.250 s"]


def test_what_is_repeated_is_counted_and_summed() -> None:
    trail = Trail()
    trail.add(Entry(1.0, 1, "abandoned", "agent", tokens=512))
    trail.add(Entry(2.0, 2, "abandoned", "agent", tokens=100, other=4))
    trail.add(Entry(3.0, 3, "abandoned", "background", tokens=1))
    assert list(trail) == [
        Entry(1.0, 2, "abandoned", "agent", until=2.0, count=2, tokens=612, other=4),
        Entry(3.0, 3, "abandoned", "background", tokens=1),
    ]
    trail.add(Entry(4.0, 4, "admitted", "background"))
    trail.add(Entry(5.0, 5, "admitted", "background"))
    assert len(trail) == 4


def test_a_long_story_loses_its_middle_and_says_so() -> None:
    trail = Trail()
    for number in range(MOST + 5):
        trail.add(Entry(float(number), number, "admitted", lane=number))
    assert (len(trail), trail.dropped) == (MOST, 5)
    assert [entry.lane for entry in trail] == [*range(BEGINNING), *range(BEGINNING + 5, MOST + 5)]
    told = sentences(list(trail), trail.dropped)
    assert told[BEGINNING].strip() == "(5 entries are not kept)"
    assert len(told) == MOST + 1
