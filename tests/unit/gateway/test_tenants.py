"""The opaque ids that engines know keys by."""

from __future__ import annotations

import pytest

from outrider.errors import RequestError
from outrider.gateway.auth.caller import LOCAL, Caller, Scope
from outrider.gateway.auth.tenants import MAX_SALT_CHARS, TenantIds
from outrider.gateway.routing.prefixes import path_of

TENANTS = TenantIds("a secret")


def key(name: str, group: str = "") -> Caller:
    return Caller(name, frozenset({Scope.INFER}), group=group)


def salt(caller: Caller, given: str = "", sharing: str = "group") -> str:
    return TENANTS.cache_salt(caller, given, sharing)


def test_each_key_has_a_salt_of_its_own_unless_it_shares_a_group() -> None:
    alice, bob = salt(key("alice", "team")), salt(key("bob", "team"))
    assert alice == bob
    assert len({alice, salt(key("carol")), salt(key("dave")), salt(key("team"))}) == 4


def test_a_clients_salt_narrows_its_group_and_never_leaves_it() -> None:
    salts = {
        salt(key(name, group), given)
        for name, group in (("alice", ""), ("bob", ""), ("carol", "alice"))
        for given in ("", "salt", "alice", "key bob")
    }
    assert len(salts) == 12
    assert salt(key("a", "team"), "salt") == salt(key("b", "team"), "salt")


def test_without_keys_all_are_one_group() -> None:
    assert salt(LOCAL) == ""
    assert salt(LOCAL, "salt") not in ("", "salt")


def test_sharing_by_all_leaves_only_the_clients_salt() -> None:
    assert salt(key("alice"), sharing="all") == salt(key("bob"), sharing="all") == ""
    narrowed = salt(key("alice"), "salt", sharing="all")
    assert narrowed == salt(key("bob"), "salt", sharing="all") != ""


def test_all_gateways_of_a_server_agree_and_another_servers_do_not() -> None:
    alice = key("alice")
    assert TenantIds("a secret").cache_salt(alice, "", "group") == salt(alice)
    assert TenantIds("another").cache_salt(alice, "", "group") != salt(alice)
    assert "alice" not in salt(alice)


def test_a_tenant_is_a_key_and_nothing_tells_which() -> None:
    alice, bob = TENANTS.tenant(key("alice", "team")), TENANTS.tenant(key("bob", "team"))
    assert alice != bob and "alice" not in alice
    assert TenantIds("a secret").tenant(key("alice")) == alice != salt(key("alice"))
    assert TENANTS.tenant(LOCAL) == ""


@pytest.mark.parametrize("priority", [-1, -100, 51])
def test_a_key_keeps_to_its_priorities(priority: int) -> None:
    caller = Caller("alice", frozenset(), min_priority=0, max_priority=50)
    for fine in (0, 50):
        caller.check_priority(fine)
    with pytest.raises(RequestError, match=f"priority is {priority}; the key 'alice' may use 0"):
        caller.check_priority(priority)


def test_a_salt_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="cache_salt has 257 characters"):
        salt(LOCAL, "a" * (MAX_SALT_CHARS + 1))


def test_a_prompt_is_routed_by_its_salt() -> None:
    paths = [path_of(range(64), 16, salt) for salt in ("", "a", "b")]
    assert len({path.nodes[0] for path in paths}) == 3
    assert len({path.whole for path in paths}) == 3
    assert path_of(range(64), 16, "a") == paths[1]
