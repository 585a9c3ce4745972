"""``superfluidd serve|check|simulate|convert``: arguments in, exit code out.

Exit codes: 0 fine, 1 failed while running or already running, 2 wrong usage, 3 the model cannot be served.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from superfluidd import __version__, config, logs
from superfluidd.errors import StartupError

if TYPE_CHECKING:
    from superfluidd.daemon.loading import Loaded
    from superfluidd.daemon.service import Service


def main(argv: list[str]) -> int:
    """Run a command and return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    if args.command in ("simulate", "convert"):
        return _tool(args)
    flags = {option.name: value for option in config.OPTIONS if (value := getattr(args, option.name, None)) is not None}
    try:
        settings = config.load(
            flags,
            models=tuple(args.models),
            config=Path(args.config) if args.config else None,
            environ=os.environ,
        )
        logs.configure(settings.log_format, settings.log_level)
        return _check(settings) if args.command == "check" else _serve(settings)
    except StartupError as error:
        print(f"superfluidd: {error.message}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    from superfluidd.convert import arguments as convert_arguments
    from superfluidd.simulate import arguments

    parser = argparse.ArgumentParser(
        prog="superfluidd",
        description="One daemon that schedules local language models for everyone on the machine.",
        epilog="Environment variables SUPERFLUIDD_* and superfluidd.toml set the same options; see superfluidd(8).",
    )
    parser.add_argument("--version", action="version", version=f"superfluidd {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve models until stopped", description="Serve models over HTTP until stopped."
    )
    check = commands.add_parser(
        "check",
        help="say what would be served, without serving",
        description="Read the model files and say what `serve` would do with them: window, KV layout, memory.",
    )
    simulate = commands.add_parser(
        "simulate",
        help="replay a trace of arrivals through the scheduler, without an engine",
        description="Replay arrivals through the very same scheduler in virtual time, and compare settings.",
    )
    arguments.add_arguments(simulate)
    convert = commands.add_parser(
        "convert",
        help="make an MLX model directory of a GGUF file",
        description="Make a directory that MLX serves of a GGUF file of llama architecture, its tokenizer included.",
    )
    convert_arguments.add_arguments(convert)
    for command, everything in ((serve, True), (check, False)):
        command.add_argument(
            "models",
            nargs="*",
            metavar="MODEL",
            help="path of a GGUF file; without one, the bundled SmolLM2-135M-Instruct if it is installed",
        )
        command.add_argument("--config", metavar="FILE", help="read settings from this superfluidd.toml")
        for option in config.OPTIONS:
            if everything or option.checks:
                metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.metavar
                text = f"{option.help} Default: {option.default_text}.".replace("%", "%%")
                if option.kind == "switch":
                    command.add_argument(option.flag, dest=option.name, action="store_const", const="on", help=text)
                else:
                    command.add_argument(option.flag, dest=option.name, metavar=metavar, help=text)
    return parser


def _tool(args: argparse.Namespace) -> int:
    if args.command == "convert":
        from superfluidd.convert.command import run
    else:
        from superfluidd.simulate.command import run

    try:
        return run(args)
    except StartupError as error:
        print(f"superfluidd: {error.message}", file=sys.stderr)
        return error.exit_code


def _check(settings: config.Settings) -> int:
    from superfluidd.daemon.loading import examine, report

    for loaded in examine(settings):
        print("\n".join(report(loaded)))
    return 0


def _serve(settings: config.Settings) -> int:
    import trio

    from superfluidd.daemon import main as daemon

    try:
        trio.run(daemon.serve, settings, daemon.socket_path(settings), _announce)
    except BaseExceptionGroup as group:
        startup, rest = group.split(StartupError)
        if startup is None or rest is not None:
            raise
        raise _first(startup) from None
    return 0


def _first(group: BaseExceptionGroup[StartupError]) -> StartupError:
    """The first error of a nest of groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StartupError)
    return error


def _sfctl() -> str:
    """How to call sfctl from the user's shell: by name if the shell would find ours."""
    ours = Path(sys.executable).with_name("sfctl")
    return "sfctl" if shutil.which("sfctl") == str(ours) or not ours.exists() else str(ours)


def _announce(service: Service, loaded: list[Loaded]) -> None:
    """The ready line, with what to try next."""
    url = f"http://{service.http}"
    names = ", ".join(f"{one.name} ({one.summary})" for one in loaded)
    body = (
        '{"messages":[{"role":"system","content":"You are a helpful assistant."},'
        '{"role":"user","content":"What is the capital of France?"}],"temperature":0}'
    )
    print(
        f"\nready: {names} on {url}/v1\n"
        f"  try:   curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        f"  watch: {_sfctl()} --socket {service.socket} lanes\n",
        flush=True,
    )
