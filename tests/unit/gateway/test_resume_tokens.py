"""Tokens to resume with: whom they let in, and for what; and what may be brought along."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from outrider.api_types.errors import ForbiddenError
from outrider.errors import RequestError
from outrider.gateway.resume import (
    MAX_HELD_TOKENS,
    ResumeTokens,
    digest_of,
    new_resume_id,
    resumption_from_proto,
)
from outrider.proto import generation_pb2
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import RequestSpec

REQUEST = digest_of(generation_pb2.GenerateRequest(text="a"))
OTHER = digest_of(generation_pb2.GenerateRequest(text="b"))
TOKENS = ResumeTokens("a secret")
RESUME_ID = new_resume_id()
TOKEN = TOKENS.make(RESUME_ID, "me", REQUEST, 5)


def test_a_token_names_the_request_to_every_gateway_of_the_secret() -> None:
    assert ResumeTokens("a secret").read(TOKEN, "me", REQUEST, 5) == RESUME_ID
    assert ResumeTokens("a secret").resume_id(TOKEN, "me") == RESUME_ID


@pytest.mark.parametrize(
    ("secret", "caller", "request_digest", "seed"),
    [
        ("another secret", "me", REQUEST, 5),
        ("a secret", "you", REQUEST, 5),
        ("a secret", "", REQUEST, 5),
        ("a secret", "me", OTHER, 5),
        ("a secret", "me", REQUEST, 6),
    ],
)
def test_a_token_is_good_for_its_own_server_key_request_and_seed_only(
    secret: str, caller: str, request_digest: bytes, seed: int
) -> None:
    with pytest.raises(ForbiddenError, match="resume_token is not valid for this request"):
        ResumeTokens(secret).read(TOKEN, caller, request_digest, seed)


def test_a_token_with_any_bit_changed_is_refused() -> None:
    given = base64.urlsafe_b64decode(TOKEN)
    for place in range(len(given)):
        changed = bytearray(given)
        changed[place] ^= 1
        with pytest.raises(ForbiddenError):
            TOKENS.resume_id(base64.urlsafe_b64encode(changed).decode(), "me")


@pytest.mark.parametrize("token", ["", "a", "ä", "!" * 40, TOKEN[:-4], TOKEN + "AAAA", "A" * 10**6])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ForbiddenError):
        TOKENS.read(token, "me", REQUEST, 5)


def test_requests_that_differ_in_any_field_have_digests_of_their_own() -> None:
    requests = [
        generation_pb2.GenerateRequest(text="a"),
        generation_pb2.GenerateRequest(text="a", resumable=True),
        generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1])),
        generation_pb2.GenerateRequest(
            text="a", sampling=generation_pb2.SamplingParameters(logit_bias={1: 2.0, 3: 4.0})
        ),
        generation_pb2.GenerateRequest(
            text="a", sampling=generation_pb2.SamplingParameters(logit_bias={3: 2.0, 1: 4.0})
        ),
    ]
    assert len({digest_of(each) for each in requests}) == len(requests)


# -- what is brought along --------------------------------------------------------------------

SPEC = RequestSpec((1, 2, 3), SamplingParams(n=2, prompt_logprobs=1), seed=5, max_len=10)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"samples": [{"index": 2}]}, "samples holds sample 2; give each of the 2"),
        ({"samples": [{"index": 1}, {"index": 1}]}, "samples holds sample 1; give each"),
        ({"samples": [{"token_ids": [1] * 8}]}, "sample 0 holds 8 tokens, but .* may generate 7"),
        ({"samples": [{"token_ids": [5, 50]}]}, "sample 0 holds 50; .* from 0 to 49"),
        ({"prompt_logprobs": 4}, "prompt_logprobs is 4, but the request has 3"),
        ({"samples": [{}] * 129}, "samples has 129 entries"),
        ({"samples": [{"speculation": {"rounds": 2**50}}]}, "speculation of sample 0"),
        ({"samples": [{"speculation": {"verified_at": [1]}}]}, "speculation of sample 0"),
        (
            {"samples": [{"speculation": {"verified_at": [1] * 40, "accepted_at": [1] * 40}}]},
            "speculation of sample 0",
        ),
    ],
)
def test_what_a_client_claims_to_have_is_within_the_limits_of_its_request(
    held: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        resumption_from_proto(generation_pb2.ResumeRequest(**held), "id").check(SPEC, 50)


def test_a_request_with_very_many_tokens_in_hand_is_not_resumed() -> None:
    spec = RequestSpec((1,), SamplingParams(n=2), seed=5, max_len=MAX_HELD_TOKENS)
    half = {"token_ids": [1] * (MAX_HELD_TOKENS // 2 + 1)}
    request = generation_pb2.ResumeRequest(samples=[half, half | {"index": 1}])
    with pytest.raises(RequestError, match="too many to resume"):
        resumption_from_proto(request, "id").check(spec, 50)
