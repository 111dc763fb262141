"""Help as it is read: in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer

from outrider import cli, requirements


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, found in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {inner}", found)


def every_command() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, lazy in cli.COMMANDS.items():
        found += commands(name, typer.main.get_command(import_module(lazy.module).app))
    return found


@pytest.mark.parametrize(("name", "command"), every_command(), ids=lambda value: str(value)[:30])
def test_help_fits_80_columns_and_cuts_no_name(
    name: str,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([*name.split(), "--help"])
    assert not caught.value.code
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "…" not in text
    options = [each for each in command.params if each.param_type_name == "option"]
    missing = [n for option in options for n in option.opts if n not in text and not option.hidden]
    assert missing == []


def test_a_command_without_its_packages_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*args: object, **options: object) -> None:
        raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")

    monkeypatch.setattr(cli, "app", without)
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "aiohttp" else name)
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench"])
    assert caught.value.code == 1
    [aiohttp] = [each for each in requirements.requirements("bench") if "aiohttp" in each]
    assert capsys.readouterr().err == (
        "error: the package aiohttp is not installed; install it with: "
        f"{requirements.install_command([aiohttp])}\n"
    )
