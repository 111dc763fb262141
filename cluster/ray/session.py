"""A server's sessions with Ray: started on this machine, or connected to a running cluster."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import ray
from outrider.cluster.ray.controller import NAMESPACE
from outrider.cluster.ray.facts import (
    Resources,
    bootstrap_address,
    cluster_resources,
    dead_services,
    kill_on_shutdown,
    logs_folder,
    num_nodes,
    own_node_id,
    silence_ray_logs,
)
from outrider.cluster.ray.sweeper import Sweeper
from outrider.errors import ConfigError
from outrider.progress_stages import stage
from ray.exceptions import AuthenticationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SPARE_CPUS = 2
_CONNECT_S = 5.0
_RETRY_S = 1.0
# Ray makes its folder world-readable, so it is inside our private one; short, as socket paths are
# limited.
_RAY_FOLDER = "r"
# Only calls go through Ray; its minimum suffices.
_OBJECT_STORE_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to Ray."""

    node_id: str
    summary: str
    end_own: Callable[[], None] | None  # kills a Ray that was started here

    def failure(self) -> str | None:
        """Which services of a Ray started here have ended; None while all run."""
        dead = [] if self.end_own is None else dead_services()
        return f"Ray's {' and '.join(dead)} on this machine ended" if dead else None


class RaySessions:
    """Sessions one after the other: Ray may be lost and come back. `begin`, then `open` each, and
    `close` in the end; all but `begin` block, in any thread. Setting `given_up` ends a wait.

    All work runs in one lasting thread: the processes of a Ray started here die with the thread
    that started them. It is a daemon thread, so a hung Ray does not block the exit.
    """

    def __init__(self, address: str | None, num_ranks: int, given_up: threading.Event) -> None:
        self._address = address
        self._num_ranks = num_ranks
        self._given_up = given_up
        self._stack = ExitStack()
        self._first: Future[RaySession] | None = None
        self._is_first_taken = False
        self._is_closed = False
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="outrider-ray", daemon=True).start()

    def begin(self, timeout_s: float) -> None:
        """Open the first session in the background."""
        self._first = self._submit(lambda: self._open(timeout_s))

    def first(self, timeout_s: float | None = None) -> RaySession:
        assert self._first is not None, "begin first"
        return self._first.result(timeout_s)

    def open(self, timeout_s: float) -> RaySession:
        """The next session; closes the previous one. Waits up to `timeout_s` for a cluster that
        does not answer."""
        if not self._is_first_taken:
            self._is_first_taken = True
            return self.first()
        return self._submit(lambda: self._open(timeout_s)).result()

    def close(self) -> None:
        self._given_up.set()
        self._is_closed = True
        self._submit(self._stack.close).result()

    def _open(self, timeout_s: float) -> RaySession:
        try:
            self._stack.close()
        except Exception as error:
            logger.warning("closing the last session with Ray failed: %s", error)
        if self._is_closed:
            raise ConfigError("the server is ending.")
        session = ray_session(self._address, self._num_ranks, timeout_s, self._given_up)
        where = "starting Ray" if self._address is None else f"connecting to Ray at {self._address}"
        with stage(where):
            return self._stack.enter_context(session)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        outcome: Future[T] = Future()

        def settle() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # raised by `result`
                outcome.set_exception(error)

        self._work.put(settle)
        return outcome

    def _run(self) -> None:
        while True:
            self._work.get()()


@contextmanager
def ray_session(
    address: str | None,
    num_ranks: int,
    timeout_s: float = 0.0,
    given_up: threading.Event | None = None,
) -> Iterator[RaySession]:
    """Connect to the cluster at `address`, or start one for `num_ranks`. Waits up to `timeout_s`
    for a cluster that does not answer yet, unless `given_up` is set."""
    silence_ray_logs()
    if address is None:
        session = _started(num_ranks)
    else:
        session = _connected(address, timeout_s, given_up or threading.Event())
    with session as found:
        yield found


@contextmanager
def _started(num_ranks: int) -> Iterator[RaySession]:
    folder = Path(tempfile.mkdtemp(prefix="outrider-ray-"))
    try:
        with Sweeper(folder) as sweeper:
            try:
                _start(folder / _RAY_FOLDER, num_ranks)
                size = _size(cluster_resources()) + _explained(num_ranks)
                summary = f"Ray started on this machine ({size}), logs in {logs_folder()}"
                yield RaySession(own_node_id(), summary, sweeper.end_all)
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, num_ranks: int) -> None:
    with _signals_blocked():
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=max(_num_cores(), _cpus_for(num_ranks)),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
        )
    kill_on_shutdown()  # they have SIGTERM blocked


def _num_cores() -> int:
    return os.cpu_count() or 1


def _cpus_for(num_ranks: int) -> int:
    """Each process takes one of Ray's logical CPUs."""
    return num_ranks + _SPARE_CPUS


def _explained(num_ranks: int) -> str:
    """Explains more logical CPUs than the machine has cores."""
    if _cpus_for(num_ranks) <= _num_cores():
        return ""
    return f"; the machine has {_num_cores()}, Ray counts one for each process"


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Child processes inherit blocked SIGHUP and SIGTERM. Only the server handles these: if Ray
    ended first, an orderly shutdown would be impossible."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _connected(address: str, timeout_s: float, given_up: threading.Event) -> Iterator[RaySession]:
    try:
        session = _attach(address, timeout_s, given_up)
    except AuthenticationError as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise ConfigError(
            f"cluster.address is {address!r} but that Ray cluster refuses authentication: "
            f"{reason}; set RAY_AUTH_MODE as on its nodes, and if that is token RAY_AUTH_TOKEN too."
        ) from error
    except Exception as error:  # Ray's library raises plain ones as well
        reason = str(error).strip().partition("\n")[0].rstrip(".") + "."
        raise ConfigError(
            f"cluster.address is {address!r} but no Ray cluster can be used there: {reason} "
            "Correct it, or leave it out to start one here."
        ) from error
    try:
        yield session
    finally:
        ray.shutdown()


def _attach(address: str, timeout_s: float, given_up: threading.Event) -> RaySession:
    """Ray's head and this process may be started together, in any order."""
    deadline_s = time.monotonic() + timeout_s
    has_logged = False
    while True:
        try:
            _check_port(address)
            ray.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
            )
            size = f"{num_nodes()} nodes, {_size(cluster_resources())}"
            return RaySession(own_node_id(), f"connected to Ray at {address} ({size})", None)
        except AuthenticationError:
            raise
        except Exception as error:
            ray.shutdown()  # what is left of the attempt
            if time.monotonic() + _RETRY_S > deadline_s:
                raise
            if not has_logged:
                reason = str(error).strip().partition("\n")[0]
                text = "no Ray answers at %s yet, waiting up to %g s for it: %s"
                logger.warning(text, address, timeout_s, reason)
                has_logged = True
            if given_up.wait(_RETRY_S):
                raise


def _check_port(address: str) -> None:
    """Fail at once if nothing listens: Ray itself retries for minutes."""
    host, colon, port = bootstrap_address(address).rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), _CONNECT_S).close()


def _size(resources: Resources) -> str:
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
