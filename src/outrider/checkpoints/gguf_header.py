"""The header of a GGUF file: its fields and where its tensors lie.

The package gguf, which transformers uses for tokenizers, makes an object for every array item that
a header announces. A few bytes that announce 2^40 items would take all memory, so all counts are
checked here first. Items of the tokenizer are skipped, not read.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ModelError

MAX_ITEMS = 1 << 21  # of all arrays; a vocabulary of 262,144 tokens with its merges has 1.3 million
MAX_DIMS = 4  # as in ggml
MAX_NESTING = 4
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_SCALAR_BYTES = {kind: struct.calcsize(f"<{code}") for kind, code in _SCALARS.items()}
_TOKENIZER = "tokenizer."
_ALIGNMENT, _USUAL_ALIGNMENT = "general.alignment", 32
_MIN_FIELD_BYTES = 13  # name length, type, one byte
_MIN_TENSOR_BYTES = 24  # name length, number of dimensions, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    kind: int  # as `gguf.GGMLQuantizationType` numbers them
    shape: tuple[int, ...]  # rows first
    offset: int  # from `GgufHeader.data_start`


@dataclass(frozen=True, slots=True)
class GgufHeader:
    fields: dict[str, Any]  # without the arrays of the tokenizer
    array_lens: dict[str, int]  # of the tokenizer's arrays, by name
    tensors: list[GgufTensor]
    alignment: int
    data_start: int
    order: str  # of bytes: "<" or ">"


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises `ModelError` for counts, lengths and sizes beyond the file's size."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(data).run()
    except (OSError, ValueError) as error:
        raise damaged_gguf(path, error) from None


def damaged_gguf(path: Path, error: Exception | str) -> ModelError:
    return ModelError(f"{path} is damaged or not a GGUF file ({error}); download it again.")


class _HeaderReader:
    """Parses a header, skipping the tokenizer. Raises `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._order = "<"
        self._num_items = 0

    def run(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version & 0xFFFF == 0:  # written on a machine of the other byte order
            self._order, self._at = ">", 4
            version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; known are 2 and 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self._check_count("fields", num_fields, _MIN_FIELD_BYTES)
        self._check_count("tensors", num_tensors, _MIN_TENSOR_BYTES)
        fields, array_lens = self._fields(num_fields)
        tensors = {tensor.name: tensor for tensor in (self._tensor() for _ in range(num_tensors))}
        if len(tensors) < num_tensors:
            raise ValueError("two of its tensors have the same name")
        alignment = fields.get(_ALIGNMENT, _USUAL_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{_ALIGNMENT} is {alignment!r}")
        start = self._at + -self._at % alignment
        return GgufHeader(fields, array_lens, [*tensors.values()], alignment, start, self._order)

    def _fields(self, count: int) -> tuple[dict[str, Any], dict[str, int]]:
        """If a name occurs twice, the first field counts."""
        fields: dict[str, Any] = {}
        array_lens: dict[str, int] = {}
        for _ in range(count):
            name, kind = self._string(), self._number("I")
            if kind == _ARRAY and name.startswith(_TOKENIZER):
                array_lens.setdefault(name, self._skip_array(0))
            else:
                fields.setdefault(name, self._value(kind, 0))
        return fields, array_lens

    def _tensor(self) -> GgufTensor:
        name, num_dims = self._string(), self._number("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"a tensor has {num_dims} dimensions; at most {MAX_DIMS} are known")
        dims = [self._number("Q") for _ in range(num_dims)]
        num_values = math.prod(dims)
        if num_values > 8 * len(self._data):
            raise ValueError(f"a tensor of {num_values} values is in {len(self._data)} bytes")
        return GgufTensor(name, self._number("I"), tuple(reversed(dims)), self._number("Q"))

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            own_kind, count = self._array_head(nesting)
            return [self._value(own_kind, nesting + 1) for _ in range(count)]
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        raise ValueError(f"a field is of the unknown type {kind}")

    def _array_head(self, nesting: int) -> tuple[int, int]:
        if nesting == MAX_NESTING:
            raise ValueError(f"arrays are nested more than {MAX_NESTING} deep")
        kind, count = self._number("I"), self._number("Q")
        self._check_count("array items", count, _SCALAR_BYTES.get(kind) or 8)
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise ValueError(f"its arrays have more than {MAX_ITEMS} items")
        return kind, count

    def _skip_array(self, nesting: int) -> int:
        kind, count = self._array_head(nesting)
        if kind in _SCALAR_BYTES:
            self._skip(count * _SCALAR_BYTES[kind])
            return count
        if kind not in (_STRING, _ARRAY):
            raise ValueError(f"a field is of the unknown type {kind}")
        for _ in range(count):
            if kind == _STRING:
                self._skip(self._number("Q"))
            else:
                self._skip_array(nesting + 1)
        return count

    def _string(self) -> str:
        size = self._number("Q")
        start = self._at
        self._skip(size)
        return self._data[start : start + size].decode()

    def _number(self, kind: str) -> Any:
        number = struct.Struct(self._order + kind)
        start = self._at
        self._skip(number.size)
        return number.unpack_from(self._data, start)[0]

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self._at:
            raise ValueError(f"{num_bytes} bytes at {self._at} are beyond its end")
        self._at += num_bytes

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        left = len(self._data) - self._at
        if count * min_bytes > left:
            raise ValueError(f"it announces {count} {what}, and has {left} bytes for them")
