"""Bring up, inspect and tear down a cluster with a server on it, from one file."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from outrider.cluster.deploy.cluster_file import ClusterFile
from outrider.cluster.deploy.head_service import END_S
from outrider.cluster.deploy.remote import RayCommands, Shells, ray_folder
from outrider.cluster.errors import ClusterError

Say = Callable[[str], None]

_STATUS_S = 90.0
_DOWN_S = 600.0
_HOST_S = 90.0
_REPORT_S = 10.0
_PROCESSES = (
    "[r]aylet|[g]cs_server|[r]ay::|ray/[_]private|ray/[d]ashboard|ray/[a]utoscaler|"
    "[o]utrider[. ](serve|gateway|engine|workers|cluster.(deploy.)?head_keeper)"
)
# Stops Ray on a host, reports remaining processes, and removes the secrets that `ray up` copied:
# the token, and on the head a private key.
_CLEAN = f"""
ray stop --force
left=$(pgrep -af '{_PROCESSES}' | cut -c1-120)
if [ -n "$left" ]; then echo "left: $left"; exit 1; fi
rm -rf ~/.ray/auth_token ~/ray_bootstrap_config.yaml ~/ray_bootstrap_key.pem /tmp/ray
rm -rf /tmp/ray_ssh_*/CONNECTIONS; rmdir /tmp/ray_ssh_* 2>/dev/null || true
"""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where clients reach the server."""

    http: str
    grpc: str


class Deployment:
    """The verbs of `outrider deploy` for one file; `say` gets progress lines. A context manager:
    Ray leaves copies of its input in a temporary folder."""

    def __init__(self, file: ClusterFile, say: Say) -> None:
        self._file = file
        self._say = say
        self.log = file.path.with_name(f"{file.path.name}.log")
        self._scratch = tempfile.TemporaryDirectory(prefix="outrider-deploy-")
        self._ray = RayCommands(file, self.log, Path(self._scratch.name))
        self._shells = Shells(file, self._ray)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scratch.cleanup()

    def up(self, limit_s: float) -> Endpoints:
        """Bring hosts, Ray and server to the state in the file. Idempotent: unchanged parts go on,
        added hosts join, and a server with changed settings restarts after its requests drain."""
        deadline_s = time.monotonic() + limit_s
        alive = self._alive_hosts()
        if not alive:
            self._ray_up([], limit_s)
        else:
            self._ray_up(["--no-restart"], limit_s)
            self._change_hosts(alive)
        left_s = max(1.0, deadline_s - time.monotonic())
        supervisor = " --systemd" if self._file.uses_systemd else ""
        self._shells.on_head(f"start --timeout {left_s:.0f}{supervisor}", left_s, self._say)
        return self._endpoints()

    def status(self) -> dict[str, Any]:
        """Server, hosts and processes, as seen from the head."""
        return self._shells.on_head("status", _STATUS_S, self._say)

    def down(self) -> None:
        """Drain requests, then end everything. Raises if a process may still run."""
        limit_s = self._file.serving.server.drain_s + 2 * END_S
        troubles = []
        try:
            self._shells.on_head("stop", limit_s, self._say)
        except ClusterError as error:
            self._say(f"the server cannot be stopped: {error}")
        if self._file.is_local:
            # The head first: it would restart Ray on the others.
            troubles += self._clean(self._file.head_ip)
            with ThreadPoolExecutor(len(self._file.worker_ips)) as pool:
                for found in pool.map(self._clean, self._file.worker_ips):
                    troubles += found
        self._say("ray down")
        done = self._ray.run(
            "down", "-y", limit_s=_DOWN_S, on_line=_RayProgress(self._say, "ray down")
        )
        if done.code != 0:
            troubles.append(f"`ray down` failed: {done.last_words}")
        self._forget()
        if troubles:
            raise ClusterError(f"not all of {self._file.name} is down: {'; '.join(troubles)}.")

    def _alive_hosts(self) -> set[str]:
        """Addresses of hosts that Ray runs on. If there are none, stop stale Ray processes on our
        own hosts: they would never join the new head."""
        try:
            found = {node["ip"] for node in self.status()["nodes"] if node["is_alive"]}
        except ClusterError:
            found = set()
        if not found and self._file.is_local:
            with ThreadPoolExecutor(len(self._file.worker_ips)) as pool:
                list(pool.map(self._stop_ray, self._file.worker_ips))
        return found

    def _stop_ray(self, ip: str) -> None:
        with contextlib.suppress(ClusterError):
            self._shells.on(ip, "! pgrep -x raylet || ray stop --force", _HOST_S)

    def _change_hosts(self, alive: set[str]) -> None:
        """Hosts added to the file join, hosts removed from it leave."""
        if not self._file.is_local:  # Ray does it for cloud hosts
            return
        self._shells.on_head("renew-hosts", _STATUS_S, self._say)
        provider = self._file.settings["provider"]
        for ip in sorted(alive - {provider["head_ip"], *self._file.worker_ips}):
            self._say(f"{ip} is no longer in the file")
            for trouble in self._clean(ip):
                self._say(trouble)

    def _ray_up(self, options: list[str], limit_s: float) -> None:
        self._say(shlex.join(["ray", "up", *options, str(self._file.path)]))
        progress = _RayProgress(self._say, "ray up")
        done = self._ray.run("up", "-y", *options, limit_s=limit_s, on_line=progress)
        if done.code != 0:
            why = progress.cause or done.last_words
            raise ClusterError(f"`ray up` failed: {why} (its output is in {self.log})")

    def _endpoints(self) -> Endpoints:
        server = self._file.serving.server
        host = self._file.head_ip if self._file.is_local else self._cloud_head_ip()
        scheme = "http" if server.tls_cert is None else "https"
        return Endpoints(f"{scheme}://{host}:{server.port}", f"{host}:{server.grpc_port}")

    def _cloud_head_ip(self) -> str:
        done = self._ray.run("get-head-ip", limit_s=_STATUS_S)
        if done.code != 0 or not done.lines:
            raise ClusterError(f"`ray get-head-ip` failed: {done.last_words}")
        return done.lines[-1].strip()

    def _clean(self, ip: str) -> list[str]:
        """Stop everything on a host. Returns what may be left, in words."""
        try:
            command = _CLEAN.replace("CONNECTIONS", _digest(self._file.name))
            done = self._shells.on(ip, command, _HOST_S)
        except ClusterError as error:
            return [f"{ip}: {error}"]
        if done.code != 0:
            return [f"{ip}: {done.last_words}"]
        self._say(f"{ip} is clean")
        return []

    def _forget(self) -> None:
        """Remove the state Ray keeps on this machine about a cluster, which is now stale."""
        name = self._file.name
        if self._file.is_local:
            state = Path(ray_folder()) / "ray"
            for suffix in ("state", "lock"):
                (state / f"cluster-{name}.{suffix}").unlink(missing_ok=True)
        connections = Path("/tmp") / f"ray_ssh_{_digest(getpass.getuser())}"
        shutil.rmtree(connections / _digest(name), ignore_errors=True)
        with contextlib.suppress(OSError):  # others are in use
            connections.rmdir()


def _digest(text: str) -> str:
    """Ray's name for the folder of its SSH connections."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class _RayProgress:
    """Parses Ray's output, and reports its current step every few seconds."""

    def __init__(self, say: Say, what: str) -> None:
        self.cause: str | None = None
        self._say = say
        self._what = what
        self._start_s = self._reported_s = time.monotonic()

    def __call__(self, line: str) -> None:
        if " ERR " in line and "Error message: " in line:
            self.cause = line.partition("Error message: ")[2]
        step = line.partition(" -- ")[2]
        now_s = time.monotonic()
        if step.startswith("[") and now_s - self._reported_s > _REPORT_S:
            self._reported_s = now_s
            self._say(f"{self._what}: {now_s - self._start_s:.0f} s, {step}")
