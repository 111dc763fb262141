"""Who is let in, by which key."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outrider.api_types.errors import ForbiddenError, UnauthenticatedError
from outrider.config import ServerConfig
from outrider.errors import ConfigError
from outrider.gateway.auth.callers import LOCAL, REMOTE, Callers, Scope
from outrider.gateway.auth.keys_file import key_digest


def _entry(name: str, key: str, rest: str = "") -> str:
    return f"  - {{name: {name}, sha256: '{key_digest(key).hex()}'{rest}}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys:\n"
        + _entry("alice", "alices", ", scopes: [infer, admin]")
        + _entry("bob", "bobs")
        + _entry("old", "olds", ", expires: 2020-01-01")
    )
    return path


@pytest.fixture
def callers(file: Path) -> Callers:
    return Callers(ServerConfig(api_keys_file=str(file)))


def test_without_keys_this_host_may_do_all_and_others_may_ask() -> None:
    callers = Callers(ServerConfig())
    assert callers.identify(None, is_local=True) is LOCAL
    assert callers.identify("anything", is_local=False) is REMOTE
    assert callers.identify_header(["one", "two"], is_local=True) is LOCAL
    with pytest.raises(ForbiddenError):
        REMOTE.require(Scope.ADMIN)


def test_one_key_may_do_all_and_being_local_is_none() -> None:
    callers = Callers(ServerConfig(api_key="secret"))
    assert callers.identify("secret", is_local=False).scopes == set(Scope)
    with pytest.raises(UnauthenticatedError):
        callers.identify(None, is_local=True)


def test_a_key_of_the_file_is_its_owners(callers: Callers) -> None:
    assert callers.identify_header(["Bearer alices"], is_local=False).name == "alice"
    bob = callers.identify_header(["bearer  bobs "], is_local=False)
    bob.require(Scope.INFER)
    with pytest.raises(ForbiddenError, match="bob"):
        bob.require(Scope.ADMIN)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        ["Basic alices"],
        ["alices"],
        ["Bearer alice"],
        ["Bearer alicess"],
        ["Bearer alices, Bearer bobs"],
        ["Bearer alices", "Bearer bobs"],
        ["Bearer alices", "Bearer alices"],
        ["Bearer " + "a" * 100_000],
        ["Bearer ключ"],
        ["Bearer \udcff\x00"],
        ["Bearer " + key_digest("alices").hex()],
    ],
)
def test_anything_else_is_nobodys_and_is_not_repeated(callers: Callers, values: list[str]) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        callers.identify_header(values, is_local=True)
    assert "alices" not in str(caught.value)


def test_an_expired_key_is_told_so(file: Path) -> None:
    config = ServerConfig(api_keys_file=str(file))
    now_s = 1577836800.0  # as 2020 begins
    assert Callers(config, lambda: now_s).identify("olds", is_local=False).name == "old"
    with pytest.raises(UnauthenticatedError, match="expired"):
        Callers(config, lambda: now_s + 86400).identify("olds", is_local=False)


def test_a_changed_file_counts_at_once_and_a_broken_one_not_at_all(
    callers: Callers, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert callers.watched is not None
    file.write_text("keys:\n" + _entry("bob", "bobs"))
    callers.watched.refresh()
    with pytest.raises(UnauthenticatedError):
        callers.identify("alices", is_local=False)
    file.write_text("keys: [nonsense")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        callers.watched.refresh()
        callers.watched.refresh()
    assert len(caplog.records) == 1 and "stay as they were" in caplog.text
    assert callers.identify("bobs", is_local=False).name == "bob"
    file.unlink()
    callers.watched.refresh()
    assert callers.needs_key


def test_a_file_without_keys_lets_nobody_in(file: Path) -> None:
    file.write_text("keys: []\n")
    callers = Callers(ServerConfig(api_keys_file=str(file)))
    with pytest.raises(UnauthenticatedError):
        callers.identify(None, is_local=True)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Callers(ServerConfig(api_keys_file=str(tmp_path / "none")))
