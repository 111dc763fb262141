"""Whether the header of a GGUF file fits into the file, before a reader believes it.

The package gguf makes an object for every array item that a header announces, and transformers
reads tokenizers by it. A few bytes that announce 2^40 items would take all memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from outrider.errors import ModelError

MAX_ITEMS = 1 << 21  # of all arrays; a vocabulary of 262,144 tokens with its merges has 1.3 million
MAX_DIMS = 4  # as in ggml
MAX_NESTING = 4
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_LEAST_FIELD_BYTES = 13  # name length, type, one byte
_LEAST_TENSOR_BYTES = 24  # name length, number of dimensions, type, offset


def check_gguf_header(path: Path) -> None:
    """Raises `ModelError` for counts, lengths and sizes that the file is too short for."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Scan(data).run()
    except (OSError, ValueError) as error:
        raise damaged_gguf(path, error) from None


def damaged_gguf(path: Path, error: Exception | str) -> ModelError:
    return ModelError(f"{path} is damaged or not a GGUF file ({error}); download it again.")


class _Scan:
    """Reads lengths and skips what they are of. Raises `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._order = "<"
        self._num_items = 0

    def run(self) -> None:
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
        self._check_count("fields", num_fields, _LEAST_FIELD_BYTES)
        self._check_count("tensors", num_tensors, _LEAST_TENSOR_BYTES)
        for _ in range(num_fields):
            self._skip_string()
            self._skip_value(self._number("I"), 0)
        for _ in range(num_tensors):
            self._skip_tensor()

    def _skip_tensor(self) -> None:
        self._skip_string()
        num_dims = self._number("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"a tensor has {num_dims} dimensions; at most {MAX_DIMS} are known")
        num_values = math.prod(self._number("Q") for _ in range(num_dims))
        if num_values > 8 * len(self._data):
            raise ValueError(f"a tensor of {num_values} values is in {len(self._data)} bytes")
        self._skip(4 + 8)  # type and offset

    def _skip_value(self, kind: int, nesting: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array(nesting)
        elif kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        else:
            raise ValueError(f"a field is of the unknown type {kind}")

    def _skip_array(self, nesting: int) -> None:
        if nesting == MAX_NESTING:
            raise ValueError(f"arrays are nested more than {MAX_NESTING} deep")
        kind, count = self._number("I"), self._number("Q")
        item_bytes = _SCALAR_BYTES.get(kind)
        self._check_count("array items", count, item_bytes or 8)
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise ValueError(f"its arrays have more than {MAX_ITEMS} items")
        if item_bytes is not None:
            self._skip(count * item_bytes)
            return
        for _ in range(count):
            self._skip_value(kind, nesting + 1)

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _number(self, kind: str) -> int:
        number = struct.Struct(self._order + kind)
        start = self._at
        self._skip(number.size)
        found: int = number.unpack_from(self._data, start)[0]
        return found

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self._at:
            raise ValueError(f"{num_bytes} bytes at {self._at} are beyond its end")
        self._at += num_bytes

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        left = len(self._data) - self._at
        if count * least_bytes > left:
            raise ValueError(f"it announces {count} {what}, and has {left} bytes for them")
