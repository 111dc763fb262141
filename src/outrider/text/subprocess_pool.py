"""Subprocesses for work that may exceed its time or memory, so that it can be killed.

A chat template is a program, and a JSON body almost one: either may take seconds, hold the GIL or
exhaust memory, and a thread cannot be killed. So each runs in a subprocess with a memory limit,
which is killed on timeout. Idle subprocesses are reused.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.text.subprocess_worker import packed, unpacked

START_TIMEOUT_S = 60.0
_WORKER = Path(__file__).with_name("subprocess_worker.py")


class SubprocessTaskError(Exception):
    """A task's own error, or the limit it exceeded."""


class SubprocessPool:
    """A pool of subprocesses for the task of that name; one per thread that asks concurrently.
    `memory_bytes` is what a subprocess may allocate beyond its size when ready."""

    def __init__(self, task: str, timeout_s: float, memory_bytes: int) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._is_closed = False

    def ask(self, question: Mapping[str, Any]) -> Any:
        """The result, or `SubprocessTaskError`; at the latest after a start and the timeout."""
        child = self._take()
        try:
            is_spent, answer = child.ask(question, self._timeout_s)
        except TimeoutError:
            child.kill()
            raise SubprocessTaskError(f"it ran for more than {self._timeout_s:g} s") from None
        except OSError:
            child.kill()
            raise SubprocessTaskError("it took down the process that ran it") from None
        except BaseException:
            child.kill()
            raise
        if is_spent:
            child.kill()  # too little of its memory limit may be left for the next task
        else:
            self._keep(child)
        if "error" in answer:
            raise SubprocessTaskError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Kill idle subprocesses; the others end with their tasks."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()

    def _take(self) -> _Child:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Child(self._task, self._timeout_s, self._memory_bytes)

    def _keep(self, child: _Child) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(child)
                return
        child.kill()


class _Child:
    """One subprocess, ready after construction."""

    def __init__(self, task: str, timeout_s: float, memory_bytes: int) -> None:
        self._socket, theirs = socket.socketpair()
        number = theirs.fileno()
        command = [sys.executable, "-P", str(_WORKER), task, str(number), str(timeout_s)]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(memory_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(number,),
                # Only what it needs: untrusted templates must not see the server's secrets.
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            self._receive(time.monotonic() + START_TIMEOUT_S)
        except OSError as error:
            self.kill()
            raise OutriderError(
                f"the process for large requests does not start ({error}); send a smaller request, "
                "without a chat template."
            ) from error

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> tuple[bool, Any]:
        """Whether the subprocess must not be reused, and the answer. Raises `TimeoutError` on
        timeout, another `OSError` if it ended."""
        deadline_s = time.monotonic() + timeout_s
        data = packed(question)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(len(data).to_bytes(4, "big") + data)
        del data
        return self._receive(deadline_s)

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, deadline_s: float) -> tuple[bool, Any]:
        head = self._read(5, deadline_s)
        data = self._read(int.from_bytes(head[:4], "big"), deadline_s)
        return bool(head[4]), unpacked(bytes(data))

    def _read(self, size: int, deadline_s: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
            piece = self._socket.recv(min(size - len(data), 2**20))
            if not piece:
                raise ConnectionError("it ended")
            data += piece
        return data
