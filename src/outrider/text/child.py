"""A process that does work which may take too much: a question in, an answer out, until it is
killed.

It is run as a file and imports nothing of ours but the task it was started for. Questions and
answers are msgpack behind their length in four bytes; in an answer a byte follows that says whether
the process has kept too much memory to be asked again. The parent limits the time; memory, and time
if there is no parent any more, are limited here.
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

_IDS = 1  # an array of token ids, which takes a twentieth of the memory of a list
# By name, the module whose `answer` does it.
TASKS = {"body": "outrider.text.bodies", "render": "outrider.text.rendering"}


def main(task: str, fileno: int, timeout_s: float, memory_bytes: int) -> None:
    work = importlib.import_module(TASKS[task]).answer
    _limit_memory(memory_bytes)
    most_kept = _resident_bytes() + memory_bytes // 4
    with socket.socket(fileno=fileno) as parent, parent.makefile("rwb") as stream:
        _say(stream, packed("ready"), is_spent=False)
        while head := stream.read(4):
            question = unpacked(stream.read(int.from_bytes(head, "big")))
            _limit_time(timeout_s)
            data = _answer(work, question)
            del question
            # The memory that a question leaves behind is not to be missed by the next.
            _say(stream, data, is_spent=_resident_bytes() > most_kept)
            del data


def _answer(work: Any, question: dict[str, Any]) -> bytes:
    try:
        return packed({"result": work(question)})
    except MemoryError:
        return packed({"error": "it takes too much memory"})
    # A template is a program, and may raise or trip over anything.
    except Exception as error:
        return packed({"error": str(error)[:1000] or type(error).__name__})


def packed(value: Any) -> bytes:
    # JSON may have halves of characters, which UTF-8 has not.
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


def _say(stream: Any, data: bytes, *, is_spent: bool) -> None:
    stream.write(len(data).to_bytes(4, "big") + bytes([is_spent]))
    stream.write(data)
    stream.flush()


def _resident_bytes() -> int:
    return _statm()[1]


def _statm() -> list[int]:
    """Bytes that are mapped and that are resident, then others."""
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
