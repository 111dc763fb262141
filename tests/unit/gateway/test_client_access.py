"""Addresses as people write them, and the key that goes with every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from outrider.client.access import Access, parse_address
from outrider.errors import RequestError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("localhost", ("localhost:50051", False)),
        ("localhost:1234", ("localhost:1234", False)),
        (" host ", ("host:50051", False)),
        ("grpc://host", ("host:50051", False)),
        ("http://host:50051/", ("host:50051", False)),
        ("https://host", ("host:50051", True)),
        ("HTTPS://host:4443", ("host:4443", True)),
        ("grpcs://host:443", ("host:443", True)),
        ("127.0.0.1", ("127.0.0.1:50051", False)),
        ("::1", ("[::1]:50051", False)),
        ("[::1]:7", ("[::1]:7", False)),
        ("https://[::1]", ("[::1]:50051", True)),
        ("unix:/tmp/socket", ("unix:/tmp/socket", False)),
        ("dns:///host:1", ("dns:///host:1", False)),
    ],
)
def test_an_address_is_understood(given: str, found: tuple[str, bool]) -> None:
    assert parse_address(given) == found


@pytest.mark.parametrize(
    "given",
    [
        "",
        " ",
        ":50051",
        "host:port",
        "host:99999",
        "ftp://host",
        "a b",
        "me@host",
        "http://",
        50051,
    ],
)
def test_what_is_none_is_refused_with_how_to_write_one(given: Any) -> None:
    with pytest.raises(RequestError, match=r"address is .*; (give it as host:port|begin it)"):
        Client(given)


@pytest.mark.parametrize("given", ["http://host:8000", "http://host:8000/v1", "https://host/v1"])
def test_an_address_of_http_is_answered_with_that_of_grpc(given: str) -> None:
    with pytest.raises(RequestError, match="give 'host:50051'"):
        parse_address(given)


def test_the_variable_holds_the_key_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    assert Access().key is None
    monkeypatch.setenv("OUTRIDER_API_KEY", "of-the-variable")
    assert Access().key == "of-the-variable"
    assert Access("given").key == "given"
    assert "given" not in repr(Access("given"))


@pytest.mark.parametrize("key", ["", "a key", "ключ", "line\nbreak"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_repeated(key: str) -> None:
    with pytest.raises(RequestError, match="api_key is empty, or holds") as caught:
        Client("localhost", api_key=key)
    assert key == "" or key not in str(caught.value)


@pytest.mark.parametrize("name", ["tls", "client_cert"])
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_file_that_is_no_pem_is_one_sentence(
    tmp_path: Path, name: str, content: str | None
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    options: dict[str, Any] = {name: str(file)}
    with pytest.raises(RequestError, match=rf"{name} is .*file\.pem"):
        Client("localhost", **options)
