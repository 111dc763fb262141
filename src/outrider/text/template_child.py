"""The process that renders strangers' templates: a question in, a text out, until it is killed.

It is run as a file and imports nothing of ours but how templates are rendered. Questions and
answers are JSON behind their length in four bytes. The parent limits the time; memory, and time if
there is no parent any more, are limited here.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

MAX_TEXT_CHARS = 16 * 2**20


def main(fileno: int, timeout_s: float, memory_bytes: int) -> None:
    from outrider.text.rendering import render

    _limit_memory(memory_bytes)
    most_kept = _resident_bytes() + memory_bytes // 4
    with socket.socket(fileno=fileno) as parent, parent.makefile("rwb") as stream:
        _say(stream, {"ready": True})
        while head := stream.read(4):
            question = json.loads(stream.read(int.from_bytes(head, "big")))
            _limit_time(timeout_s)
            answer = _answer(render, question)
            del question
            # What a template leaves behind is not to be missed by the next.
            _say(stream, answer | {"is_spent": _resident_bytes() > most_kept})


def _answer(render: Any, question: dict[str, Any]) -> dict[str, Any]:
    try:
        text = render(
            question["template"],
            question["messages"],
            question["add_generation_prompt"],
            question["values"],
        )
    except MemoryError:
        return {"error": "it takes too much memory"}
    # A template is a program, and may raise or trip over anything.
    except Exception as error:
        return {"error": str(error)[:1000] or type(error).__name__}
    if len(text) > MAX_TEXT_CHARS:
        return {"error": f"it writes {len(text)} characters, above {MAX_TEXT_CHARS}"}
    return {"text": text}


def _say(stream: Any, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    stream.write(len(data).to_bytes(4, "big") + data)
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
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
