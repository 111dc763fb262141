"""What the OpenAPI description allows and what it does not: no answer of 5xx, and nothing left."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fake_engine import FakeService, fake_service
from fuzzing import mutated, strange_values
from hypothesis import HealthCheck, Phase, given, settings
from waits import wait_until

from outrider.gateway.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from outrider.gateway.http.status import SpeculationUpdate

CASES = 60
EXAMPLES = 12  # of each operation
LIMIT_S = 60.0
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "", "prompt": "Hello", "max_tokens": 4, "n": 1, "temperature": 0.5, "stop": ["a"],
        "logprobs": 1, "seed": 3, "logit_bias": {"5": 1.0}, "stream": False, "echo": False,
        "stream_options": None, "top_k": 3, "speculation": "off", "min_tokens": 1,
    },
    "/v1/chat/completions": {
        "model": "", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "n": 1,
        "top_p": 0.9, "logprobs": True, "top_logprobs": 2, "stream": True, "tools": None,
        "response_format": {"type": "text"}, "return_speculation": True, "user": "me",
        "chat_template_kwargs": {"a": 1}, "stream_options": {"include_usage": True},
    },
    "/tokenize": {"prompt": "Hello", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/outrider/speculation": {"policy": "off", "max_depth": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("gw")) as running:
        yield running
        wait_until(lambda: not running.engine.running, 10)
        assert running.client.generate([1, 2], max_tokens=3).usage.completion_tokens == 3


def _post(service: FakeService, path: str, body: bytes) -> int:
    line = http.client.HTTPConnection(service.server.http_address, timeout=LIMIT_S)
    try:
        line.request("POST", path, body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        answer.read()
        return answer.status
    finally:
        line.close()


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_the_wrong_kind_are_refused_without_a_fault(
    service: FakeService, path: str
) -> None:
    rng = random.Random(path)
    for value in strange_values(rng, BODIES[path], CASES):
        status = _post(service, path, json.dumps(value).encode())
        assert status < 500, value


WRONG: tuple[Any, ...] = (
    True, 1, 1.5, -1, "x", [], {}, [[]], [None], [1.5], {"x": []}, 2**70, -(10**40), "\ud800",
)  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
FIELDS = [
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}, set(CompletionRequest.model_fields)),
    (
        "/v1/chat/completions",
        CHAT,
        ChatRequest.model_fields.keys() - GenerationRequest.model_fields,
    ),
    ("/tokenize", {"prompt": "Hello"}, set(TokenizeRequest.model_fields)),
    ("/detokenize", {"tokens": [1]}, set(DetokenizeRequest.model_fields)),
    ("/outrider/speculation", {}, set(SpeculationUpdate.model_fields)),
]


@pytest.mark.parametrize(("path", "valid", "names"), FIELDS, ids=[each[0] for each in FIELDS])
def test_every_field_of_every_wrong_kind_is_told_by_its_name(
    service: FakeService, path: str, valid: dict[str, Any], names: set[str]
) -> None:
    line = http.client.HTTPConnection(service.server.http_address, timeout=LIMIT_S)
    try:
        for name in sorted(names):
            for value in WRONG:
                body = json.dumps(valid | {name: value}).encode()
                line.request("POST", path, body, {"Content-Type": "application/json"})
                answer = line.getresponse()
                told = answer.read()
                assert answer.status in (200, 400, 404), (name, value, told)
                if answer.status != 200:
                    message = json.loads(told)["error"]["message"]
                    assert message.startswith(
                        (name, f"the {name}", "the conversation", "prompt or messages")
                    ), (
                        value,
                        message,
                    )
    finally:
        line.close()


@pytest.mark.parametrize("path", BODIES)
def test_mutated_bodies_are_refused_without_a_fault(service: FakeService, path: str) -> None:
    rng = random.Random(path)
    valid = json.dumps(BODIES[path]).encode()
    for _ in range(CASES):
        body = mutated(rng, valid)
        assert _post(service, path, body) < 500, body


@pytest.mark.thorough
def test_no_request_of_the_description_is_a_fault(service: FakeService) -> None:
    schema = schemathesis.openapi.from_url(f"http://{service.server.http_address}/openapi.json")
    found: list[Any] = list(schema.get_all_operations())
    operations = [each.ok() for each in found]
    assert len(operations) >= 8
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        def call(case: Any) -> None:
            if case.path == "/outrider/drain":
                return
            answer = case.call(timeout=LIMIT_S)
            assert answer.status_code < 500, (case.path, answer.text[:300])

        call()
