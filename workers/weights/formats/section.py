"""A part of a quantization config, checked as it is read."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ModelError
from outrider.workers.models.checks import Bounds

_SIZES = Bounds(1, 2**20)
_MAX_TEXTS, _MAX_TEXT_LEN = 2**16, 512
_MAX_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Section:
    """`name` is where it stands in the checkpoint's files, for errors."""

    name: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, value: Any) -> Section:
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "an object")
        return cls(name, value)

    def section(self, key: str) -> Section | None:
        value = self.values.get(key)
        name = f"{self.name}.{key[:_MAX_SHOWN]}"
        return None if value is None else Section.of(name, value)

    def one_of(self, key: str, supported: Collection[Any], default: Any = None) -> Any:
        """Its value, which must be one of these: anything else is refused by name."""
        value = self.values.get(key, default)
        if not any(type(value) is type(each) and value == each for each in supported):
            known = ", ".join(map(repr, supported))
            raise ModelError(
                f"{self.name}.{key} is {reprlib.repr(value)}, which is not supported; known are "
                f"{known}: take a checkpoint quantized so, or the one it was made from."
            )
        return value

    def sizes(self, key: str) -> tuple[int, int]:
        value = self.values.get(key)
        if isinstance(value, str) and len(value) <= _MAX_SHOWN:  # as "128x128"
            value = [int(part) if part.isdecimal() else part for part in value.split("x")]
        if not isinstance(value, list) or len(value) != 2:
            raise _wrong(f"{self.name}.{key}", value, "two sizes")
        first, second = (_SIZES.check(f"{self.name}.{key}", each) for each in value)
        return first, second

    def size(self, key: str) -> int:
        return int(_SIZES.check(f"{self.name}.{key}", self.values.get(key)))

    def group_size(self, key: str) -> int:
        """Inputs that share a scale; 0, written as -1, is all."""
        return 0 if self.values.get(key) == -1 else self.size(key)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        if (
            not isinstance(value, list)
            or len(value) > _MAX_TEXTS
            or not all(isinstance(each, str) and len(each) <= _MAX_TEXT_LEN for each in value)
        ):
            raise _wrong(f"{self.name}.{key}", value, "a list of names")
        return tuple(value)


def _wrong(name: str, value: Any, expected: str) -> ModelError:
    return ModelError(
        f"{name} is {reprlib.repr(value)}, and has to be {expected}; get the complete checkpoint "
        "again."
    )
