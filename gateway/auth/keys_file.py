"""The file of API keys with their scopes and limits. Holds digests, never keys.

keys:
  - name: alice
    sha256: "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5"
    scopes: [infer, admin]
    requests_per_minute: 60
    tokens_per_minute: 20000
    max_concurrent: 8
    expires: 2030-01-31
    group: research
    min_priority: -10
    max_priority: 50
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider.config.rules import did_you_mean
from outrider.errors import ConfigError
from outrider.gateway.auth.caller import Caller, CallerLimits, Scope
from outrider.scheduler.params import LATEST_PRIORITY, SOONEST_PRIORITY

MAX_FILE_BYTES = 16 * 2**20
KEY_PREFIX = "or-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
_PRIORITIES = ("min_priority", "max_priority")
DEFAULT_MIN_PRIORITY = 0  # by default, a key may lower its priority but not raise it
_FIELDS = ("name", "sha256", "scopes", "expires", "group", *_PRIORITIES, *_LIMITS)


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the file. `expires_s` is in seconds since the epoch."""

    caller: Caller
    digest: bytes
    expires_s: float | None = None


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file; raises `ConfigError` if it is invalid."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"server.api_keys_file is {str(path)!r}, which cannot be read: {error.strerror}; "
            "make a key for it with 'outrider keys new NAME'."
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: it has more than {MAX_FILE_BYTES} bytes; remove old keys.")
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{place}: this is not valid YAML; correct it.") from None
    entries = found.get("keys") if isinstance(found, dict) and len(found) == 1 else None
    if not isinstance(entries, list):
        raise ConfigError(
            f"{path}: it must hold the one list 'keys:' with an entry for each key; make one with "
            "'outrider keys new NAME'."
        )
    keys = tuple(
        _key(f"{path}: entry {number} of keys", entry) for number, entry in enumerate(entries, 1)
    )
    _check_together(path, keys)
    return keys


def entry_of(entry: Mapping[str, Any]) -> Key:
    """The key of an entry; raises `ConfigError` if it is invalid."""
    return _key("this entry", entry)


def new_key() -> str:
    """A random key of 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> bytes:
    """The stored digest of a key. A plain hash suffices for random keys, as `new_key` makes."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _key(place: str, entry: Any) -> Key:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place} must have fields such as 'name:'.")
    name = entry.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{place} has the name {name!r}; it must be 1 to 64 letters, digits and any of '._@-'."
        )
    place += f" ({name})"
    for field in entry:
        if field not in _FIELDS:
            raise ConfigError(f"{place} has no field {field!r}.{did_you_mean(str(field), _FIELDS)}")
    limits = {field: _limit(place, field, entry[field]) for field in _LIMITS if field in entry}
    caller = Caller(
        name,
        _scopes(place, entry.get("scopes", ["infer"])),
        CallerLimits(**limits),
        _group(place, entry.get("group")),
        *_priorities(place, entry),
    )
    return Key(caller, _digest(place, entry.get("sha256")), _expiry(place, entry.get("expires")))


def _digest(place: str, given: Any) -> bytes:
    if not isinstance(given, str) or _DIGEST.fullmatch(given) is None:
        # The value is not quoted: it may be the key itself, put there by mistake.
        raise ConfigError(
            f"{place} has a wrong sha256; it must be the 64 hexadecimal digits of the key's "
            "digest in quotes, never the key."
        )
    return bytes.fromhex(given)


def _scopes(place: str, given: Any) -> frozenset[Scope]:
    known = {scope.value for scope in Scope}
    if not isinstance(given, list) or not given or not all(each in known for each in given):
        raise ConfigError(
            f"{place} has the scopes {given!r}; it must be a list of {' and '.join(sorted(known))}."
        )
    return frozenset(map(Scope, given))


def _group(place: str, given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, str) or _NAME.fullmatch(given) is None:
        raise ConfigError(
            f"{place} has the group {given!r}; it must be 1 to 64 letters, digits and any of "
            "'._@-'."
        )
    return given


def _priorities(place: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    low = entry.get("min_priority", DEFAULT_MIN_PRIORITY)
    high = entry.get("max_priority", LATEST_PRIORITY)
    for field, given in zip(_PRIORITIES, (low, high), strict=True):
        is_whole = isinstance(given, int) and not isinstance(given, bool)
        if not is_whole or not SOONEST_PRIORITY <= given <= LATEST_PRIORITY:
            raise ConfigError(
                f"{place} has {field} {given!r}; it must be a whole number from "
                f"{SOONEST_PRIORITY} to {LATEST_PRIORITY}."
            )
    if not low <= 0 <= high:
        raise ConfigError(
            f"{place} has priorities from {low} to {high}; 0, which requests have by default, "
            "must be one of them."
        )
    return low, high


def _limit(place: str, field: str, given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{place} has {field} {given!r}; it must be a whole number >= 1.")
    return given


def _expiry(place: str, given: Any) -> float | None:
    """A date expires at the end of its day; times without a zone are UTC."""
    if given is None:
        return None
    when = _moment(given) if isinstance(given, str) else given
    if isinstance(when, datetime.datetime):
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        return when.timestamp()
    if isinstance(when, datetime.date):
        midnight = datetime.datetime.combine(when, datetime.time(), datetime.UTC)
        return (midnight + datetime.timedelta(days=1)).timestamp()
    raise ConfigError(
        f"{place} expires {given!r}; write a day or a time such as 2030-01-31 or "
        "2030-01-31T12:00:00Z."
    )


def _moment(text: str) -> datetime.date | None:
    for kind in (datetime.date, datetime.datetime):
        with contextlib.suppress(ValueError):
            return kind.fromisoformat(text)
    return None


def _check_together(path: Path, keys: tuple[Key, ...]) -> None:
    names, digests = set[str](), set[bytes]()
    for key in keys:
        name = key.caller.name
        if name in names or key.digest in digests:
            what = "name" if name in names else "digest"
            raise ConfigError(f"{path}: the key {name!r} has the {what} of another; remove one.")
        names.add(name)
        digests.add(key.digest)
