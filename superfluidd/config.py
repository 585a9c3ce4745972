"""Settings: one table of options, and the frozen record they end up in. The only home of defaults.

Flags beat ``SUPERFLUIDD_*`` environment variables, which beat ``superfluidd.toml``, which beats the defaults here.
A wrong value anywhere is a :class:`~superfluidd.errors.UsageError` that names where it came from and what is legal.

The table also writes ``--help`` and is what the man-page test compares the pages with.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from superfluidd.errors import InvalidValue, UsageError
from superfluidd.scheduling.policy import Policy
from superfluidd.scheduling.qos import format_caps, parse_caps, parse_class
from superfluidd.types import QosClass

Kind = Literal[
    "text", "int", "float", "choice", "auto-int", "auto-float", "address", "switch", "class", "caps", "budget"
]
Value = str | int | float | bool | None


class Option(msgspec.Struct, frozen=True):
    """One setting of ``superfluidd serve``.

    Attributes:
        name: attribute of :class:`Settings`; flag, environment variable and toml key derive from it.
        kind: how text becomes a value; ``auto-int`` and ``auto-float`` accept the word ``auto`` for None,
            ``budget`` a 0 below its minimum; a ``switch`` takes no value on the command line.
        default: used when nothing else names one.
        help: one sentence.
        metavar: what ``--help`` calls the value.
        choices: legal words, for ``choice``.
        minimum, maximum: legal range, for numbers.
        checks: the option also means something to ``superfluidd check``.
    """

    name: str
    kind: Kind
    default: Value
    help: str
    metavar: str = "N"
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    checks: bool = False

    @property
    def flag(self) -> str:
        """As written on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As written in the environment."""
        return "SUPERFLUIDD_" + self.name.upper()

    @property
    def key(self) -> str:
        """As written in superfluidd.toml."""
        return self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default as the documentation writes it."""
        if self.kind == "switch":
            return "on" if self.default else "off"
        if self.default is None:
            return "auto" if self.kind in ("auto-int", "auto-float") else "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


OPTIONS: tuple[Option, ...] = (
    Option("http", "address", "127.0.0.1:8453", "Address the HTTP listener binds.", "HOST:PORT"),
    Option("socket", "text", None, "Control socket; by default in $XDG_RUNTIME_DIR/superfluidd/.", "PATH"),
    Option(
        "engine",
        "choice",
        "auto",
        "Engine that runs the models; auto goes by their format: llamacpp for a GGUF file, mlx for a directory, "
        "basert for a .base file.",
        "NAME",
        choices=("auto", "llamacpp", "mlx", "basert", "simulated"),
        checks=True,
    ),
    Option("basert_lib", "text", None, "libbaseRT; by default $BASERT_LIB, or where it is usually installed.", "PATH"),
    Option(
        "trust_model_code",
        "switch",
        False,
        "Run the Python code that an MLX model brings along.",
        "",
        checks=True,
    ),
    Option(
        "max_batch",
        "int",
        8,
        "Lanes: requests that run at once, per model.",
        minimum=1,
        maximum=256,
        checks=True,
    ),
    Option(
        "max_context",
        "auto-int",
        None,
        "Context window of a lane in tokens; auto fits it to the model and to free memory.",
        minimum=64,
        maximum=16_777_216,
        checks=True,
    ),
    Option(
        "kv_layout",
        "choice",
        "auto",
        "KV memory: a window per sequence, or one shared pool.",
        "NAME",
        choices=("auto", "per-sequence", "shared"),
        checks=True,
    ),
    Option(
        "pool_tokens",
        "auto-int",
        None,
        "Cells of the shared pool in tokens; auto is lanes times window.",
        minimum=64,
        maximum=268_435_456,
        checks=True,
    ),
    Option(
        "threads",
        "auto-int",
        None,
        "Compute threads at most; auto uses every core, and fewer while the machine is busy.",
        minimum=1,
        maximum=1024,
        checks=True,
    ),
    Option(
        "prefix_cache",
        "choice",
        "on",
        "Start prompts from what earlier requests left in the KV pool.",
        "NAME",
        choices=("on", "off"),
    ),
    Option(
        "host_cache_gb",
        "auto-float",
        None,
        "GiB of host memory for KV that has to leave the pool; auto is a quarter of what is free, 0 is none.",
        "GB",
        minimum=0.0,
        maximum=1_048_576.0,
    ),
    Option(
        "park",
        "switch",
        False,
        "Write the KV of sessions to disk, so that they go on after a restart without being fed again.",
        "",
    ),
    Option("park_dir", "text", None, "Where; by default in $STATE_DIRECTORY or ~/.local/state/superfluidd.", "PATH"),
    Option(
        "park_budget_gb",
        "float",
        20.0,
        "GiB of disk space for it, over all models.",
        "GB",
        minimum=0.0,
        maximum=1_048_576.0,
    ),
    Option(
        "pressure_high",
        "float",
        85.0,
        "Percent of the KV pool in use above which cached prefixes leave it.",
        "PCT",
        minimum=1.0,
        maximum=100.0,
    ),
    Option(
        "pressure_low",
        "float",
        70.0,
        "Percent of the KV pool down to which they do.",
        "PCT",
        minimum=0.0,
        maximum=100.0,
    ),
    Option(
        "pin_budget_pct",
        "float",
        50.0,
        "Percent of the KV pool that may be pinned; 0 is none.",
        "PCT",
        minimum=0.0,
        maximum=100.0,
    ),
    Option(
        "os_pressure",
        "choice",
        "on",
        "Give memory up while the operating system is short of it; dry-run only logs what would be done.",
        "NAME",
        choices=("on", "off", "dry-run"),
    ),
    Option(
        "os_pressure_hold",
        "float",
        30.0,
        "Seconds that memory must have been easier before what was given up comes back.",
        "SECONDS",
        minimum=1.0,
        maximum=3600.0,
    ),
    Option(
        "max_tokens",
        "auto-int",
        None,
        "Reply length when the request names none; auto fills the window.",
        minimum=1,
        maximum=16_777_216,
    ),
    Option(
        "temperature",
        "float",
        1.0,
        "Sampling temperature when the request names none; 0 is greedy.",
        "X",
        minimum=0.0,
        maximum=100.0,
    ),
    Option(
        "top_k",
        "int",
        40,
        "Candidates kept when the request names no top_k; 0 keeps all.",
        minimum=0,
        maximum=1_000_000,
    ),
    Option(
        "top_p",
        "float",
        1.0,
        "Probability mass kept when the request names no top_p.",
        "X",
        minimum=0.0,
        maximum=1.0,
    ),
    Option(
        "min_p",
        "float",
        0.0,
        "Least probability relative to the likeliest, when the request names no min_p.",
        "X",
        minimum=0.0,
        maximum=1.0,
    ),
    Option(
        "http_default_qos",
        "class",
        "agent",
        "QoS class of a request that names none.",
        "CLASS",
    ),
    Option(
        "no_http_qos_header",
        "switch",
        False,
        "Ignore the headers with which clients choose a QoS class or batch invariance.",
        "",
    ),
    Option(
        "http_allow_batch_invariant",
        "switch",
        False,
        "Let clients ask for batch-invariant lanes, which hold others up.",
        "",
    ),
    Option(
        "class_lanes",
        "caps",
        None,
        "Most lanes a QoS class may hold, such as background=2,agent=6.",
        "CLASS=N,...",
    ),
    Option(
        "agent_preempts_background",
        "switch",
        False,
        "Let agent requests preempt background ones, too.",
        "",
    ),
    Option(
        "starvation_ticks",
        "int",
        8,
        "Ticks that a job waits before it rises by a class, and a prompt before it is fed first.",
        minimum=1,
        maximum=1_000_000,
    ),
    Option(
        "prefill_budget",
        "budget",
        4096,
        "Prompt tokens fed per tick over all lanes; 0 sizes it by what ticks take.",
        minimum=64,
        maximum=4096,
    ),
    Option(
        "tick_decode_budget",
        "int",
        0,
        "Tokens decoded per tick over all lanes; 0 lets the tick's length decide.",
        minimum=0,
        maximum=1_000_000,
    ),
    Option(
        "tick_target_ms",
        "int",
        2000,
        "Length of a tick while every lane is busy, milliseconds; at most 250 where ticks can be cut.",
        minimum=1,
        maximum=60_000,
    ),
    Option(
        "idle_timeout",
        "float",
        0.0,
        "Seconds without a request after which a model is unloaded until the next one; 0 is never.",
        "SECONDS",
        minimum=0.0,
        maximum=604_800.0,
    ),
    Option(
        "drain_timeout",
        "float",
        60.0,
        "Seconds that SIGTERM lets running replies go on.",
        "SECONDS",
        minimum=0.0,
        maximum=86_400.0,
    ),
    Option(
        "stall_timeout",
        "float",
        60.0,
        "Seconds a client may leave its stream unread before it is dropped.",
        "SECONDS",
        minimum=1.0,
        maximum=86_400.0,
    ),
    Option(
        "log_format",
        "choice",
        "text",
        "Log lines for people or for machines.",
        "NAME",
        choices=("text", "json"),
    ),
    Option(
        "log_level",
        "choice",
        "info",
        "Least severity logged.",
        "NAME",
        choices=("debug", "info", "warning", "error"),
    ),
)
"""Every setting, in the order ``--help`` and the man page show them."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon runs with. Field names are the option names; ``models`` are paths as given."""

    models: tuple[str, ...] = ()
    http: str = "127.0.0.1:8453"
    socket: str | None = None
    engine: str = "auto"
    basert_lib: str | None = None
    trust_model_code: bool = False
    max_batch: int = 8
    max_context: int | None = None
    kv_layout: str = "auto"
    pool_tokens: int | None = None
    threads: int | None = None
    prefix_cache: str = "on"
    host_cache_gb: float | None = None
    park: bool = False
    park_dir: str | None = None
    park_budget_gb: float = 20.0
    pressure_high: float = 85.0
    pressure_low: float = 70.0
    pin_budget_pct: float = 50.0
    os_pressure: Literal["on", "off", "dry-run"] = "on"
    os_pressure_hold: float = 30.0
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    http_default_qos: str = "agent"
    no_http_qos_header: bool = False
    http_allow_batch_invariant: bool = False
    class_lanes: str | None = None
    agent_preempts_background: bool = False
    starvation_ticks: int = 8
    prefill_budget: int = 4096
    tick_decode_budget: int = 0
    tick_target_ms: int = 2000
    idle_timeout: float = 0.0
    drain_timeout: float = 60.0
    stall_timeout: float = 60.0
    log_format: str = "text"
    log_level: str = "info"

    @property
    def policy(self) -> Policy:
        """What of them is the scheduler's."""
        return Policy(
            starvation_ticks=self.starvation_ticks,
            prefill_budget=self.prefill_budget,
            decode_budget=self.tick_decode_budget,
            tick_target=self.tick_target_ms / 1000,
            agent_preempts_background=self.agent_preempts_background,
        )

    @property
    def caps(self) -> dict[QosClass, int]:
        """Most lanes by class, for the classes that have a cap."""
        words = self.class_lanes.split(",") if self.class_lanes else []
        return {qos: lanes for qos, lanes in parse_caps(words, self.max_batch).items() if lanes}


def parse(option: Option, raw: object, source: str) -> Value:
    """One value from text or toml.

    Raises:
        UsageError: with the source, the value and what is legal.
    """

    def wrong(expected: str) -> UsageError:
        return UsageError(f"{source}: {raw!r} is not {expected}", param=option.key)

    if option.kind == "text":
        if not isinstance(raw, str) or not raw:
            raise wrong("a path")
        return raw
    if option.kind == "choice":
        if raw not in option.choices:
            raise wrong("one of " + ", ".join(option.choices))
        return str(raw)
    if option.kind == "switch":
        word = str(raw).strip().lower()
        if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise wrong("true or false")
        return word in ("1", "true", "yes", "on")
    if option.kind in ("class", "caps"):
        if not isinstance(raw, str):
            raise wrong("a QoS class" if option.kind == "class" else "CLASS=LANES,CLASS=LANES")
        try:
            return parse_class(raw).label if option.kind == "class" else _caps(raw)
        except InvalidValue as error:
            raise UsageError(f"{source}: {error.message}", param=option.key) from None
    if option.kind == "address":
        if not isinstance(raw, str):
            raise wrong("HOST:PORT, such as 127.0.0.1:8453")
        split_address(raw, source)
        return raw
    if option.kind in ("auto-int", "auto-float") and raw == "auto":
        return None
    whole = option.kind in ("int", "auto-int", "budget")
    expected = ("a whole number" if whole else "a number") + f" from {option.minimum:g} to {option.maximum:g}"
    if option.kind in ("auto-int", "auto-float"):
        expected += ", or auto"
    if option.kind == "budget":
        expected += ", or 0"
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        raise wrong(expected)
    try:
        number: int | float = int(raw) if whole and not isinstance(raw, float) else float(raw)
    except ValueError:
        raise wrong(expected) from None
    if whole and number != int(number):
        raise wrong(expected)
    if option.kind == "budget" and number == 0:
        return 0
    assert option.minimum is not None
    assert option.maximum is not None
    if not option.minimum <= number <= option.maximum:
        raise wrong(expected)
    return int(number) if whole else number


def _caps(text: str) -> str:
    """Lane caps in their canonical spelling; whether there are that many lanes is not known yet."""
    return format_caps({qos: lanes for qos, lanes in parse_caps(text.split(","), 999_999_999).items() if lanes})


def split_address(text: str, source: str = "--http") -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[V6]:PORT``.

    Raises:
        UsageError: it is not an address.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not port.isdecimal() or not port.isascii() or not 0 <= int(port) <= 65535:
        raise UsageError(f"{source}: {text!r} is not HOST:PORT, such as 127.0.0.1:8453")
    return host, int(port)


def read_toml(path: Path) -> dict[str, object]:
    """The settings file.

    Raises:
        UsageError: it cannot be read, is not toml, or has a key that is no setting.
    """
    try:
        data: dict[str, object] = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid toml: {error}") from error
    known = {option.key for option in OPTIONS} | {"models"}
    unknown = sorted(set(data) - known)
    if unknown:
        raise UsageError(
            f"{path}: unknown setting{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; "
            f"known: {', '.join(sorted(known))}"
        )
    return data


def load(
    flags: Mapping[str, object],
    *,
    models: tuple[str, ...] = (),
    config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Settings from flags, environment and file, in that order of weight.

    Args:
        flags: option name to raw text, only for the flags that were given.
        models: model paths from the command line; they replace the file's.
        config: the toml file, if any.
        environ: environment variables.

    Raises:
        UsageError: some value is wrong.
    """
    data = read_toml(config) if config is not None else {}
    values: dict[str, object] = {}
    for option in OPTIONS:
        if option.name in flags:
            values[option.name] = parse(option, flags[option.name], option.flag)
        elif option.variable in environ:
            values[option.name] = parse(option, environ[option.variable], option.variable)
        elif option.key in data:
            values[option.name] = parse(option, data[option.key], f"{config}: {option.key}")
    if not models and "models" in data:
        listed = data["models"]
        if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
            raise UsageError(f"{config}: models must be a list of paths")
        models = tuple(listed)
    settings = msgspec.convert({"models": models, **values}, Settings)
    if settings.pressure_low > settings.pressure_high:
        raise UsageError(
            f"pressure-low is {settings.pressure_low:g} and pressure-high {settings.pressure_high:g}; the low one "
            "must not be above the high one",
            param="pressure-low",
        )
    if settings.park and settings.prefix_cache == "off":
        raise UsageError("park is on and prefix-cache off; what is parked is found as a prefix, so leave it on")
    if settings.class_lanes:
        try:
            parse_caps(settings.class_lanes.split(","), settings.max_batch)
        except InvalidValue as error:
            raise UsageError(f"class-lanes: {error.message}", param="class-lanes") from None
    return settings
