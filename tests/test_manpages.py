"""The man pages say what the programs do: every option with its default, variable and key; every verb; every status."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from sfctl import __main__ as sfctl
from sfctl import errors as sfctl_errors
from sfctl.verbs.verb import Verb

from superfluidd import cli, config, errors
from superfluidd.simulate.arguments import SETTINGS

PAGES = Path(__file__).resolve().parents[1] / "man"
DAEMON = (PAGES / "superfluidd.8").read_text()
CLIENT = (PAGES / "sfctl.1").read_text()


def section(page: str, name: str) -> str:
    """The source of a section."""
    found = re.search(rf"^\.Sh {re.escape(name)}\n(.*?)(?=^\.Sh |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no section {name}"
    return found.group(1)


def items(text: str) -> dict[str, str]:
    """The items of a section's list: heading to text."""
    parts = re.split(r"^\.It (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def item(text: str, flag: str) -> tuple[str, str]:
    """Heading and text of an option's item."""
    found = [
        (head, body) for head, body in items(text).items() if f"Fl -{flag.lstrip('-')}" in re.split(r" Ar | , ", head)
    ]
    assert len(found) == 1, f"{flag} has {len(found)} items"
    return found[0]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Parsers of the commands."""
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(commands.choices)


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Long options that a parser takes and shows."""
    return {
        flag
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        for flag in action.option_strings
        if flag.startswith("--")
    }


@pytest.mark.parametrize("option", config.OPTIONS, ids=lambda option: option.name)
def test_every_option_is_documented_with_its_default(option: config.Option) -> None:
    head, body = item(section(DAEMON, "OPTIONS"), option.flag)
    assert head == (f"Fl -{option.key}" if option.kind == "switch" else f"Fl -{option.key} Ar {option.metavar}")
    assert f"\nDefault: {option.default_text}.\n" in body
    assert f".Ev {option.variable} ,\nkey\n.Li {option.key} .\n" in body
    assert ("Also for check." in body) == option.checks
    for choice in option.choices:
        assert re.search(rf"^\.Cm {choice}\b", body, re.MULTILINE), choice
    for bound in (option.minimum, option.maximum):
        if bound is not None:
            assert re.search(rf"\b{int(bound)}\b", body), f"{bound:g} is not named as a bound"


def test_no_option_is_documented_that_does_not_exist() -> None:
    documented = {
        flag
        for head in items(section(DAEMON, "OPTIONS"))
        for flag in re.findall(r"Fl -(-?[a-z-]+)", head.replace(" -", " --"))
    }
    real = {option.flag.lstrip("-") for option in config.OPTIONS} | {"config", "version", "help"}
    assert {flag.lstrip("-") for flag in documented} == real


def test_every_command_and_flag_of_the_daemon_is_documented() -> None:
    commands = subcommands(cli._parser())
    assert {head.split()[1] for head in items(section(DAEMON, "COMMANDS"))} == set(commands)
    for name, parser in commands.items():
        assert f".Cm {name}\n" in section(DAEMON, "SYNOPSIS")
        own = items(section(DAEMON, "SIMULATION")) if name == "simulate" else {}
        for flag in flags(parser) - {f"--{head.removeprefix('Fl -').split(' Ar ')[0]}" for head in own}:
            item(section(DAEMON, "OPTIONS"), flag)


def test_no_flag_of_simulate_is_documented_that_does_not_exist_and_defaults_are_true() -> None:
    parser = subcommands(cli._parser())["simulate"]
    documented = items(section(DAEMON, "SIMULATION"))
    assert {head.removeprefix("Fl -").split(" Ar ")[0] for head in documented} == {
        flag.lstrip("-") for flag in flags(parser) - {"--config", "--socket", "--help"}
    }
    for action in parser._actions:
        head = f"Fl {action.option_strings[-1][1:]}" if action.option_strings else ""
        found = [body for heading, body in documented.items() if heading.split(" Ar ")[0] == head]
        if found and action.default not in (None, False, []):
            default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert f"\nDefault: {default}.\n" in found[0]
    settings = documented["Fl -set Ar NAME=VALUE"]
    for name in SETTINGS:
        assert f".Li {name}\n" in settings or f".Li {name} ,\n" in settings


def test_every_exit_status_of_the_daemon_is_documented() -> None:
    kinds: list[type[errors.StartupError]] = [errors.StartupError, *errors.StartupError.__subclasses__()]
    statuses = {kind.exit_code for kind in kinds}
    assert set(items(section(DAEMON, "EXIT STATUS"))) == {str(status) for status in statuses | {0}}


def test_the_settings_file_in_the_page_is_a_good_one(tmp_path: Path) -> None:
    found = re.search(r"^\.Bd -literal.*?\n(.*?)^\.Ed", section(DAEMON, "SETTINGS FILE"), re.MULTILINE | re.DOTALL)
    assert found
    path = tmp_path / "superfluidd.toml"
    path.write_text(found.group(1))
    assert config.load({}, config=path, environ={}).models == ("/srv/models/chat.gguf",)


@pytest.mark.parametrize("verb", sfctl.VERBS, ids=lambda verb: verb.name)
def test_every_verb_is_documented_with_its_options_and_when_it_returns(verb: Verb) -> None:
    found = [body for head, body in items(section(CLIENT, "VERBS")).items() if head.split()[1] == verb.name]
    assert len(found) == 1
    assert re.search(r"^Returns ", found[0], re.MULTILINE), "the page does not say when it returns"
    assert verb.returns.startswith("Returns ")
    assert f".Cm {verb.name}\n" in section(CLIENT, "SYNOPSIS")
    for flag in flags(subcommands(sfctl.build_parser())[verb.name]):
        item(section(CLIENT, "OPTIONS"), flag)


def test_no_verb_or_option_of_sfctl_is_documented_that_does_not_exist() -> None:
    parser = sfctl.build_parser()
    verbs = subcommands(parser)
    assert {head.split()[1] for head in items(section(CLIENT, "VERBS"))} == set(verbs)
    real = flags(parser).union(*(flags(one) for one in verbs.values()))
    for flag in real:
        item(section(CLIENT, "OPTIONS"), flag)
    assert len(items(section(CLIENT, "OPTIONS"))) == len(real)


def test_every_exit_status_of_sfctl_is_documented() -> None:
    kinds: list[type[sfctl_errors.CommandError]] = [
        sfctl_errors.CommandError,
        *sfctl_errors.CommandError.__subclasses__(),
    ]
    assert set(items(section(CLIENT, "EXIT STATUS"))) == {str(kind.status) for kind in kinds} | {"0", "130"}
