"""A client takes what `LLM` takes: one prompt or several, as text, ids or mappings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeService, fake_service, tokenizer

from outrider.client import AsyncClient, Client, Completion
from outrider.errors import RequestError
from outrider.scheduler.params import SamplingParams

PROMPT = [10, 11, 12, 13]
OTHER = [20, 21]
SEEDED = SamplingParams(seed=7, max_tokens=6)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("gw")) as running:
        yield running


@pytest.fixture
def client(service: FakeService) -> Client:
    return service.client


def ids(completion: Completion) -> list[int]:
    return completion.token_ids


def test_a_completion_has_the_ids_of_its_first_sample(client: Client) -> None:
    completion = client.generate(PROMPT, SEEDED)
    assert completion.token_ids == completion.samples[0].token_ids
    assert len(completion.token_ids) == 6
    assert Completion().token_ids == []


def test_a_prompt_may_be_a_mapping(client: Client) -> None:
    expected = ids(client.generate(PROMPT, SEEDED))
    assert ids(client.generate({"prompt_token_ids": PROMPT}, SEEDED)) == expected
    text = tokenizer().decode(PROMPT)
    expected = ids(client.generate(text, SEEDED))
    assert ids(client.generate({"prompt": text}, SEEDED)) == expected


def test_several_prompts_are_answered_in_their_order(client: Client) -> None:
    expected = [ids(client.generate(prompt, SEEDED)) for prompt in (PROMPT, OTHER)]
    assert [ids(each) for each in client.generate([PROMPT, OTHER], SEEDED)] == expected
    listed = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": OTHER}]
    assert [ids(each) for each in client.generate(listed, SEEDED)] == expected


def test_more_prompts_than_are_sent_at_once_are_all_answered(client: Client) -> None:
    prompts = [[1 + number] for number in range(150)]
    answers = client.generate(prompts, max_tokens=2, ignore_eos=True)
    assert [len(each.token_ids) for each in answers] == [2] * 150


def test_each_prompt_may_have_parameters_of_its_own(client: Client) -> None:
    params = [SEEDED, SamplingParams(seed=8, max_tokens=3)]
    first, second = client.generate([PROMPT, PROMPT], params)
    assert ids(first) == ids(client.generate(PROMPT, params[0]))
    assert ids(second) == ids(client.generate(PROMPT, params[1]))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda c: c.generate(None), "prompts is None; it must be text, a list of token ids or"),
        (lambda c: c.generate([PROMPT], [SEEDED] * 2), "there are 1 prompts and 2 sampling"),
        (lambda c: c.generate([PROMPT], request_id="a"), "request_id names one request"),
        (
            lambda c: c.generate({"text": "a"}),
            "has the keys ['text']; it must have",
        ),
        (lambda c: c.generate([PROMPT, [-1]]), "token ids >= 0"),
    ],
)
def test_wrong_prompts_are_told_in_one_sentence(
    client: Client, call: Callable[[Any], Any], problem: str
) -> None:
    with pytest.raises(RequestError) as caught:
        call(client)
    assert problem in str(caught.value)


def test_a_closed_client_says_so(service: FakeService) -> None:
    client = Client(service.server.grpc_address)
    client.close()
    for call in (lambda: client.generate("a"), client.status, client.wait_ready):
        with pytest.raises(RequestError, match=r"this client of .* was closed; make another"):
            call()


def test_an_asynchronous_client_does_the_same(service: FakeService, client: Client) -> None:
    async def ask() -> list[list[int]]:
        async with AsyncClient(service.server.grpc_address) as other:
            one = await other.generate({"prompt_token_ids": PROMPT}, SEEDED)
            several = await other.generate([PROMPT, OTHER], SEEDED)
            with pytest.raises(RequestError, match="token ids >= 0"):
                await other.generate([PROMPT, [-1]], SEEDED)
        with pytest.raises(RequestError, match=r"this client of .* was closed; make another"):
            await other.generate(PROMPT)
        return [ids(each) for each in (one, *several)]

    first, second = (ids(client.generate(prompt, SEEDED)) for prompt in (PROMPT, OTHER))
    assert asyncio.run(ask()) == [first, first, second]
