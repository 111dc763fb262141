"""Ray for as long as a server runs: started on this machine, or one that is there already."""

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
from ray.exceptions import AuthenticationError

from outrider.cluster.controller import NAMESPACE
from outrider.cluster.ray_facts import (
    Resources,
    bootstrap_address,
    cluster_resources,
    dead_services,
    end_without_asking,
    hush,
    logs_folder,
    num_nodes,
    own_node_id,
)
from outrider.cluster.sweeper import Sweeper
from outrider.errors import ConfigError
from outrider.stages import stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SPARE_CPUS = 2
_KNOCK_S = 5.0
_RETRY_S = 1.0
# Ray lets everybody into the folder it is given, so that is one inside ours; short, as the names of
# sockets must be.
_RAY_FOLDER = "r"
# Nothing but calls goes through Ray; its least is plenty.
_OBJECT_STORE_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to Ray."""

    node_id: str
    summary: str
    end_own: Callable[[], None] | None  # ends a Ray that was started here, at once

    def failure(self) -> str | None:
        """Why a Ray that was started here is of no more use; None while its services run."""
        dead = [] if self.end_own is None else dead_services()
        return f"Ray's {' and '.join(dead)} on this machine ended" if dead else None


class RaySessions:
    """Sessions one after the other: Ray may be lost and come back. `begin`, then `open` each of
    them, and `close` in the end; all but `begin` block, in any thread. One that is `given_up` is
    not waited for.

    All is done in one thread that lasts: the processes of a Ray started here end with the thread
    that has started them. A daemon, it does not hold up the end of the process if Ray hangs.
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
        """Open the first one while others do something else."""
        self._first = self._submit(lambda: self._open(timeout_s))

    def first(self, timeout_s: float | None = None) -> RaySession:
        assert self._first is not None, "begin first"
        return self._first.result(timeout_s)

    def open(self, timeout_s: float) -> RaySession:
        """The first one, at first; then the next one, after the end of the one before. A cluster
        that does not answer is waited for up to `timeout_s`."""
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
            logger.warning("the last session with Ray did not end well: %s", error)
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
            except BaseException as error:  # for whoever waits for it
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
    """Connect to the cluster at `address`, or start one for so many ranks. A cluster that does not
    answer yet is waited for until `timeout_s` have passed or it is `given_up`."""
    hush()
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
    end_without_asking()  # as they do not hear it


def _num_cores() -> int:
    return os.cpu_count() or 1


def _cpus_for(num_ranks: int) -> int:
    """Each process takes one of what Ray counts as CPUs, whether or not it has one to itself."""
    return num_ranks + _SPARE_CPUS


def _explained(num_ranks: int) -> str:
    """Why Ray counts more than the machine has."""
    if _cpus_for(num_ranks) <= _num_cores():
        return ""
    return f"; the machine has {_num_cores()}, Ray is told one for each process"


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started meanwhile never learn of the end of the terminal or the service, which is
    the server's to answer: with a Ray that ends first, nothing can be stopped in order."""
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
            f"cluster.address is {address!r} but that Ray cluster does not let us in: {reason}; "
            "set RAY_AUTH_MODE as on its nodes, and if that is token RAY_AUTH_TOKEN too."
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
    is_told = False
    while True:
        try:
            _knock(address)
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
            if not is_told:
                reason = str(error).strip().partition("\n")[0]
                text = "no Ray answers at %s yet, waiting up to %g s for it: %s"
                logger.warning(text, address, timeout_s, reason)
                is_told = True
            if given_up.wait(_RETRY_S):
                raise


def _knock(address: str) -> None:
    """Ray itself tries for minutes where nobody listens."""
    host, colon, port = bootstrap_address(address).rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), _KNOCK_S).close()


def _size(resources: Resources) -> str:
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
