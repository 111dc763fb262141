"""What keys can learn of each other's prompts from a real engine's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from keyed_server import server_with_keys

from outrider.client import Client, Completion
from outrider.gateway.frontend import Frontend

pytestmark = [pytest.mark.model]

BLOCK_SIZE = 16


@pytest.fixture(scope="module", params=["group", "all"])
def sharing(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sharing: str) -> Iterator[Frontend]:
    fields = {"alice": "", "bob": "", "carol": ", group: team", "dave": ", group: team"}
    settings = {"cache.block_size": BLOCK_SIZE, "cache.prefix_sharing": sharing}
    with server_with_keys(tmp_path_factory.mktemp("groups"), fields, settings) as front:
        yield front


def cached(server: Frontend, name: str, first: int, salt: str = "") -> int:
    """Tokens of a prompt of three blocks and one token that were cached for a key."""
    prompt = [first, *range(100, 100 + 3 * BLOCK_SIZE)]
    with Client(server.grpc_address, api_key=name) as client:
        client.wait_ready(60)
        options = {"cache_salt": salt} if salt else {}
        completion: Completion = client.generate(prompt, max_tokens=1, **options)
        return completion.usage.cached_tokens


def test_a_key_does_not_learn_what_another_has_sent(server: Frontend, sharing: str) -> None:
    assert cached(server, "alice", 1) == 0
    assert cached(server, "bob", 1) == (3 * BLOCK_SIZE if sharing == "all" else 0)
    assert cached(server, "alice", 1) == cached(server, "bob", 1) == 3 * BLOCK_SIZE


def test_keys_of_a_group_share(server: Frontend) -> None:
    assert cached(server, "carol", 2) == 0
    assert cached(server, "dave", 2) == 3 * BLOCK_SIZE


def test_a_salt_narrows_and_never_reaches_another_group(server: Frontend, sharing: str) -> None:
    assert cached(server, "carol", 3, "salt") == 0
    assert cached(server, "dave", 3) == 0
    assert cached(server, "dave", 3, "salt") == 3 * BLOCK_SIZE
    assert cached(server, "alice", 3, "salt") == (3 * BLOCK_SIZE if sharing == "all" else 0)
