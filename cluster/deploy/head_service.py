"""The server on the head of a cluster, as a service: a keeper restarts it when it ends.

`outrider deploy` runs this over SSH; a file beside the configuration records the processes.
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
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.cluster.deploy import head_keeper
from outrider.cluster.deploy.cluster_file import CONF_MOUNT, SERVE_FILE
from outrider.cluster.deploy.head_record import LOG, RECORD, HeadRecord, Process
from outrider.cluster.deploy.head_systemd import Systemd
from outrider.cluster.errors import ClusterError
from outrider.config import EngineConfig
from outrider.config.sources import resolve

HOME = Path(CONF_MOUNT).parent
END_S = 30.0  # for the server to end after requests have drained
_TOKEN = Path("~/.ray/auth_token")
_ASK_S = 2.0
_POLL_S = 0.25
_KILL_S = 10.0
_LAUNCH_S = 60.0
_NUM_LAST_LINES = 8
_NODES_S = 60.0

Say = Callable[[str], None]


class HeadService:
    """The server of one folder, and the process that keeps it running."""

    def __init__(self, folder: Path = HOME, systemd: Systemd | None = None) -> None:
        self._systemd = systemd or Systemd()
        self._folder = folder.expanduser()
        self._conf = self._folder / Path(CONF_MOUNT).name
        self.record = self._folder / RECORD
        self._log = self._folder / LOG

    def start(self, say: Say, limit_s: float, *, use_systemd: bool = False) -> None:
        """Start the server with the current configuration and wait until it is ready. One with
        another configuration is drained and stopped first. With `use_systemd` a unit runs the
        keeper."""
        known, digest = HeadRecord.read(self._folder), self._digest()
        running = known.running
        is_same = running is not None and known.digest == digest
        if is_same and running is not None:
            say(f"the server runs already, as pid {running.pid}")
            if known.running_keeper is None:
                self._launch(digest, use_systemd=use_systemd)
                say("its keeper was gone and is restarted")
        else:
            if running is not None:
                say("the configuration or the wheel has changed: the server is restarted")
            self.stop(say)
            running = self._launch(digest, use_systemd=use_systemd)
            say(f"the server is started, as pid {running.pid}; its log is {self._log}")
        self._wait_ready(running, say, limit_s, is_new=not is_same)

    def stop(self, say: Say) -> None:
        """Drain and end the server; kill it if it hangs. Does nothing if there is none."""
        self._end_keeper()
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
        (self._folder / head_keeper.SPEC_FILE).unlink(missing_ok=True)

    def _end_keeper(self) -> None:
        """Call before ending the server, which the keeper would restart."""
        self._systemd.remove()
        keeper = HeadRecord.read(self._folder).running_keeper
        for number in (signal.SIGTERM, signal.SIGKILL):
            if keeper is None or not keeper.is_running:
                return
            os.kill(keeper.pid, number)
            _wait(lambda: keeper is None or not keeper.is_running, _KILL_S)

    def status(self) -> dict[str, Any]:
        """The status of server and cluster, for JSON."""
        known = HeadRecord.read(self._folder)
        running, keeper = known.running, known.running_keeper
        server = None
        if running is not None:
            server = {"pid": running.pid, "state": self._state(), "log": str(self._log)}
            server["restarts"] = known.restarts
        kept_by = None if keeper is None else keeper.pid
        return {"version": __version__, "server": server, "keeper": kept_by, **_cluster()}

    def command(self) -> list[str]:
        """The command of the server."""
        serve = [sys.executable, "-m", "outrider", "serve", "--config", SERVE_FILE]
        return [*serve, "--set", "cluster.address=auto"]

    def _config(self) -> EngineConfig:
        return resolve(self._conf / SERVE_FILE).config

    def _digest(self) -> str:
        """Digest of settings and code: a change requires a restart."""
        found = hashlib.sha256((self._conf / SERVE_FILE).read_bytes() + __version__.encode())
        for wheel in sorted((self._folder / "dist").glob("*.whl")):
            found.update(wheel.read_bytes())
        return found.hexdigest()

    def running(self) -> Process | None:
        """The server, if it runs."""
        return HeadRecord.read(self._folder).running

    def keeper(self) -> Process | None:
        """The server's keeper, if it runs."""
        return HeadRecord.read(self._folder).running_keeper

    def _launch(self, digest: str, *, use_systemd: bool) -> Process:
        """Start a keeper, which starts the server unless it runs. Returns the server."""
        self._config()  # report a mistake at once
        if self.running() is None and self._log.exists():
            self._log.replace(self._log.with_suffix(".log.1"))
        self._log.touch()
        head_keeper.KeeperSpec(digest, self.command(), _environment()).write(self._folder)
        before = HeadRecord.read(self._folder).keeper
        keeper = [sys.executable, "-m", head_keeper.__name__, str(self._folder)]
        if use_systemd:
            self._systemd.install(self._folder, keeper)
        else:
            self._begin(keeper)
        _wait(lambda: HeadRecord.read(self._folder).keeper not in (None, before), _LAUNCH_S)
        known = HeadRecord.read(self._folder)
        if known.keeper in (None, before) or known.process is None:
            self._end_keeper()
            raise ClusterError(f"the server ended at once; {self._last_words()}")
        return known.process

    def _begin(self, keeper: list[str]) -> None:
        with self._log.open("ab") as log:
            subprocess.Popen(
                keeper, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_ready(self, process: Process, say: Say, limit_s: float, *, is_new: bool) -> None:
        deadline_s = time.monotonic() + limit_s
        with self._log.open(encoding="utf-8", errors="replace") as log:
            while (state := self._state()) != "serving":
                for line in log:
                    if line.strip():
                        say(line.rstrip())
                if is_new and not process.is_running:
                    # It has never served: restarts would fail for ever.
                    self._end_keeper()
                    raise ClusterError(f"the server has ended; {self._last_words()}")
                if time.monotonic() > deadline_s:
                    raise ClusterError(
                        f"the server is not ready after {limit_s:g} s ({state}); see {self._log}, "
                        "or wait for it with --timeout."
                    )
                time.sleep(_POLL_S)

    def _state(self) -> str:
        """ "serving", or the reason why not."""
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
        last = [line.strip() for line in lines if line.strip()][-_NUM_LAST_LINES:]
        return f"last lines of {self._log}: {' / '.join(last) or 'nothing'}"


def _environment() -> dict[str, str]:
    """The server's environment: the shell's, and the settings Ray was started with."""
    found = dict(os.environ) | {"RAY_USAGE_STATS_ENABLED": "0"}
    if _TOKEN.expanduser().exists():
        found.setdefault("RAY_AUTH_MODE", "token")
    # `ray up` sets it for all commands.
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
    """Hosts and processes known to Ray, or why there are none."""
    if not _runs_here("raylet"):
        return {"nodes": [], "processes": [], "trouble": "Ray does not run on the head"}
    command = [sys.executable, "-c", f"from {__name__} import print_cluster; print_cluster()"]
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


def print_cluster() -> None:
    """Runs in a subprocess: Ray reads its environment only once, and may hang."""
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
