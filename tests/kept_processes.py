"""Processes that are started anew whenever they end, as a service manager does it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from waits import wait_until

_PAUSE_S = 0.3
_END_S = 60.0


class Kept:
    """`python -m` with these arguments, behind `wrapper`; what it prints is in `log`."""

    def __init__(
        self,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        wrapper: Sequence[str] = (),
    ) -> None:
        self._command = [*wrapper, sys.executable, "-m", *arguments]
        self._environment = os.environ | environment
        self._log = log
        self._is_over = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the present one. A wrapper becomes what it wraps."""
        return self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def find(self, pattern: str, timeout_s: float = 300.0) -> str:
        """What the pattern's group matches in what was printed, waited for."""
        wait_until(
            lambda: re.search(pattern, self.output) is not None,
            timeout_s,
            lambda: f"no {pattern!r} in:\n{self.output}",
        )
        found = re.search(pattern, self.output)
        assert found is not None
        return found[1]

    def keep_no_longer(self) -> None:
        self._is_over.set()
        self._thread.join(_END_S)

    def terminate(self) -> int:
        """Its exit code."""
        self.keep_no_longer()
        self._process.terminate()
        return self._process.wait(_END_S)

    def wait_end(self) -> None:
        """It ends by itself."""
        self.keep_no_longer()
        self._process.wait(_END_S)

    def kill(self) -> None:
        self.keep_no_longer()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_END_S)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _keep(self) -> None:
        while not self._is_over.wait(_PAUSE_S):
            if self._process.poll() is not None:
                self._process = self._start()
