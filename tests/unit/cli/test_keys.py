"""`outrider keys new`, and the options of commands that talk to a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outrider import cli
from outrider.gateway.auth.caller import CallerLimits, Scope
from outrider.gateway.auth.keys_file import key_digest, read_keys


def _run(*args: str) -> str | int | None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    return caught.value.code


def test_a_new_key_is_printed_once_and_its_entry_fits_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "500", "--max-concurrent", "2"]
    options = [*limits, "--expires", "2030-01-31", "--scope", "admin", "--scope", "infer"]
    assert not _run("keys", "new", "alice", *options)
    printed = capsys.readouterr()
    key = printed.err.split("shown only now: ")[1].split()[0]
    assert key not in printed.out
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": yaml.safe_load(printed.out)}))
    (found,) = read_keys(file)
    assert found.digest == key_digest(key)
    assert found.caller.scopes == set(Scope)
    assert found.caller.limits == CallerLimits(60, 500, 2)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["a b"], "has the name 'a b'"),
        (["a", "--max-concurrent", "0"], "has max_concurrent 0"),
        (["a", "--expires", "soon"], "expires 'soon'"),
    ],
)
def test_a_wrong_option_makes_no_key(
    capsys: pytest.CaptureFixture[str], args: list[str], sentence: str
) -> None:
    assert _run("keys", "new", *args) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and "shown only now" not in printed.err and not printed.out


@pytest.mark.parametrize("command", [["status"], ["chat"], ["explain"], ["speculation", "show"]])
def test_every_command_that_talks_to_a_server_takes_keys_and_certificates(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    assert _run(*command, "--api-key", "a key") == 2
    assert "api_key is empty, or holds a space" in capsys.readouterr().err
    assert _run(*command, "--tls-ca", str(tmp_path / "none.pem")) == 2
    assert "tls is" in capsys.readouterr().err
    assert _run(*command, "--client-cert", str(tmp_path / "none.pem")) == 2
    assert "client_cert is" in capsys.readouterr().err
    assert _run(*command, "--server", "http://localhost:8000") == 2
    assert "give 'localhost:50051'" in capsys.readouterr().err
