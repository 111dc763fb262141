"""What keys can learn of each other's prompts from a real engine's cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fake_engine import MODEL, SECRET, fake_tokenizer_source, running_server

from outrider.client import Client
from outrider.config import EngineConfig
from outrider.engine.build import build_engine
from outrider.engine.doorway import Doorway
from outrider.engine.service import EngineService
from outrider.gateway.front import Front
from outrider.gateway.keys_file import key_digest

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

BLOCK_SIZE = 16


@pytest.fixture(scope="module", params=["group", "all"])
def sharing(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sharing: str) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("groups")
    keys = folder / "keys.yaml"
    groups = {"alice": "", "bob": "", "carol": ", group: team", "dave": ", group: team"}
    keys.write_text(
        "keys:\n"
        + "".join(
            f"  - {{name: {name}, sha256: '{key_digest(name).hex()}'{group}}}\n"
            for name, group in groups.items()
        )
    )
    config = EngineConfig.from_settings(
        {
            "target.model": MODEL,
            "target.max_model_len": 256,
            "cache.kv_cache_gb": 0.05,
            "cache.block_size": BLOCK_SIZE,
            "cache.prefix_sharing": sharing,
        }
    )
    doorway = Doorway([f"unix:{folder}/engine.sock"], SECRET, {})
    engine = build_engine(config)
    service = EngineService(engine, doorway)
    stepping = threading.Thread(target=service.run)
    stepping.start()
    try:
        place: Any = SimpleNamespace(address=doorway.addresses[0])
        with (
            mock.patch("outrider.gateway.served.load_tokenizer", fake_tokenizer_source),
            running_server(place, api_keys_file=str(keys)) as front,
        ):
            yield front
    finally:
        service.stop()
        stepping.join(60)
        service.close()
        doorway.close()
        engine.close()


def cached(server: Front, name: str, first: int, salt: str = "") -> int:
    """Tokens of a prompt of three blocks and one token that were cached for a key."""
    prompt = [first, *range(100, 100 + 3 * BLOCK_SIZE)]
    with Client(server.grpc_address, api_key=name) as client:
        client.wait_ready(60)
        options = {"cache_salt": salt} if salt else {}
        usage = client.generate(prompt, max_tokens=1, **options).usage
        return int(usage.cached_tokens)


def test_a_key_does_not_learn_what_another_has_sent(server: Front, sharing: str) -> None:
    assert cached(server, "alice", 1) == 0
    assert cached(server, "bob", 1) == (3 * BLOCK_SIZE if sharing == "all" else 0)
    assert cached(server, "alice", 1) == cached(server, "bob", 1) == 3 * BLOCK_SIZE


def test_keys_of_a_group_share(server: Front) -> None:
    assert cached(server, "carol", 2) == 0
    assert cached(server, "dave", 2) == 3 * BLOCK_SIZE


def test_a_salt_narrows_and_never_reaches_another_group(server: Front, sharing: str) -> None:
    assert cached(server, "carol", 3, "salt") == 0
    assert cached(server, "dave", 3) == 0
    assert cached(server, "dave", 3, "salt") == 3 * BLOCK_SIZE
    assert cached(server, "alice", 3, "salt") == (3 * BLOCK_SIZE if sharing == "all" else 0)
