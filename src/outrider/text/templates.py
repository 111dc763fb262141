"""Chat templates of strangers, and long conversations, rendered where that can be stopped.

A template is a program: it may loop for ever or ask for all memory there is, and a thread cannot
be ended from outside. So each runs in a child process with a limit on its memory, which is killed
when its time is up. Children that behave are kept for the next template.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

TIMEOUT_S = 2.0
START_TIMEOUT_S = 60.0
MEMORY_BYTES = 256 * 2**20  # beyond what the child has once it is ready
_CHILD = Path(__file__).with_name("template_child.py")


class TemplateRefusedError(Exception):
    """What the template said, or what it did wrong."""


class TemplateProcesses:
    """Renders in children, as many at once as there are threads that ask."""

    def __init__(self, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._is_closed = False

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        values: Mapping[str, Any],
    ) -> str:
        """The text, or `TemplateRefusedError`; never later than the limit by more than a start.
        `values` are further ones that the template sees."""
        child = self._take()
        try:
            answer = child.ask(
                {
                    "template": template,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "values": dict(values),
                },
                self._timeout_s,
            )
        except TimeoutError:
            child.kill()
            raise TemplateRefusedError(f"it ran for more than {self._timeout_s:g} s") from None
        except OSError:
            child.kill()
            raise TemplateRefusedError("it took down the process that ran it") from None
        except BaseException:
            child.kill()
            raise
        if answer["is_spent"]:
            child.kill()  # what is left of its memory may be too little for the next template
        else:
            self._keep(child)
        if "error" in answer:
            raise TemplateRefusedError(answer["error"])
        return str(answer["text"])

    def close(self) -> None:
        """End the children that are idle; the others end with what they do."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()

    def _take(self) -> _Child:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Child(self._timeout_s, self._memory_bytes)

    def _keep(self, child: _Child) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(child)
                return
        child.kill()


class _Child:
    """One process, ready once this is made."""

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        self._socket, theirs = socket.socketpair()
        number = theirs.fileno()
        command = [sys.executable, "-P", str(_CHILD), str(number), str(timeout_s)]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(memory_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(number,),
                # No more than it needs: a secret of ours is none of a stranger's business.
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            self._receive(time.monotonic() + START_TIMEOUT_S)
        except OSError as error:
            self.kill()
            raise OutriderError(
                f"the process for chat templates does not start ({error}); leave the template out "
                "and shorten the conversation."
            ) from error

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """`TimeoutError` if the answer is late, another `OSError` if there is none."""
        deadline_s = time.monotonic() + timeout_s
        data = json.dumps(question).encode()
        self._socket.settimeout(timeout_s)
        self._socket.sendall(len(data).to_bytes(4, "big") + data)
        return self._receive(deadline_s)

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        size = int.from_bytes(self._read(4, deadline_s), "big")
        answer: dict[str, Any] = json.loads(self._read(size, deadline_s))
        return answer

    def _read(self, size: int, deadline_s: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
            piece = self._socket.recv(min(size - len(data), 2**20))
            if not piece:
                raise ConnectionError("it ended")
            data += piece
        return bytes(data)
