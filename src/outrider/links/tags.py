"""Tags of messages on a link. Two releases talk to each other during an upgrade, so a tag stays the
same when its class is renamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)

_TAG = "__link_tag__"


def message(tag: str) -> Callable[[C], C]:
    """Declares a dataclass as a message with that tag."""

    def declare(cls: C) -> C:
        setattr(cls, _TAG, tag)
        return cls

    return declare


def is_message(cls: type) -> bool:
    return _TAG in vars(cls)


def tag_of(cls: type) -> str:
    """The tag of a message class; its name if none was declared."""
    tag: str = vars(cls).get(_TAG, cls.__name__)
    return tag
