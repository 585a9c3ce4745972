"""Values to text."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import msgspec
import pytest
from sfctl import render
from sfctl.render import Cell
from sfctl.verbs import lifecycle, memory, overview, pins

from superfluidd.control.protocol import DrainResult, ModelView
from tests.control.fakes import MEMORY, MODEL, PINS, PRESSURE, STATUS


@pytest.mark.parametrize(
    "seconds, text",
    [
        (None, "-"),
        (-0.001, "0ms"),
        (0.0, "0ms"),
        (0.3404, "340ms"),
        (0.9996, "1.0s"),
        (12.34, "12.3s"),
        (59.96, "1m00s"),
        (245.0, "4m05s"),
        (3599.6, "1h00m"),
        (11520.0, "3h12m"),
        (86399.9, "1d00h"),
        (2 * 86400 + 4 * 3600, "2d04h"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert render.duration(seconds) == text


def test_numbers() -> None:
    assert render.count(1234567) == "1,234,567"
    assert render.share(37, 1280) == "37/1,280"
    assert [render.rate(value) for value in (0.0, 45.14, 99.96, 1234.5)] == ["0.0", "45.1", "100.0", "1,234"]
    assert [render.plural(count, "model") for count in (0, 1, 2)] == ["0 models", "1 model", "2 models"]


def test_a_table_is_aligned_and_has_no_loose_ends() -> None:
    rows = [[Cell("a"), Cell(1), Cell("x")], [Cell("longer"), Cell(1000), Cell("")]]
    assert render.table(("NAME", ">N", "WHY"), rows, colour=False) == (
        "NAME       N  WHY\na          1  x\nlonger  1000\n"
    )


def test_an_empty_table_keeps_its_headings() -> None:
    assert render.table(("NAME", ">N"), [], colour=False) == "NAME  N\n"


def test_colour_changes_no_width() -> None:
    rows = [[Cell("a", "red"), Cell(1, "bold")], [Cell("longer"), Cell(1000)]]
    plain = render.table(("NAME", ">N"), rows, colour=False)
    painted = render.table(("NAME", ">N"), rows, colour=True)
    assert "\x1b[31ma\x1b[0m" in painted
    for code in render.CODES.values():
        painted = painted.replace(f"\x1b[{code}m", "")
    assert painted.replace("\x1b[0m", "") == plain


def test_nothing_from_outside_reaches_the_terminal_as_a_command() -> None:
    evil = "\x1b[2J\nid\x9b"
    assert Cell(evil).text == "\\x1b[2J\\x0aid\\x9b"
    text = overview.report(msgspec.structs.replace(STATUS, models=(model(name=evil, error=evil, stalled=True),)), False)
    assert "\x1b" not in text
    assert "\x9b" not in text


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "stream, environ, wanted",
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colour_is_for_terminals(stream: io.StringIO, environ: dict[str, str], wanted: bool) -> None:
    assert render.wants_colour(stream, environ) is wanted


def model(**changes: object) -> ModelView:
    return msgspec.structs.replace(MODEL, **changes)


def test_status() -> None:
    assert overview.report(STATUS, colour=False).splitlines() == [
        "superfluidd 0.1.0, pid 4242, up 3h12m, serving",
        "http    http://127.0.0.1:8453",
        "socket  /run/user/1000/superfluidd/control.sock",
        "",
        "MODEL  STATE  LANES  QUEUE       KV USED      PROMISED  WINDOW  DECODE/S  PREFILL/S  LAST STEP  THREADS"
        "  WORKER  RESPAWNS",
        "m      ready    2/8      1  1,230/16,384  4,096/16,384   2,048      45.1      1,234       12ms        2"
        "    4243         0",
    ]


def test_a_stalled_engine_cannot_be_overlooked() -> None:
    stalled = model(stalled=True, silent_seconds=34.2, tick_seconds=40.0)
    lines = overview.report(msgspec.structs.replace(STATUS, models=(stalled,)), colour=False).splitlines()
    assert lines[5].split()[:2] == ["m", "stalled"]
    assert lines[-1].startswith("m is stalled: worker 4243 has been silent for 34.2s, in a tick of 40.0s; `ps ")
    painted = overview.report(msgspec.structs.replace(STATUS, models=(stalled,)), colour=True)
    assert "\x1b[31mstalled\x1b[0m" in painted


def test_a_failed_model_says_why_and_a_draining_daemon_that_it_drains() -> None:
    failed = model(state="failed", error="its worker died three times", respawns=3)
    text = overview.report(msgspec.structs.replace(STATUS, models=(failed,), draining=True), colour=False)
    assert text.endswith("\nm is failed: its worker died three times\n")
    assert "draining, takes no new requests" in text.splitlines()[0]


@pytest.mark.parametrize(
    "running, queued, text",
    [
        (0, 0, "drained: nothing is running or queued\n"),
        (1, 0, "draining: 1 request running, 0 queued\n"),
        (2, 3, "draining: 2 requests running, 3 queued\n"),
    ],
)
def test_drain(running: int, queued: int, text: str) -> None:
    assert lifecycle.report(DrainResult(running, queued)) == text


def test_memory_has_an_owner_for_every_mebibyte_and_disk_is_none() -> None:
    assert memory.memory_report(MEMORY, colour=False).splitlines() == [
        "MODEL  OWNER            MIB  AT MOST",
        "m      weights           90       90",
        "m      pool             512      512",
        "m      host tier        1.5    1,024",
        "m      parked (disk)  7,168    8,192",
        "-      daemon            52        -",
        "       sum              656",
        "",
        "resident   700 MiB by the operating system's count",
        "available  3,000 of 4,096 MiB",
    ]


def test_pressure() -> None:
    assert memory.pressure_report(PRESSURE, colour=False).splitlines() == [
        "watch    on: /proc/pressure/memory trigger",
        "         not /sys/fs/cgroup/x/memory.pressure trigger: Permission denied",
        "level    warning",
        "figures  some 11.5 %, full 0.5 % of 10 s",
        "rung     warning, for 12.0s",
        "does     something",
        "events   3, and 1 false alarm",
    ]
    dry = msgspec.structs.replace(PRESSURE, mode="dry-run", some=None, full=None, kernel=2, available=0.07)
    lines = memory.pressure_report(dry, colour=False).splitlines()
    assert lines[3] == "figures  7% of memory available, kernel level 2"
    assert lines[5] == "does     something, but for the dry run"
    nothing = msgspec.structs.replace(PRESSURE, some=None, full=None)
    assert "figures  none" in memory.pressure_report(nothing, colour=False)


@pytest.mark.parametrize(
    "cut, words",
    [
        ("anywhere", "any beginning of a prompt, forks included"),
        ("window", "whole prefixes only: the model keeps a sliding window"),
        ("head", "whole prefixes only: the model's state is recurrent"),
        ("", "-"),
    ],
)
def test_models_say_what_prefixes_they_can_use(cut: str, words: str) -> None:
    cells = memory.model_row(model(cut=cut, prefixes=3, prefix_hits=7, cached_tokens=12_345))
    assert [cell.text for cell in cells[8:12]] == ["3", "7", "12,345", words]


@pytest.mark.parametrize(
    ("granular", "abandons", "words"),
    [(True, True, "in a step"), (True, False, "after a step"), (False, False, "after a tick")],
)
def test_models_say_where_their_engine_stops(granular: bool, abandons: bool, words: str) -> None:
    cells = memory.model_row(model(device="cpu", granular=granular, abandons=abandons))
    assert (cells[3].text, cells[12].text) == ("cpu", words)
    assert memory.model_row(model(engine=""))[12].text == "-", "not loaded"


def test_pins() -> None:
    assert pins.report(PINS, colour=False).splitlines() == [
        "MODEL  ID  TOKENS  WHERE  EXPIRES IN  REQUEST-ID",
        "m       7   1,230  pool        1h30m  req-7",
        "m       -     900  disk        never",
        "",
        "m: 2,130/8,192 tokens are pinned",
    ]


@pytest.mark.parametrize("text, seconds", [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)])
def test_a_time(text: str, seconds: float) -> None:
    assert pins.parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0.0h", "-1s", "1w", "1h30m", "inf", "1e3", "\u0661", "s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give one such as 90s, 10m, 2h or 1d"):
        pins.parse_time(text)


@pytest.mark.parametrize("text", ["m", "org:model", "m.bin"])
def test_a_name_stays_a_name(text: str) -> None:
    assert lifecycle.named(text) == text


@pytest.mark.parametrize("text", ["m.gguf", "./m", "/m.gguf", "org/model"])
def test_a_path_is_made_absolute_for_a_daemon_that_runs_elsewhere(text: str) -> None:
    assert lifecycle.named(text) == str(Path.cwd() / text)
