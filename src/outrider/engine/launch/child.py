"""An engine as a child process: both ends of the link to its parent.

They share a socket. The child reports its state; each side sees the other's end at once, whatever
the reason, so no child outlives its parent. Ranks that the child has started end with it. A child
without a heartbeat for long hangs and is killed.

A child may be started as a standby. It imports its libraries, starts its ranks, and waits for the
parent's go: a restart then only has to load the models.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from outrider.config import EngineConfig, settings
from outrider.engine.rank_group import Report
from outrider.errors import OutriderError
from outrider.links.secret import SECRET_VARIABLE
from outrider.logs import last_lines, open_log
from outrider.progress_stages import stage

_STOP_TIMEOUT_S = 5.0
_BEAT_S = 2.0
_SILENCE_S = 30.0  # gateways give up on it sooner, but it may recover
_GPUS = "CUDA_VISIBLE_DEVICES"
_STEP_S = 3.0  # for the current step, and to stop the ranks
_GO = b"g"
STANDBY_AFTER_S = 10.0  # a server that has just started needs its cores


logger = logging.getLogger(__name__)


class _Event(StrEnum):
    """The kind of a line from the child."""

    STAGE = "stage"
    READY = "ready"
    ALIVE = "alive"
    FAILED = "failed"


class EngineChildError(OutriderError):
    """The child has ended, or could not start. The first line is the reason, its last log lines
    follow."""


class ParentLink:
    """The child's side: the link to its parent. If the parent is killed, the child removes
    `folder`."""

    def __init__(self, fd: int, folder: Path | None = None) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._stop: Callable[[], None] | None = None
        self._folder = folder
        self._is_gone = False
        self._may_go = threading.Event()
        self._send_nowait(_Event.ALIVE)
        threading.Thread(target=self._end_with_parent, name="parent watch", daemon=True).start()

    def wait_go(self) -> None:
        """Block until the parent's go; this process ends if its parent does."""
        self._may_go.wait()

    def report_stage(self, line: str) -> None:
        self._send_nowait(_Event.STAGE, line)

    def report_ready(self, stop: Callable[[], None], addresses: Sequence[str]) -> None:
        """Report the engine ready, for gateways to connect at `addresses`. From now on `stop` is
        called if the parent ends; before, there was nothing to lose."""
        self._stop = stop
        self._send(_Event.READY, "\n".join(addresses))
        threading.Thread(target=self._beat, name="parent heartbeat", daemon=True).start()

    def report_failure(self, reason: str) -> None:
        self._send(_Event.FAILED, reason)

    def clean_up(self) -> None:
        """Call at the end of this process: removes the folder if the parent cannot."""
        if self._is_gone and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, event: _Event, text: str = "") -> None:
        with contextlib.suppress(OSError):  # the parent has ended, and so will this process
            self._socket.sendall(_line(event, text))

    def _send_nowait(self, event: _Event, text: str = "") -> None:
        """Dropped if the parent does not read: a stopped parent must not block the engine."""
        with contextlib.suppress(OSError):
            self._socket.send(_line(event, text), socket.MSG_DONTWAIT)

    def _beat(self) -> None:
        while True:
            self._send_nowait(_Event.ALIVE)
            time.sleep(_BEAT_S)

    def _end_with_parent(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(1) == _GO:
                self._may_go.set()
        self._is_gone = True
        if self._stop is not None:
            self._stop()
            time.sleep(_STEP_S)
        self.clean_up()
        os._exit(0)  # gateways hold all state that must survive


class EngineChild:
    """The parent's side: call `start`, then `run` and, in any case, `close`, in this order."""

    def __init__(
        self,
        config: EngineConfig,
        secret: str | None = None,
        *,
        listen: str | None = None,
        gpu_ids: Sequence[str] | None = None,
    ) -> None:
        """Creates a secret unless one is given, such as its predecessor's. The engine listens on a
        Unix socket and, if given, at `listen`; it sees the GPUs `gpu_ids`, or all."""
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))
        self.address = f"unix:{self._folder}/engine.sock"
        self.addresses: tuple[str, ...] = (self.address,)  # all of them once it is started
        self._listen_on = [self.address, *([] if listen is None else [listen])]
        self._variables = {} if gpu_ids is None else {_GPUS: ",".join(gpu_ids)}
        self.secret = secret or secrets.token_hex(32)
        self._log = self._folder / "engine.log"
        self._config_text = _file_text(config)
        self._socket, self._its_socket = socket.socketpair()
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: str | None = None

    def warm(self) -> None:
        """Start it as a standby: it loads no model before `start`."""
        self._start("--standby")

    @property
    def is_warm(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, report: Report) -> None:
        """Returns once it accepts gateways; raises if it ends before."""
        if self._process is None:
            self._start()
        with contextlib.suppress(OSError):  # it has ended, which `_listen` reports
            self._socket.sendall(_GO)
        with stage("starting the engine's process"):
            self._lines.readline()  # the first heartbeat, or the end
        self._listen(report)

    def run(self, report: Report) -> None:
        """Runs until it ends or hangs, then raises."""
        self._socket.settimeout(_SILENCE_S)
        try:
            self._listen(report)
        except TimeoutError:
            assert self._process is not None
            self._process.kill()
            self._failure = f"it was silent for {_SILENCE_S:g} s, so it hung and was killed."
            raise self._end() from None

    def _listen(self, report: Report) -> None:
        """Returns once it is ready; raises if it ends."""
        for line in self._lines:
            event, text = json.loads(line)
            if event == _Event.READY:
                self.addresses = tuple(text.splitlines())
                return
            if event == _Event.STAGE:
                report(text)
            elif event == _Event.FAILED:
                self._failure = text
        raise self._end()

    def _start(self, *options: str) -> None:
        fd = self._its_socket.fileno()
        command = [sys.executable, "-m", "outrider.engine"]
        command += [part for address in self._listen_on for part in ("--listen", address)]
        command += ["--starter-fd", str(fd), "--spawn-ranks", str(self._folder), *options]
        # No file is written to the folder: an engine must also start with a full disk.
        with self._its_socket, open_log(self._log) as log, _in_memory(self._config_text) as config:
            command += ["--config", f"/proc/self/fd/{config}"]
            self._process = subprocess.Popen(
                command,
                env=environment_without_settings()
                | {SECRET_VARIABLE: self.secret}
                | self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[fd, config],
                # Its own session: the parent handles signals to its process group.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """0 before the start."""
        return 0 if self._process is None else self._process.pid

    def stop(self) -> None:
        """From any thread: end it; `start` and `run` then raise."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """From any thread, instead of `close`: kill it."""
        if self._process is not None:
            self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self.stop()
        if self._process is not None:
            self._reap(self._process)
        self._lines.close()
        self._socket.close()
        self._its_socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> EngineChildError:
        assert self._process is not None
        code = self._reap(self._process)
        if self._failure is None:
            reason, lines = f"the engine's process ended with exit code {code}", []
        else:
            reason, *lines = f"the engine failed: {self._failure}".splitlines()
        return EngineChildError("\n".join([reason, *(lines or last_lines(self._log))]))

    @staticmethod
    def _reap(process: subprocess.Popen[bytes]) -> int:
        """The link is closed: wait until it ends, kill it if it hangs."""
        try:
            return process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class StandbyEngines:
    """The successive engines of one replica; the arguments are those of `EngineChild`. With
    `cluster.standby` the next engine waits while the present one serves. Not thread-safe, but for
    `close`."""

    def __init__(
        self,
        config: EngineConfig,
        secret: str,
        *,
        listen: str | None = None,
        gpu_ids: Sequence[str] | None = None,
    ) -> None:
        self._make = partial(EngineChild, config, secret, listen=listen, gpu_ids=gpu_ids)
        self._has_standby = config.cluster.standby
        self._lock = threading.Lock()
        self._next: EngineChild | None = None
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def take(self) -> EngineChild:
        """The next engine, for the caller to start: the standby, if it still lives."""
        with self._lock:
            waiting, self._next = self._next, None
            if self._timer is not None:
                self._timer.cancel()
        if waiting is not None and waiting.is_warm:
            return waiting
        if waiting is not None:
            waiting.close()
        return self._make()

    def prepare(self) -> None:
        """The present engine serves: start a standby after `STANDBY_AFTER_S`."""
        if self._has_standby:
            with self._lock:
                self._timer = threading.Timer(STANDBY_AFTER_S, self._warm)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """From any thread."""
        with self._lock:
            self._is_closed = True
            waiting, self._next = self._next, None
            if self._timer is not None:
                self._timer.cancel()
        if waiting is not None:
            waiting.close()

    def _warm(self) -> None:
        with self._lock:
            if self._is_closed or self._next is not None:
                return
            try:
                self._next = self._make()
                self._next.warm()
            except OSError as error:  # no process, descriptor or disk space left
                logger.warning("cannot start a standby engine: %s", error)


def _line(event: _Event, text: str = "") -> bytes:
    return json.dumps([event, text]).encode() + b"\n"


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[int]:
    """The descriptor of an in-memory file."""
    with os.fdopen(os.memfd_create("engine.yaml"), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield file.fileno()


def _file_text(config: EngineConfig) -> str:
    nested: dict[str, Any] = {}
    for path, value in config.without_secrets().to_settings().items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return yaml.safe_dump(nested)


def environment_without_settings() -> dict[str, str]:
    """The environment without settings' variables: the file has all settings, and the variables
    would override it, even where a flag overrides them."""
    names = {name for setting in settings().values() for name in setting.env_names}
    return {name: value for name, value in os.environ.items() if name not in names}
