"""An engine as a child process: both ends of what ties it to the process that starts it.

They share a socket. The child tells how it fares; the end of either is known to the other at once,
whatever the reason, so no child outlives its starter. Ranks that the child has started end with it.
A child that says nothing for long, not even that it is alive, hangs and is killed.

A child may be started before it is needed. It then waits, its libraries imported and its ranks
there, until it is told to go on: of a restart, that leaves loading the models.
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
from outrider.stages import stage

_STOP_TIMEOUT_S = 5.0
_BEAT_S = 2.0
_SILENCE_S = 30.0  # gateways give up on it sooner, but it may come back to them
_GPUS = "CUDA_VISIBLE_DEVICES"
_STEP_S = 3.0  # for the step under way, and for ranks to be told
_GO = b"g"
STANDBY_AFTER_S = 10.0  # a server that has just started needs its cores


logger = logging.getLogger(__name__)


class _Word(StrEnum):
    """What a line from the child is about."""

    STAGE = "stage"
    READY = "ready"
    ALIVE = "alive"
    FAILED = "failed"


class EngineChildError(OutriderError):
    """The child has ended, or could not start. The first line is the reason, its own last words
    follow."""


class Starter:
    """In the child: the process that started it. If that is killed, `folder` is left to this one to
    remove."""

    def __init__(self, fd: int, folder: Path | None = None) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._stop: Callable[[], None] | None = None
        self._folder = folder
        self._is_gone = False
        self._may_go = threading.Event()
        self._tell_now(_Word.ALIVE)
        threading.Thread(target=self._end_with_it, name="starter watch", daemon=True).start()

    def wait_go(self) -> None:
        """Until it is told to go on; this process ends if its starter does."""
        self._may_go.wait()

    def tell_stage(self, line: str) -> None:
        self._tell_now(_Word.STAGE, line)

    def tell_ready(self, stop: Callable[[], None], addresses: Sequence[str]) -> None:
        """From now on `stop` is called when it ends; before, nobody has anything to lose. Gateways
        may dial `addresses`."""
        self._stop = stop
        self._tell(_Word.READY, "\n".join(addresses))
        threading.Thread(target=self._beat, name="starter beat", daemon=True).start()

    def tell_failure(self, reason: str) -> None:
        self._tell(_Word.FAILED, reason)

    def clean_up(self) -> None:
        """At the end of this process: what its starter can not remove any more."""
        if self._is_gone and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, word: _Word, text: str = "") -> None:
        with contextlib.suppress(OSError):  # it is gone, and so will be this process
            self._socket.sendall(_line(word, text))

    def _tell_now(self, word: _Word, text: str = "") -> None:
        """Unless it does not read at the moment: a stopped starter stops nothing here."""
        with contextlib.suppress(OSError):
            self._socket.send(_line(word, text), socket.MSG_DONTWAIT)

    def _beat(self) -> None:
        while True:
            self._tell_now(_Word.ALIVE)
            time.sleep(_BEAT_S)

    def _end_with_it(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(1) == _GO:
                self._may_go.set()
        self._is_gone = True
        if self._stop is not None:
            self._stop()
            time.sleep(_STEP_S)
        self.clean_up()
        os._exit(0)  # gateways hold all that must not be lost


class EngineChild:
    """In the starter: `start`, then `run`, and `close` in any case, one after the other."""

    def __init__(
        self,
        config: EngineConfig,
        secret: str | None = None,
        *,
        listen: str | None = None,
        gpu_ids: Sequence[str] | None = None,
    ) -> None:
        """With a new secret unless one is given, as that of an engine that this one follows. It
        listens on a Unix socket, and at `listen` as well; it sees these GPUs, or all."""
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))
        self.address = f"unix:{self._folder}/engine.sock"
        self.addresses: tuple[str, ...] = (self.address,)  # all, once it was started
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
        """Start it, but let it load nothing before `start`."""
        self._start("--standby")

    @property
    def is_warm(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, report: Report) -> None:
        """Until it takes gateways; raises if it ends before."""
        if self._process is None:
            self._start()
        with contextlib.suppress(OSError):  # it has ended, which is heard below
            self._socket.sendall(_GO)
        with stage("starting the engine's process"):
            self._lines.readline()  # that it is alive, unless it has ended
        self._listen(report)

    def run(self, report: Report) -> None:
        """Until it ends or hangs, which raises."""
        self._socket.settimeout(_SILENCE_S)
        try:
            self._listen(report)
        except TimeoutError:
            assert self._process is not None
            self._process.kill()
            self._failure = f"it was silent for {_SILENCE_S:g} s, so it hung and was killed."
            raise self._end() from None

    def _listen(self, report: Report) -> None:
        """Until it is ready. Raises if it ends."""
        for line in self._lines:
            word, text = json.loads(line)
            if word == _Word.READY:
                self.addresses = tuple(text.splitlines())
                return
            if word == _Word.STAGE:
                report(text)
            elif word == _Word.FAILED:
                self._failure = text
        raise self._end()

    def _start(self, *options: str) -> None:
        fd = self._its_socket.fileno()
        command = [sys.executable, "-m", "outrider.engine"]
        command += [part for address in self._listen_on for part in ("--listen", address)]
        command += ["--starter-fd", str(fd), "--spawn-ranks", str(self._folder), *options]
        # Of its folder the child needs names only: an engine is replaced on a full disk, too.
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
                # Out of reach of signals to the starter's group, which are the starter's to answer.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """0 before it was started."""
        return 0 if self._process is None else self._process.pid

    def stop(self) -> None:
        """From any thread: let it end, which `start` and `run` tell."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """From any thread, in place of `close`: end it at once."""
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
        """It has hung up, or was hung up on: it ends by itself, or hangs."""
        try:
            return process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class EngineLine:
    """The engines of one replica, which follow each other; see `EngineChild` for what they are
    given. With `cluster.standby` the next one waits beside the present one. Calls are one after the
    other, but for `close`."""

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
        """The next one, to be started by the caller: the one that waits, if it still does."""
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
        """The present one serves: soon there may be another beside it."""
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
                logger.warning("no engine waits beside the present one: %s", error)


def _line(word: _Word, text: str = "") -> bytes:
    return json.dumps([word, text]).encode() + b"\n"


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[int]:
    """A descriptor of a file that has no disk."""
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
    """Without the variables that are settings: the file has them all, and they would win over it,
    even where a flag has won over them."""
    names = {name for setting in settings().values() for name in setting.env_names}
    return {name: value for name, value in os.environ.items() if name not in names}
