"""Opaque tenant ids and cache salts, so that no engine learns an API key or its name.

They are keyed hashes. The hash key is derived from the secret that engines and gateways share, so
all gateways of a server compute equal ids.
"""

from __future__ import annotations

import hashlib
import hmac

from outrider.errors import RequestError
from outrider.gateway.auth.caller import Caller

MAX_SALT_CHARS = 256
SHARING_BY_ALL = "all"  # of `cache.prefix_sharing`, beside "group"
_LABEL = b"outrider tenants 1"
_ID_BYTES = 16


class TenantIds:
    """Makes the ids of one server."""

    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), _LABEL, hashlib.sha256)

    def tenant(self, caller: Caller) -> str:
        """The tenant id of a request; "" without keys."""
        return self._id("tenant", caller.name) if caller.name else ""

    def cache_salt(self, caller: Caller, given: str, sharing: str) -> str:
        """The salt of a request's KV blocks; `given` is the client's own salt or "".

        The client's salt narrows what the caller's group shares; it never replaces the group.
        """
        if len(given) > MAX_SALT_CHARS:
            raise RequestError(
                f"cache_salt has {len(given)} characters; shorten it to {MAX_SALT_CHARS} or fewer."
            )
        group = "" if sharing == SHARING_BY_ALL else _group_of(caller)
        return self._id("salt", group, given) if group or given else ""

    def _id(self, *parts: str) -> str:
        # Length prefixes: no two lists of parts encode the same.
        encoded = [part.encode(errors="surrogatepass") for part in parts]
        data = b"".join(len(part).to_bytes(4) + part for part in encoded)
        return hashlib.blake2b(data, key=self._key, digest_size=_ID_BYTES).hexdigest()


def _group_of(caller: Caller) -> str:
    """A key without a group is its own group, distinct from a group of that name; "" without
    keys."""
    if caller.group:
        return f"group {caller.group}"
    return f"key {caller.name}" if caller.name else ""
