"""Levels from readings, rungs from levels in time: literals in, values out."""

from __future__ import annotations

import pytest

from superfluidd.scheduling.pressure import Gauge, Ladder, Level, Reading, Rung, measured
from superfluidd.types import QosClass

NORMAL, WARNING, CRITICAL, UNKNOWN = Level.NORMAL, Level.WARNING, Level.CRITICAL, Level.UNKNOWN


@pytest.mark.parametrize(
    ("reading", "level"),
    [
        (Reading(0.0, kernel=1), NORMAL),
        (Reading(0.0, kernel=2), WARNING),
        (Reading(0.0, kernel=4), CRITICAL),
        (Reading(0.0, kernel=3), UNKNOWN),
        (Reading(0.0, kernel=0), UNKNOWN),
        (Reading(0.0, kernel=-1), UNKNOWN),
        (Reading(0.0, some=9.99, full=4.99), NORMAL),
        (Reading(0.0, some=10.0, full=0.0), WARNING),
        (Reading(0.0, some=0.0, full=5.0), CRITICAL),
        (Reading(0.0, some=50.0), WARNING),
        (Reading(0.0, full=4.0), NORMAL),
        (Reading(0.0, some=0.0, available=0.01), NORMAL),
        (Reading(0.0, available=0.11), NORMAL),
        (Reading(0.0, available=0.10), WARNING),
        (Reading(0.0, available=0.05), CRITICAL),
        (Reading(0.0), UNKNOWN),
    ],
)
def test_what_figures_say(reading: Reading, level: Level) -> None:
    assert measured(reading) is level


def test_nothing_heard_is_unknown_and_so_is_what_was_heard_too_long_ago() -> None:
    gauge = Gauge()
    assert gauge.level(0.0) is UNKNOWN
    gauge.take(Reading(1.0, some=0.0))
    assert gauge.level(6.0) is NORMAL
    assert gauge.level(6.1) is UNKNOWN
    gauge.take(Reading(10.0, some=90.0, full=90.0))
    assert gauge.level(15.0) is CRITICAL
    assert gauge.level(15.1) is UNKNOWN, "a frozen sensor says neither"


def test_an_event_is_a_warning_and_several_that_nothing_helped_against_are_critical() -> None:
    gauge = Gauge()
    gauge.take(Reading(0.0, event=True))
    assert gauge.level(0.0) is WARNING
    gauge.take(Reading(2.0, event=True))
    assert gauge.level(2.0) is WARNING
    gauge.take(Reading(4.0, event=True))
    assert gauge.level(4.0) is CRITICAL
    assert gauge.level(10.0) is CRITICAL
    assert gauge.level(10.1) is WARNING, "the first is no news any more"
    assert gauge.level(14.0) is WARNING
    assert gauge.level(14.1) is UNKNOWN
    assert gauge.latest is None


def test_events_and_figures_go_together() -> None:
    gauge = Gauge()
    gauge.take(Reading(0.0, some=0.0, full=0.0))
    gauge.take(Reading(1.0, event=True))
    assert gauge.level(1.0) is WARNING, "the event outranks an average that is still rising"
    gauge.take(Reading(2.0, some=40.0, full=20.0, event=True))
    assert gauge.level(2.0) is CRITICAL
    gauge.take(Reading(12.5, some=1.0, full=0.0))
    assert gauge.level(12.5) is NORMAL


def test_a_rung_rises_at_once_and_falls_after_the_hold() -> None:
    ladder = Ladder(hold=30.0)
    assert ladder.feed(NORMAL, 0.0) is Rung.NORMAL
    assert ladder.feed(WARNING, 1.0) is Rung.WARNING
    assert ladder.feed(CRITICAL, 2.0) is Rung.CRITICAL
    assert ladder.since == 2.0
    assert ladder.feed(NORMAL, 3.0) is Rung.CRITICAL
    assert ladder.feed(NORMAL, 32.9) is Rung.CRITICAL
    assert ladder.feed(NORMAL, 33.0) is Rung.NORMAL
    assert ladder.since == 33.0


def test_a_relapse_starts_the_hold_again() -> None:
    ladder = Ladder(hold=30.0)
    ladder.feed(WARNING, 0.0)
    ladder.feed(NORMAL, 1.0)
    ladder.feed(WARNING, 30.0)
    assert ladder.feed(NORMAL, 31.0) is Rung.WARNING
    assert ladder.feed(NORMAL, 60.9) is Rung.WARNING
    assert ladder.feed(NORMAL, 61.0) is Rung.NORMAL


def test_it_falls_only_as_far_as_the_hold_has_seen() -> None:
    ladder = Ladder(hold=30.0)
    ladder.feed(CRITICAL, 0.0)
    ladder.feed(NORMAL, 1.0)
    ladder.feed(WARNING, 20.0)
    assert ladder.feed(NORMAL, 31.0) is Rung.WARNING
    assert ladder.feed(NORMAL, 60.0) is Rung.WARNING
    assert ladder.feed(NORMAL, 90.0) is Rung.NORMAL


@pytest.mark.parametrize("high", [WARNING, CRITICAL])
@pytest.mark.parametrize("low", [NORMAL, WARNING, UNKNOWN])
def test_a_square_wave_changes_the_rung_at_most_once_a_hold(high: Level, low: Level) -> None:
    hold = 30.0
    ladder = Ladder(hold=hold, step=1e9)
    changes = []
    before = ladder.rung
    for tick in range(6000):
        now = tick / 10
        rung = ladder.feed(high if now % 5 < 2.5 else low, now)
        if rung is not before:
            changes.append(now)
            before = rung
    assert len(changes) == 1, "up at once, and then never down"


def test_critical_pressure_that_lasts_closes_class_after_class_and_a_tiny_chat_is_always_served() -> None:
    ladder = Ladder(hold=30.0, step=15.0)
    seen = [ladder.feed(CRITICAL, now) for now in (0.0, 14.9, 15.0, 30.0, 45.0, 1000.0)]
    assert seen == [
        Rung.CRITICAL,
        Rung.CRITICAL,
        Rung.NO_AGENTS,
        Rung.NO_COMPLETIONS,
        Rung.TINY_CHATS,
        Rung.TINY_CHATS,
    ]
    admitted = {rung: [qos.label for qos in QosClass if rung.admits(qos, 5000)] for rung in Rung}
    everybody = ["interactive", "completion", "agent", "background"]
    assert admitted == {
        Rung.NORMAL: everybody,
        Rung.WARNING: everybody,
        Rung.CRITICAL: everybody[:3],
        Rung.NO_AGENTS: everybody[:2],
        Rung.NO_COMPLETIONS: everybody[:1],
        Rung.TINY_CHATS: [],
    }
    assert Rung.TINY_CHATS.admits(QosClass.INTERACTIVE, 1024)
    assert not Rung.TINY_CHATS.admits(QosClass.INTERACTIVE, 1025)


def test_the_steps_begin_anew_after_a_moment_without_critical_pressure() -> None:
    ladder = Ladder(hold=30.0, step=15.0)
    ladder.feed(CRITICAL, 0.0)
    ladder.feed(WARNING, 14.0)
    assert ladder.feed(CRITICAL, 16.0) is Rung.CRITICAL
    assert ladder.feed(CRITICAL, 31.0) is Rung.NO_AGENTS


def test_critical_pressure_after_a_moments_relief_does_not_count_as_lower() -> None:
    ladder = Ladder(hold=10.0, step=15.0)
    ladder.feed(CRITICAL, 0.0)
    assert ladder.feed(CRITICAL, 30.0) is Rung.NO_COMPLETIONS
    ladder.feed(WARNING, 31.0)
    ladder.feed(CRITICAL, 32.0)
    assert ladder.feed(CRITICAL, 41.0) is Rung.CRITICAL, "to what was the worst since, not to normal"


def test_unknown_neither_rises_nor_is_it_normal() -> None:
    ladder = Ladder(hold=30.0)
    for now in range(100):
        assert ladder.feed(UNKNOWN, float(now)) is Rung.NORMAL
    ladder.feed(CRITICAL, 100.0)
    assert ladder.feed(UNKNOWN, 101.0) is Rung.CRITICAL
    assert ladder.feed(UNKNOWN, 131.0) is Rung.WARNING, "nothing says that it still is critical"
    for now in range(132, 300):
        assert ladder.feed(UNKNOWN, float(now)) is Rung.WARNING, "nor that all is well"
    ladder.feed(NORMAL, 300.0)
    assert ladder.feed(NORMAL, 330.0) is Rung.NORMAL
