"""Fields that were added to messages after a release, whose processes must still be understood."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")

_ADDED = "added"


def added(default: Any) -> Any:
    """A field at the end of a message, added later. It is left out on a link while it has its
    default, so that a peer without it understands the message, and filled in where it is missing.
    The sender must know that the peer has it."""
    return dataclasses.field(default=default, metadata={_ADDED: True})


def added_defaults(cls: type) -> tuple[Any, ...]:
    """Of the fields at the end of a dataclass that were added, in their order."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)
    found = [each for each in fields if each.metadata.get(_ADDED)]
    if found != list(fields[len(fields) - len(found) :]):
        raise TypeError(f"{cls.__name__} has fields after those that were added to it")
    return tuple(each.default for each in found)


def without_added(message: T) -> T:
    """The message as a peer knows it that has none of the added fields."""
    if isinstance(message, tuple):
        return type(message)(map(without_added, message))
    if not dataclasses.is_dataclass(message) or isinstance(message, type):
        return message
    changes = {
        each.name: each.default
        if each.metadata.get(_ADDED)
        else without_added(getattr(message, each.name))
        for each in dataclasses.fields(message)
    }
    return dataclasses.replace(message, **changes)
