"""A Ray cluster of one node that is there before any server: its head can be lost and started
anew at the same address."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster_tools import all_pids, command_line
from waits import wait_until

_STORE_BYTES = 80 * 2**20
_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


class RayHead:
    """`start` it, `lose_gcs`, and `start` it again; `close` in the end."""

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._folder = tempfile.mkdtemp(prefix="h-")  # short: it is part of socket names
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self._cluster: Any = None

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def start(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_TMPDIR"] = self._folder
        try:
            self._cluster = Cluster()
            self._cluster.add_node(
                num_cpus=self._num_cpus,
                gcs_server_port=self._port,
                object_store_memory=_STORE_BYTES,
                include_dashboard=False,
            )
        finally:
            del os.environ["RAY_TMPDIR"]

    def lose_gcs(self) -> None:
        [gcs] = self._cluster.head_node.all_processes["gcs_server"]
        os.kill(gcs.process.pid, signal.SIGKILL)
        gcs.process.wait()

    def lose(self) -> None:
        """With all its processes, as when the container of the head ends."""
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self._pids(), 30)

    def close(self) -> None:
        self.lose()
        shutil.rmtree(self._folder, ignore_errors=True)

    def actor_pids(self, name: str) -> list[int]:
        """Of actors, which are known by the titles of their processes."""
        return [pid for pid in self._pids() if command_line(pid).startswith(f"ray::{name}")]

    def _pids(self) -> list[int]:
        return [pid for pid in all_pids() if pid != os.getpid() and self._is_own(pid)]

    def _is_own(self, pid: int) -> bool:
        if " -m outrider " in command_line(pid):  # a server writes to Ray's logs as well
            return False
        try:
            links = list(Path(f"/proc/{pid}/fd").iterdir())
            return any(str(link.readlink()).startswith(self._folder) for link in links)
        except OSError:  # it has ended, or is another user's
            return False


@contextmanager
def ray_head(num_cpus: int) -> Iterator[RayHead]:
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ |= _ENVIRONMENT
    head = RayHead(num_cpus)
    try:
        head.start()
        yield head
    finally:
        head.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
