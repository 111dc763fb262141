"""The server on the head of a cluster, as a service that outlives whoever started it.

`outrider deploy` asks for this over SSH; it knows the service by a file beside the configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.cluster.deploy_file import CONF_MOUNT, SERVE_FILE
from outrider.cluster.errors import ClusterError
from outrider.config import EngineConfig
from outrider.config.sources import resolve

HOME = Path(CONF_MOUNT).parent
END_S = 30.0  # beyond what requests get to finish
_TOKEN = Path("~/.ray/auth_token")
_ASK_S = 2.0
_POLL_S = 0.25
_KILL_S = 10.0
_NUM_LAST_LINES = 8
_NODES_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that cannot be taken for another: pids are used again."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The one that runs as `pid`."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else cls(pid, int(fields[19]))

    @property
    def is_running(self) -> bool:
        return Process.of(self.pid) == self


class HeadService:
    """The server of one folder."""

    def __init__(self, folder: Path = HOME) -> None:
        self._folder = folder.expanduser()
        self._conf = self._folder / Path(CONF_MOUNT).name
        self.record = self._folder / "server.json"
        self._log = self._folder / "server.log"

    def start(self, say: Say, limit_s: float) -> None:
        """Have the server run with the configuration as it is now, and wait until it is ready. One
        that runs with another is stopped first, and its requests get to finish."""
        running, digest = self.running(), self._digest()
        if running is not None and self._read().get("digest") == digest:
            say(f"the server runs already, as pid {running.pid}")
        else:
            if running is not None:
                say("the configuration or the wheel has changed: the server is started anew")
                self.stop(say)
            running = self._launch(digest)
            say(f"the server is started, as pid {running.pid}; its log is {self._log}")
        self._wait_ready(running, say, limit_s)

    def stop(self, say: Say) -> None:
        """End the server, in order if it can be; nothing if there is none."""
        running = self.running()
        if running is not None:
            drain_s = self._config().server.drain_s
            say(f"the server (pid {running.pid}) gets {drain_s:g} s to finish its requests")
            os.kill(running.pid, signal.SIGTERM)
            if not _wait(lambda: not running.is_running, drain_s + END_S):
                say(f"the server has not ended within {drain_s + END_S:g} s and is killed")
                os.kill(running.pid, signal.SIGKILL)
                _wait(lambda: not running.is_running, _KILL_S)
            say("the server has ended")
        self.record.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """Of server and cluster, for JSON."""
        running = self.running()
        server = None
        if running is not None:
            server = {"pid": running.pid, "state": self._state(), "log": str(self._log)}
        return {"version": __version__, "server": server, **_cluster()}

    def command(self) -> list[str]:
        """What is started."""
        serve = [sys.executable, "-m", "outrider", "serve", "--config", SERVE_FILE]
        return [*serve, "--set", "cluster.address=auto"]

    def _config(self) -> EngineConfig:
        return resolve(self._conf / SERVE_FILE).config

    def _digest(self) -> str:
        """Of everything that takes a new start to change: settings and code."""
        found = hashlib.sha256((self._conf / SERVE_FILE).read_bytes() + __version__.encode())
        for wheel in sorted((self._folder / "dist").glob("*.whl")):
            found.update(wheel.read_bytes())
        return found.hexdigest()

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.record.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def running(self) -> Process | None:
        """The server, if it runs."""
        process = self._read().get("process")
        if process is None:
            return None
        found = Process(**process)
        return found if found.is_running else None

    def _launch(self, digest: str) -> Process:
        self._config()  # a mistake in it is told at once
        if self._log.exists():
            self._log.replace(self._log.with_suffix(".log.1"))
        with self._log.open("wb") as log:
            started = subprocess.Popen(
                self.command(),
                cwd=self._conf,  # so that the names of files in it are relative to it
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = Process.of(started.pid)
        if process is None:
            raise ClusterError(f"the server ended at once; {self._last_words()}")
        record = {"process": asdict(process), "digest": digest}
        self.record.write_text(json.dumps(record))
        return process

    def _wait_ready(self, process: Process, say: Say, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        with self._log.open(encoding="utf-8", errors="replace") as log:
            while (state := self._state()) != "serving":
                for line in log:
                    if line.strip():
                        say(line.rstrip())
                if not process.is_running:
                    raise ClusterError(f"the server has ended; {self._last_words()}")
                if time.monotonic() > deadline_s:
                    raise ClusterError(
                        f"the server is not ready after {limit_s:g} s ({state}); see {self._log}, "
                        "or wait for it with --timeout."
                    )
                time.sleep(_POLL_S)

    def _state(self) -> str:
        """ "serving", or why not."""
        url = f"http://127.0.0.1:{self._config().server.admin_port}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=_ASK_S) as answer:
                return str(json.load(answer)["status"])
        except urllib.error.HTTPError as error:
            with error, contextlib.suppress(ValueError, KeyError):
                return str(json.load(error)["status"])
            return f"status {error.code}"
        except OSError:
            return "starting"

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip()][-_NUM_LAST_LINES:]
        return f"{self._log} closes with: {' / '.join(told) or 'nothing'}"


def _environment() -> dict[str, str]:
    """Of the server: that of the shell, and what Ray was started with on all hosts."""
    found = dict(os.environ) | {"RAY_USAGE_STATS_ENABLED": "0"}
    if _TOKEN.expanduser().exists():
        found.setdefault("RAY_AUTH_MODE", "token")
    # Ray's way to the hosts sets it for whatever it starts.
    found.pop("OMP_NUM_THREADS", None)
    return found


def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _cluster() -> dict[str, Any]:
    """Hosts and processes that Ray knows, or why it knows none."""
    if not _runs_here("raylet"):
        return {"nodes": [], "processes": [], "trouble": "Ray does not run on the head"}
    command = [sys.executable, "-c", f"from {__name__} import tell_cluster; tell_cluster()"]
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=_NODES_S
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        reason = f"Ray has not answered within {_NODES_S:g} s"
    except (ValueError, IndexError):
        reason = done.stderr.strip().rpartition("\n")[2] or "Ray does not run"
    return {"nodes": [], "processes": [], "trouble": reason}


def _runs_here(name: str) -> bool:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                return True
    return False


def tell_cluster() -> None:
    """In a process of its own, as Ray reads its environment once and may wait for long."""
    import ray
    from ray._private import state

    known: Any = ray
    known.init(address="auto", log_to_driver=False, configure_logging=False)
    nodes = [
        {
            "ip": node["NodeManagerAddress"],
            "is_alive": node["Alive"],
            "role": node.get("Labels", {}).get("outrider-role", ""),
            "cpus": node["Resources"].get("CPU", 0.0),
            "gpus": node["Resources"].get("GPU", 0.0),
        }
        for node in known.nodes()
    ]
    print(json.dumps({"nodes": nodes, "processes": list(_actors(state.actors()))}))


def _actors(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for actor in table.values():
        if actor["State"] != "DEAD":
            ip = actor["Address"]["IPAddress"]
            kind = actor["ActorClassName"].rpartition(".")[2]
            yield {"kind": kind, "ip": ip, "pid": actor["Pid"], "state": actor["State"].lower()}
