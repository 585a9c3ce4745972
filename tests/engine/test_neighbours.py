"""How busy the machine is: sums and windows by injection, and one look at the real system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from superfluidd.engine.neighbours import WINDOW, Neighbours, usable_cores


class Machine:
    """A machine whose clocks a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy = 5000.0
        self.own = 10.0

    def passes(self, seconds: float, *, busy: float, own: float) -> None:
        self.now += seconds
        self.busy += busy
        self.own += own

    def neighbours(self) -> Neighbours:
        return Neighbours(lambda: self.busy, lambda: self.own, lambda: self.now)


def test_only_what_others_used_counts() -> None:
    machine = Machine()
    neighbours = machine.neighbours()
    machine.passes(2.0, busy=3.5, own=2.0)
    assert neighbours.cores() == pytest.approx(0.75)


def test_a_figure_stands_for_a_window() -> None:
    machine = Machine()
    neighbours = machine.neighbours()
    machine.passes(1.0, busy=1.0, own=0.0)
    assert neighbours.cores() == pytest.approx(1.0)
    machine.passes(WINDOW / 2, busy=0.0, own=0.0)
    assert neighbours.cores() == pytest.approx(1.0), "too soon for a new one"
    machine.passes(WINDOW / 2, busy=0.0, own=0.0)
    assert neighbours.cores() == 0.0


def test_a_burst_counts_only_if_it_goes_on() -> None:
    machine = Machine()
    neighbours = machine.neighbours()
    machine.passes(0.3, busy=0.3, own=0.0)
    assert neighbours.cores() == 0.0
    machine.passes(0.3, busy=0.27, own=0.0)
    assert neighbours.cores() == pytest.approx(0.9)
    machine.passes(0.3, busy=0.0, own=0.0)
    assert neighbours.cores() == 0.0, "and is over at once"


def test_rounding_of_the_kernels_counts_never_makes_it_negative() -> None:
    machine = Machine()
    neighbours = machine.neighbours()
    machine.passes(1.0, busy=0.99, own=1.01)
    assert neighbours.cores() == 0.0


def test_the_real_system_has_sane_figures() -> None:
    neighbours = Neighbours(clock=iter([0.0, 1.0]).__next__)
    assert 0.0 <= neighbours.cores() <= 2.0 * (os.cpu_count() or 1)


@pytest.mark.parametrize(
    "text, cores", [("max 100000", None), ("50000 100000", 1), ("150000 100000", 2), ("junk", None)]
)
def test_a_processor_quota_bounds_the_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text(text)
    everything = usable_cores(tmp_path / "nowhere")
    assert everything >= 1
    assert usable_cores(tmp_path) == (everything if cores is None else min(everything, cores))
