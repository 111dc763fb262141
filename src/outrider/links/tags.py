"""The tag of a message on a link. Processes of two releases meet during an upgrade, so a tag stays
when its class is renamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)

_TAG = "__link_tag__"


def message(tag: str) -> Callable[[C], C]:
    """Declares a dataclass to be a message with that tag."""

    def declare(cls: C) -> C:
        setattr(cls, _TAG, tag)
        return cls

    return declare


def is_message(cls: type) -> bool:
    return _TAG in vars(cls)


def tag_of(cls: type) -> str:
    """What messages of the class begin with; its name if none was declared."""
    tag: str = vars(cls).get(_TAG, cls.__name__)
    return tag
