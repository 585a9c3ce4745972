"""Values to text for people: aligned tables, short durations, colour where a terminal wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

Colour = Literal["", "bold", "dim", "red", "green", "yellow", "cyan"]
CODES: Mapping[Colour, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

GAP = "  "


class Cell:
    """Text of a table's cell, and how to paint it."""

    def __init__(self, text: object, colour: Colour = "") -> None:
        self.text = clean(str(text))
        self.colour = colour


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """A terminal that can, and a user who has not set ``NO_COLOR``."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def paint(text: str, colour: Colour, enabled: bool) -> str:
    """The text in that colour."""
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if enabled and colour and text else text


def clean(text: str) -> str:
    """Text from clients and files, with nothing in it that a terminal would obey."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], colour: bool) -> str:
    """Rows under their headings, one line each. A heading that starts with ``>`` aligns its column right."""
    right = [column.startswith(">") for column in columns]
    cells = [[Cell(column.lstrip(">"), "dim") for column in columns], *rows]
    widths = [max(len(row[at].text) for row in cells) for at in range(len(columns))]
    lines = []
    for row in cells:
        line = ""
        for at, cell in enumerate(row):
            space = " " * (widths[at] - len(cell.text))
            last = at == len(row) - 1
            painted = paint(cell.text, cell.colour, colour)
            line += space + painted if right[at] else painted + ("" if last else space)
            line += "" if last else GAP
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def duration(seconds: float | None) -> str:
    """``340ms``, ``12.3s``, ``4m05s``, ``3h12m``, ``2d04h``; ``-`` for none."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1000:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def count(number: int) -> str:
    """``1,234``."""
    return f"{number:,}"


def share(part: int, whole: int) -> str:
    """``37/128``."""
    return f"{count(part)}/{count(whole)}"


def size(amount: int) -> str:
    """Bytes as MiB: ``99``, ``1,234``, ``0.4``."""
    mebi = amount / (1 << 20)
    return f"{mebi:,.0f}" if mebi >= 10 or not amount else f"{mebi:.1f}"


def rate(per_second: float) -> str:
    """Tokens per second: ``45.1``, ``1,234``."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def plural(number: int, noun: str) -> str:
    """``1 model``, ``2 models``."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
