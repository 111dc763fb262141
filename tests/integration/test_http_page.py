"""The files of the page, and what it asks of a server: status, the switch, explanations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeService, fake_service

from outrider.gateway.http.page import FOLDER


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path) as found:
        yield found


def ask(
    service: FakeService, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(service.server.http_address, timeout=10)
    try:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        kind = {"Content-Type": "application/json"}
        connection.request(method, path, data, kind | (headers or {}))
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def ask_json(service: FakeService, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
    response, content = ask(service, path, body, **options)
    return response.status, json.loads(content)


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_a_file_has_its_type_and_allows_nothing_from_elsewhere(
    service: FakeService, path: str, kind: str
) -> None:
    response, content = ask(service, path)
    assert response.status == 200
    assert content == (FOLDER / (path.rpartition("/")[2] or "index.html")).read_bytes()
    assert response.headers["Content-Type"] == kind
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert response.headers["Cache-Control"] == "no-cache"


def test_a_file_that_is_known_is_not_sent_again(service: FakeService) -> None:
    first, _ = ask(service, "/")
    etag = first.headers["ETag"]
    for known in (etag, f'"other", W/{etag}'):
        again, content = ask(service, "/", headers={"If-None-Match": known})
        assert (again.status, content) == (304, b"")
        assert again.headers["ETag"] == etag
    other, _ = ask(service, "/", headers={"If-None-Match": '"other"'})
    assert other.status == 200


@pytest.mark.parametrize(
    "path", ["/page/none.js", "/page/", "/page/..%2fgateway.py", "/page/%2e%2e/gateway.py"]
)
def test_nothing_but_the_files_of_the_page_is_served(service: FakeService, path: str) -> None:
    status, body = ask_json(service, path)
    assert status == 404
    assert body["error"]["type"] == "not_found_error"


def test_the_page_can_be_turned_off(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"page": False}) as service:
        for path in ("/", "/page/main.js"):
            assert ask_json(service, path)[0] == 404


def test_the_page_itself_needs_no_key_but_what_it_asks_does(tmp_path: Path) -> None:
    with fake_service(tmp_path, server={"api_key": "right"}) as service:
        assert ask(service, "/")[0].status == 200
        for path in ("/outrider/status", "/outrider/explain"):
            assert ask(service, path)[0].status == 401
            shown = {"Authorization": "Bearer right"}
            assert ask(service, path, headers=shown)[0].status == 200
        assert ask(service, "/outrider/speculation", {"policy": "off"})[0].status == 401
        assert service.engine.speculation.settings().policy != "off"


# -- status -----------------------------------------------------------------------------------


def test_the_status_tells_server_engine_and_ranks_in_plain_numbers(service: FakeService) -> None:
    status, found = ask_json(service, "/outrider/status")
    assert status == 200
    assert (found["state"], found["model"]) == ("serving", "smollm2-135m-draft")
    assert found["methods"] == ["draft", "ngram"]
    assert found["cluster"] is None
    engine = found["engine"]
    assert (engine["drafted_tokens"], engine["accepted_tokens"]) == (40, 30)
    assert engine["ranks"][2] == {
        **{"role": "draft", "rank": 0, "pid": 103},
        **{"host": "here", "device": "cpu", "state": "starting"},
    }
    speculation = engine["speculation"]
    assert speculation["acceptance"] is None
    assert speculation["settings"]["max_depth"] is None


def test_the_status_is_told_without_an_engine_too(service: FakeService) -> None:
    service.engine.stop()
    status, found = ask_json(service, "/outrider/status")
    assert (status, found["state"], found["engine"]) == (200, "engine away", None)


# -- speculation ------------------------------------------------------------------------------


def test_speculation_is_changed_in_what_is_named_only(service: FakeService) -> None:
    path = "/outrider/speculation"
    first = service.engine.speculation.settings().policy
    for wish, policy, bound in (
        ({"max_depth": 2}, first, 2),
        ({"policy": "off"}, "off", 2),
        ({"policy": first, "max_depth": None}, first, None),
    ):
        status, found = ask_json(service, path, wish)
        assert (status, found["policy"], found["max_depth"]) == (200, policy, bound)
        settings = service.engine.speculation.settings()
        assert (settings.policy, settings.max_depth) == (policy, bound)


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ({"policy": "fastest"}, "policy"),
        ({"policy": "\ud800"}, "policy"),
        ({"policy": 3}, "policy"),
        ({"max_depth": 33}, "max_depth"),
        ({"max_depth": -1}, "max_depth"),
        ({"max_depth": 10**30}, "max_depth"),
        ({"max_depth": True}, "max_depth"),
        ({"depth": 3}, "depth"),
    ],
)
def test_a_change_that_cannot_be_is_refused_in_a_sentence(
    service: FakeService, wish: dict[str, Any], name: str
) -> None:
    before = service.engine.speculation.settings()
    status, found = ask_json(service, "/outrider/speculation", wish)
    assert status == 400
    assert name in found["error"]["message"]
    assert service.engine.speculation.settings() == before


def test_speculation_cannot_be_changed_without_an_engine(service: FakeService) -> None:
    service.engine.stop()
    status, found = ask_json(service, "/outrider/speculation", {"policy": "off"})
    assert status == 503
    assert "engine" in found["error"]["message"]


def test_the_last_steps_are_explained_as_far_as_they_are_remembered(service: FakeService) -> None:
    status, found = ask_json(service, "/outrider/explain?last=5")
    assert status == 200
    assert found == {"steps": [], "num_remembered": 0, "calibration": []}


@pytest.mark.parametrize("query", ["last=0", "last=257", "last=x", "step=7", "step=-1"])
def test_steps_that_cannot_be_explained_are_refused(service: FakeService, query: str) -> None:
    status, found = ask_json(service, f"/outrider/explain?{query}")
    assert status == 400
    assert found["error"]["message"]
