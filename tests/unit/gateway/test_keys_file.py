"""The file of keys: what it may hold and how mistakes are reported."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.errors import ConfigError
from outrider.gateway.auth.caller import CallerLimits, Scope
from outrider.gateway.auth.keys_file import key_digest, new_key, read_keys

DIGEST = key_digest("a key").hex()


def _write(folder: Path, *entries: Any) -> Path:
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    return path


def test_an_entry_has_scopes_limits_and_an_end(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        {
            "name": "alice",
            "sha256": DIGEST,
            "scopes": ["infer", "admin"],
            "requests_per_minute": 60,
            "tokens_per_minute": 1000,
            "max_concurrent": 2,
            "expires": datetime.date(2030, 1, 31),
            "group": "research",
            "min_priority": -10,
            "max_priority": 50,
        },
        {"name": "bob", "sha256": key_digest("another").hex()},
    )
    alice, bob = read_keys(path)
    assert alice.caller.scopes == {Scope.INFER, Scope.ADMIN}
    assert alice.caller.limits == CallerLimits(60, 1000, 2)
    assert alice.digest == key_digest("a key")
    assert (alice.caller.group, bob.caller.group) == ("research", "")
    assert (alice.caller.min_priority, alice.caller.max_priority) == (-10, 50)
    assert (bob.caller.min_priority, bob.caller.max_priority) == (0, 100)
    assert bob.caller.scopes == {Scope.INFER}
    assert bob.caller.limits == CallerLimits() and bob.expires_s is None


@pytest.mark.parametrize(
    ("given", "end"),
    [
        (datetime.date(2030, 1, 31), "2030-02-01T00:00:00+00:00"),
        ("2030-01-31", "2030-02-01T00:00:00+00:00"),
        ("2030-01-31T12:00:00Z", "2030-01-31T12:00:00+00:00"),
        ("2030-01-31T12:00:00+02:00", "2030-01-31T10:00:00+00:00"),
        (datetime.datetime(2030, 1, 31, 12), "2030-01-31T12:00:00+00:00"),
    ],
)
def test_a_key_lasts_until_the_end_of_a_day_or_a_moment(
    tmp_path: Path, given: Any, end: str
) -> None:
    (key,) = read_keys(_write(tmp_path, {"name": "a", "sha256": DIGEST, "expires": given}))
    assert key.expires_s == datetime.datetime.fromisoformat(end).timestamp()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("alice", "must have fields"),
        ({}, "has the name None"),
        ({"name": "a b"}, "has the name 'a b'"),
        ({"name": "a"}, "wrong sha256"),
        ({"name": "a", "sha256": "or-the-key-itself"}, "wrong sha256"),
        ({"name": "a", "sha256": DIGEST, "scope": ["infer"]}, "Did you mean 'scopes'"),
        ({"name": "a", "sha256": DIGEST, "scopes": ["root"]}, "has the scopes ['root']"),
        ({"name": "a", "sha256": DIGEST, "scopes": []}, "has the scopes []"),
        ({"name": "a", "sha256": DIGEST, "max_concurrent": 0}, "has max_concurrent 0"),
        ({"name": "a", "sha256": DIGEST, "tokens_per_minute": True}, "has tokens_per_minute True"),
        ({"name": "a", "sha256": DIGEST, "expires": "soon"}, "expires 'soon'"),
        ({"name": "a", "sha256": DIGEST, "group": "a b"}, "has the group 'a b'"),
        ({"name": "a", "sha256": DIGEST, "group": 7}, "has the group 7"),
        ({"name": "a", "sha256": DIGEST, "min_priority": -101}, "has min_priority -101"),
        ({"name": "a", "sha256": DIGEST, "max_priority": "high"}, "has max_priority 'high'"),
        ({"name": "a", "sha256": DIGEST, "min_priority": 5}, "from 5 to 100; 0, which"),
    ],
)
def test_a_wrong_entry_is_told_by_its_number_and_never_shows_a_key(
    tmp_path: Path, entry: Any, sentence: str
) -> None:
    path = _write(tmp_path, entry)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: entry 1 of keys") and sentence in message
    assert "or-the-key-itself" not in message


def test_two_keys_may_share_neither_name_nor_digest(tmp_path: Path) -> None:
    one, other = {"name": "a", "sha256": DIGEST}, {"name": "b", "sha256": "0" * 64}
    for wrong in (one | {"sha256": "0" * 64}, other | {"sha256": DIGEST}):
        with pytest.raises(ConfigError, match="of another; remove one"):
            read_keys(_write(tmp_path, one, other, wrong))


@pytest.mark.parametrize("text", ["", "keys:", "- name: a", "keys: [", "\x00", "a: 1\nkeys: []"])
def test_a_file_that_is_no_list_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.yaml"):
        read_keys(path)


def test_a_missing_file_is_named_with_the_setting_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys_file .*outrider keys new"):
        read_keys(tmp_path / "none.yaml")


def test_new_keys_differ_and_fit_into_a_header() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.isascii() and key.isprintable() and len(key) > 40 for key in keys)
