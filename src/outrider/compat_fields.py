"""Fields added to messages after a release: old and new processes still understand each other."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")

_ADDED = "added"


def added_field(default: Any) -> Any:
    """Declares a field added later, at the end of a message. A link omits it while it has its
    default, so that an older peer can decode the message, and fills it in where it is missing.
    The sender must know that the peer has the field before it sends another value."""
    return dataclasses.field(default=default, metadata={_ADDED: True})


def added_field_defaults(cls: type) -> tuple[Any, ...]:
    """The defaults of a dataclass's added fields, in order."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)
    found = [each for each in fields if each.metadata.get(_ADDED)]
    if found != list(fields[len(fields) - len(found) :]):
        raise TypeError(f"{cls.__name__} has fields after those that were added to it")
    return tuple(each.default for each in found)


def without_added_fields(message: T) -> T:
    """The message with every added field at its default, for a peer of the first release."""
    if isinstance(message, tuple):
        return type(message)(map(without_added_fields, message))
    if not dataclasses.is_dataclass(message) or isinstance(message, type):
        return message
    changes = {
        each.name: each.default
        if each.metadata.get(_ADDED)
        else without_added_fields(getattr(message, each.name))
        for each in dataclasses.fields(message)
    }
    return dataclasses.replace(message, **changes)
