"""What `outrider serve` tells once it is ready."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.cli.serve import commands_to_paste, depth_reason
from outrider.config import EngineConfig


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if called by the name of a program on the path."""
    for name in ("outrider", "python"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "outrider")])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def test_commands_name_no_server_at_the_default_port() -> None:
    assert commands_to_paste("127.0.0.1:50051") == [
        "python -c 'from outrider.client import Client; "
        'print(Client().generate("The capital of France is", max_tokens=8, temperature=0).text)\'',
        "outrider chat",
        "outrider status",
    ]


def test_commands_name_another_server() -> None:
    client, chat, status = commands_to_paste("0.0.0.0:8000")
    assert 'Client("localhost:8000")' in client
    assert chat == "outrider chat --server localhost:8000"
    assert status == "outrider status --server localhost:8000"
    assert commands_to_paste("10.0.0.5:50051")[1] == "outrider chat --server 10.0.0.5:50051"


def test_a_program_that_is_not_on_the_path_is_named_by_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path.parent)
    assert commands_to_paste("127.0.0.1:50051")[1] == f"{tmp_path.name}/outrider chat"


def test_without_the_installed_program_python_runs_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/outrider/__main__.py"])
    assert commands_to_paste("127.0.0.1:50051")[2] == "python -m outrider status"


def test_it_is_told_who_set_the_depth() -> None:
    default = EngineConfig.from_kwargs(model="big", draft_model="small")
    assert depth_reason(default).startswith("the default of this device")
    given = EngineConfig.from_kwargs(model="big", draft_model="small", num_speculative_tokens=4)
    assert depth_reason(given) == "as speculation.num_speculative_tokens says"
