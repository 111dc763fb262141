"""Which server a command talks to: by an option in any place, or by a variable."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import typer

from outrider import cli
from outrider.cli.connecting import SERVER_VARIABLE

# Nothing listens there, and every sentence names the address that was tried.
FIRST, SECOND = "localhost:1", "localhost:2"


def said(capsys: pytest.CaptureFixture[str], line: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        f"status --server {FIRST}",
        f"--server {FIRST} status",
        f"-s {FIRST} abort some-id",
        f"--server={FIRST} speculation show",
        f"speculation --server {FIRST} show",
        f"speculation show -s {FIRST}",
        f"--server {FIRST} status --server {FIRST}",
    ],
)
def test_the_server_may_stand_anywhere(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVER_VARIABLE, SECOND)
    assert f"the server at {FIRST} cannot be reached" in said(capsys, line)


def test_a_variable_names_it_where_no_option_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVER_VARIABLE, SECOND)
    assert f"the server at {SECOND} cannot be reached" in said(capsys, "status")
    assert "is no setting" not in said(capsys, "serve --no-ray -m ./nothing-there --port x")


@pytest.mark.parametrize(
    "line",
    [
        f"--server {FIRST} status --server {SECOND}",
        f"--server {FIRST} speculation --server {SECOND} show",
        f"speculation --server {FIRST} show --server {SECOND}",
    ],
)
def test_two_servers_are_one_too_many(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, line)
    assert FIRST in error and SECOND in error and "; give" in error


@pytest.mark.parametrize("command", ["serve", "bench", "keys"])
def test_a_command_that_talks_to_none_takes_none(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"--server does not apply to {command}, only to chat, status" in said(
        capsys, f"--server {FIRST} {command}"
    )


def options_of(command: Any) -> list[Any]:
    inner = getattr(command, "commands", {}).values()
    return [*command.params, *(option for each in inner for option in options_of(each))]


def test_the_commands_that_talk_to_a_server_are_those_with_its_option() -> None:
    found = {
        name
        for name, lazy in cli.COMMANDS.items()
        for option in options_of(typer.main.get_command(import_module(lazy.module).app))
        if "--server" in option.opts and option.metavar == "HOST:PORT"
    }
    assert found == set(cli.CLIENTS)


def test_c_is_the_configuration_in_every_command() -> None:
    """Where it was something else it is hidden, and warns."""
    meanings = {
        (tuple(option.opts), option.hidden)
        for lazy in cli.COMMANDS.values()
        for option in options_of(typer.main.get_command(import_module(lazy.module).app))
        if "-c" in option.opts
    }
    assert meanings == {(("--config", "-c"), False), (("-c",), True)}


@pytest.mark.parametrize("line", ["serve --nothing", "nothing", "speculation nothing", "scale x"])
def test_an_error_of_the_parser_begins_as_all_others_do(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = said(capsys, line)
    assert "\nerror: " in error and "Error:" not in error and error.startswith("Usage: outrider")
