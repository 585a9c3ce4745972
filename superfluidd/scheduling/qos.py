"""The class table: names, aliases, order (source: the specification, "QoS classes")."""

from __future__ import annotations

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
