"""Authentication: API keys and their callers."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.api_types.errors import UnauthenticatedError
from outrider.config import ServerConfig
from outrider.gateway.auth.caller import LOCAL, REMOTE, Caller, CallerLimits, Scope
from outrider.gateway.auth.keys_file import Key, key_digest, read_keys
from outrider.gateway.auth.watched_files import WatchedFiles

__all__ = ["LOCAL", "REMOTE", "Caller", "CallerLimits", "Callers", "Scope"]

MAX_KEY_CHARS = 512


class Callers:
    """Identifies callers by their keys.

    `watched` is the file of keys, to be polled for changes; None without one. `clock` returns
    seconds since the epoch, for keys that expire.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._keys: Mapping[bytes, Key] | None = None
        self.watched: WatchedFiles | None = None
        if config.api_key is not None:
            self._keep([Key(Caller("key", frozenset(Scope)), key_digest(config.api_key))])
        elif config.api_keys_file is not None:
            path = Path(config.api_keys_file)
            self.watched = WatchedFiles("the keys", (path,), lambda: self._keep(read_keys(path)))

    @property
    def needs_key(self) -> bool:
        return self._keys is not None

    def identify(self, key: str | None, *, is_local: bool) -> Caller:
        """The caller with this key; raises `UnauthenticatedError` if it is missing or invalid."""
        if self._keys is None:
            return LOCAL if is_local else REMOTE
        if key is None:
            raise UnauthenticatedError(
                "no API key was sent; send 'Authorization: Bearer KEY', or set OUTRIDER_API_KEY "
                "for Outrider's own client."
            )
        is_sane = len(key) <= MAX_KEY_CHARS
        found = self._keys.get(self._blinded(key_digest(key))) if is_sane else None
        if found is None:
            raise UnauthenticatedError("the API key is not valid here; use another.")
        if found.expires_s is not None and self._clock() >= found.expires_s:
            raise UnauthenticatedError(
                f"the key {found.caller.name!r} has expired; ask the server's operator for another."
            )
        return found.caller

    def identify_header(self, values: Sequence[str], *, is_local: bool) -> Caller:
        """The caller that sent these values of the header `Authorization`; usually one."""
        if len(values) > 1 and self.needs_key:
            raise UnauthenticatedError(
                f"there are {len(values)} headers 'Authorization'; send one."
            )
        kind, _, key = (values[0] if values else "").partition(" ")
        return self.identify(key.strip() if kind.lower() == "bearer" else None, is_local=is_local)

    def _keep(self, keys: Sequence[Key]) -> None:
        self._keys = {self._blinded(key.digest): key for key in keys}

    def _blinded(self, digest: bytes) -> bytes:
        """The lookup index of a key. Keyed with a secret: lookup times reveal nothing about other
        keys."""
        return hashlib.blake2b(digest, digest_size=32, key=self._secret).digest()
