"""The subprocess side of `subprocess_pool`: reads tasks and writes answers until it is killed.

It runs as a file and imports nothing of ours but its task. Tasks and answers are msgpack with a
four-byte length; an answer also has a byte that says whether the process has retained too much
memory to be reused. The parent enforces the timeout; memory, and CPU time for lack of a parent, are
limited here.
"""

from __future__ import annotations

import importlib
import math
import os
import resource
import socket
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import msgpack

_IDS = 1  # an array of token ids, a twentieth of the memory of a list
# The module whose `answer` runs the task, by name.
TASKS = {"body": "outrider.text.json_bodies", "render": "outrider.text.rendering"}


def main(task: str, fileno: int, timeout_s: float, memory_bytes: int) -> None:
    work = importlib.import_module(TASKS[task]).answer
    _limit_memory(memory_bytes)
    max_resident_bytes = _resident_bytes() + memory_bytes // 4
    with socket.socket(fileno=fileno) as parent, parent.makefile("rwb") as stream:
        _write(stream, packed("ready"), is_spent=False)
        while head := stream.read(4):
            question = unpacked(stream.read(int.from_bytes(head, "big")))
            _limit_time(timeout_s)
            data = _answer(work, question)
            del question
            # Memory that one task retains must not be missing for the next.
            _write(stream, data, is_spent=_resident_bytes() > max_resident_bytes)
            del data


def _answer(work: Any, question: dict[str, Any]) -> bytes:
    try:
        return packed({"result": work(question)})
    except MemoryError:
        return packed({"error": "it takes too much memory"})
    # A template is a program, and may raise anything.
    except Exception as error:
        return packed({"error": str(error)[:1000] or type(error).__name__})


def packed(value: Any) -> bytes:
    # JSON may have lone surrogates, which UTF-8 cannot encode.
    data: bytes = msgpack.packb(value, default=_ids_packed, unicode_errors="surrogatepass")
    return data


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(
        data, ext_hook=_ids_unpacked, unicode_errors="surrogatepass", strict_map_key=False
    )


def _ids_packed(value: Any) -> msgpack.ExtType:
    if not isinstance(value, array):
        raise TypeError(f"cannot send {type(value).__name__}")
    return msgpack.ExtType(_IDS, value.tobytes())


def _ids_unpacked(code: int, data: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(data)
    return ids


def _write(stream: Any, data: bytes, *, is_spent: bool) -> None:
    stream.write(len(data).to_bytes(4, "big") + bytes([is_spent]))
    stream.write(data)
    stream.flush()


def _resident_bytes() -> int:
    return _statm()[1]


def _statm() -> list[int]:
    """Mapped bytes, resident bytes, and others."""
    page = os.sysconf("SC_PAGESIZE")
    return [int(pages) * page for pages in Path("/proc/self/statm").read_text().split()]


def _limit_memory(more_bytes: int) -> None:
    limit = _statm()[0] + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(more_s: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + more_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
