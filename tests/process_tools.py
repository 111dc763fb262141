"""The processes behind an `LLM`, as tests look at them."""

from __future__ import annotations

import os

from outrider import LLM
from outrider.links.gateway_messages import EngineStatus


def status_of(llm: LLM) -> EngineStatus:
    return llm.engine.built.status()


def pids_of(llm: LLM, role: str) -> list[int]:
    return [rank.pid for rank in status_of(llm).ranks if rank.role == role]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
