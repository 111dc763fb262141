"""What `outrider serve` tells once it is ready."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.cli.terminal import commands_to_paste, depth_reason, page_url
from outrider.cluster.serve_callbacks import Addresses, listening_sentence
from outrider.config import EngineConfig, ServerConfig


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if called by the name of a program on the path."""
    for name in ("outrider", "python"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "outrider")])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def commands(grpc: str = "127.0.0.1:50051", **kwargs: Any) -> list[str]:
    config = EngineConfig.from_kwargs(**{"model": "big"} | kwargs)
    return commands_to_paste(Addresses("0.0.0.0:8000", grpc), config)


def test_commands_name_no_server_at_the_default_port() -> None:
    assert commands() == [
        "curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' -d "
        '\'{"model": "big", "prompt": "The capital of France is", "max_tokens": 8}\'',
        'python -c \'from openai import OpenAI; print(OpenAI(base_url="http://localhost:8000/v1", '
        'api_key="none").chat.completions.create(model="big", messages=[{"role": "user", '
        '"content": "In one sentence, what is photosynthesis?"}]).choices[0].message.content)\'',
        "outrider chat",
        "outrider status",
    ]


def test_commands_name_another_server() -> None:
    assert commands("0.0.0.0:8001")[2:] == [
        "outrider chat --server localhost:8001",
        "outrider status --server localhost:8001",
    ]
    assert commands("10.0.0.5:50051")[2] == "outrider chat --server 10.0.0.5:50051"


def test_the_client_of_openai_is_installed_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "pip install" not in "".join(commands())
    monkeypatch.setattr("outrider.cli.terminal.find_spec", lambda name: None)
    assert "-m pip install -q openai; " in commands()[1]


def test_commands_speak_tls_to_a_server_that_does() -> None:
    curl, openai, chat, status = commands(tls_cert="cert.pem", tls_key="key.pem")
    assert "https://localhost:8000/v1" in curl and "https://localhost:8000/v1" in openai
    assert chat == "outrider chat --server https://localhost:50051"
    assert status == "outrider status --server https://localhost:50051"


def test_the_addresses_say_whether_there_is_tls() -> None:
    addresses = Addresses("127.0.0.1:8000", "127.0.0.1:50051", "127.0.0.1:9090")
    assert listening_sentence(addresses) == (
        "listening on http://127.0.0.1:8000 and, for gRPC, on 127.0.0.1:50051; for probes on "
        "http://127.0.0.1:9090"
    )
    told = listening_sentence(addresses, "cert.pem")
    assert told.startswith("listening on https://127.0.0.1:8000 and")
    assert told.endswith("for probes on http://127.0.0.1:9090")


def test_commands_show_the_key_by_its_variable_and_the_model_by_its_name() -> None:
    curl, openai, *_ = commands(api_key="hidden", served_model_name=["fast", "big"])
    assert 'Bearer $OUTRIDER_API_KEY"' in curl
    assert 'os.environ["OUTRIDER_API_KEY"]' in openai
    assert '"model": "fast"' in curl and 'model="fast"' in openai
    assert "hidden" not in curl + openai


def test_the_page_is_named_unless_it_is_off() -> None:
    addresses = Addresses("127.0.0.1:8000", "127.0.0.1:50051")
    assert page_url(addresses, ServerConfig()) == "http://localhost:8000/"
    assert page_url(addresses, ServerConfig(page=False)) is None


def test_a_program_that_is_not_on_the_path_is_named_by_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path.parent)
    assert commands()[2] == f"{tmp_path.name}/outrider chat"


def test_without_the_installed_program_python_runs_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/outrider/__main__.py"])
    assert commands()[3] == "python -m outrider status"


def test_a_model_named_twice_must_be_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "one", "--model", "two"])
    assert "the model is 'one' as an argument and 'two' as --model" in capsys.readouterr().err


def test_a_server_that_others_can_reach_needs_keys_or_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "/no/such/model", "--host", "0.0.0.0"])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "no API key is set; set one (--api-key" in told
    assert "model '/no/such/model'" not in told


def test_it_is_told_who_set_the_depth() -> None:
    default = EngineConfig.from_kwargs(model="big", draft_model="small")
    assert depth_reason(default).startswith("the default of this device")
    given = EngineConfig.from_kwargs(model="big", draft_model="small", num_speculative_tokens=4)
    assert depth_reason(given) == "as speculation.num_speculative_tokens says"


@pytest.mark.parametrize("command", ["serve", "controller"])
def test_options_become_settings(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[EngineConfig, bool]] = []
    monkeypatch.setattr(
        f"outrider.cli.{command}.run_server",
        lambda config, log_level, *, use_ray: started.append((config, use_ray)),
    )
    shared = ["big", "-m", "big", "--draft-model", "small", "--admin-port", "9000", "--no-ray"]
    own = ["--served-model-name", "fast,good", "-k", "3", "--gateway-processes", "2"]
    with pytest.raises(SystemExit) as ended:
        main([command, *shared, "--replicas", "2", *(own if command == "serve" else [])])
    assert ended.value.code == 0
    [(config, use_ray)] = started
    assert (config.target.model, config.draft.model) == ("big", "small")
    assert (config.server.admin_port, config.cluster.replicas, use_ray) == (9000, 2, False)
    if command == "serve":
        assert config.server.model_names == ("fast", "good")
        assert (config.speculation.num_speculative_tokens, config.server.processes) == (3, 2)
    else:
        assert config.server.processes == 0
