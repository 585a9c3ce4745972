"""The class table: names, aliases, order, who may preempt whom, and how lane caps are written (source: the
specification, "QoS classes" and "Preemption")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from superfluidd.errors import InvalidValue
from superfluidd.types import QosClass

ALIASES: dict[str, QosClass] = {
    "interactive": QosClass.INTERACTIVE,
    "interactive-chat": QosClass.INTERACTIVE,
    "0": QosClass.INTERACTIVE,
    "completion": QosClass.COMPLETION,
    "inline-completion": QosClass.COMPLETION,
    "1": QosClass.COMPLETION,
    "agent": QosClass.AGENT,
    "foreground": QosClass.AGENT,
    "foreground-agent": QosClass.AGENT,
    "2": QosClass.AGENT,
    "background": QosClass.BACKGROUND,
    "background-agent": QosClass.BACKGROUND,
    "3": QosClass.BACKGROUND,
}
"""Every accepted spelling, after trimming, lower-casing and turning underscores into hyphens."""

DEFAULT = QosClass.AGENT
"""Class of a request that names none."""

URGENT = QosClass.COMPLETION
"""Classes up to this one end a running tick when they arrive, and may preempt."""

NO_CAP = "off"
"""How a cap is taken away again."""


def parse_class(text: str, param: str | None = None) -> QosClass:
    """The class a text names.

    Raises:
        InvalidValue: it names none; the message lists the legal names, ``param`` says where it came from.
    """
    found = ALIASES.get(text.strip().lower().replace("_", "-"))
    if found is None:
        legal = ", ".join(member.label for member in QosClass)
        raise InvalidValue(f"{text!r} is not a QoS class; legal: {legal}", param=param)
    return found


def parse_caps(words: Iterable[str], lanes: int, param: str | None = None) -> dict[QosClass, int | None]:
    """Lane caps written as ``background=2``, one word a class; ``off`` takes a cap away.

    Args:
        words: the assignments.
        lanes: lanes there are.
        param: where they came from, for the error.

    Raises:
        InvalidValue: a word is no assignment, names no class or one twice, or a cap is not 1 to ``lanes``.
    """
    caps: dict[QosClass, int | None] = {}
    for word in words:
        name, equals, number = word.partition("=")
        if not equals:
            raise InvalidValue(f"{word!r} is not CLASS=LANES, such as background=2", param=param)
        qos, number = parse_class(name, param), number.strip().lower()
        if qos in caps:
            raise InvalidValue(f"{qos.label} is capped twice; name each class once", param=param)
        if number == NO_CAP:
            caps[qos] = None
            continue
        if not (number.isdecimal() and number.isascii()) or not 1 <= int(number[:9]) <= lanes:
            raise InvalidValue(
                f"{word!r}: the lanes of a class are a whole number from 1 to {lanes} (the lanes there are), "
                f"or {NO_CAP}",
                param=param,
            )
        caps[qos] = int(number)
    return caps


def may_preempt(newcomer: QosClass, running: QosClass, *, agents: bool) -> bool:
    """Whether a waiting request may take the lane of a running one.

    Args:
        newcomer: class of the one that waits.
        running: class of the one that runs.
        agents: an agent may take a background request's lane.
    """
    if running <= newcomer:
        return False
    return newcomer <= URGENT or (agents and newcomer is QosClass.AGENT)


def format_caps(caps: Mapping[QosClass, int]) -> str:
    """Caps as they are written."""
    return ",".join(f"{qos.label}={lanes}" for qos, lanes in sorted(caps.items()))
