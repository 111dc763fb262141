"""Containers as kubelet runs them: probes, restarts with a growing delay, hooks and signals.

Nothing here waits: `tick` is called again and again, and probes and hooks run in threads.
"""

from __future__ import annotations

import http.client
import signal
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pods import Machine, Running

if TYPE_CHECKING:
    from kubelet import Pod

_FIRST_DELAY_S, _LONGEST_DELAY_S = 10.0, 300.0
_FORGIVEN_S = 600.0  # a container that ran as long is restarted at once again
_LEAST_S = 2.0  # after a hook that used up the grace period

Getter = Callable[[str, str], Mapping[str, Any]]
"""An object by its kind and name."""


@dataclass
class Node:
    """What kubelet has."""

    machine: Machine
    get: Getter
    images: Mapping[str, Path]  # to checkouts; one that is not here cannot be pulled
    warm: Path | None  # what a volume named models has from the beginning
    pace: float
    api: str = ""  # address of the API server, as pods reach it
    account: Mapping[str, bytes] = field(default_factory=dict)  # files of a service account
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))


class Probe:
    """One of a container, with its counts."""

    def __init__(self, spec: Mapping[str, Any], container: Container) -> None:
        self._spec = spec
        self._container = container
        self._pace = container.pod.node.pace
        self._next_s = time.monotonic() + self._pace * spec.get("initialDelaySeconds", 0)
        self._future: Future[bool] | None = None
        self._num_good = self._num_bad = 0

    def tick(self, now_s: float) -> bool | None:
        """Whether a threshold is reached: of successes or of failures."""
        verdict = None
        if self._future is not None and self._future.done():
            verdict = self._count(self._future.result())
            self._future = None
        if self._future is None and now_s >= self._next_s:
            self._next_s = now_s + self._pace * self._spec.get("periodSeconds", 10)
            limit_s = float(self._spec.get("timeoutSeconds", 1))
            self._future = self._container.pod.node.pool.submit(
                self._container.check, self._spec, limit_s
            )
        return verdict

    def _count(self, is_good: bool) -> bool | None:
        self._num_good = self._num_good + 1 if is_good else 0
        self._num_bad = 0 if is_good else self._num_bad + 1
        if self._num_good >= self._spec.get("successThreshold", 1):
            return True
        return False if self._num_bad >= self._spec.get("failureThreshold", 3) else None


class Container:
    """One of a pod, over all its restarts."""

    def __init__(self, pod: Pod, spec: Mapping[str, Any]) -> None:
        self.pod = pod
        self.spec = spec
        self.name: str = spec["name"]
        self.running: Running | None = None
        self.reason = "ContainerCreating"
        self.num_restarts = 0
        self.exit_codes: list[int] = []
        self.is_ready = False
        self._delay_s = 0.0
        self._not_before_s = 0.0
        self._started_s = 0.0
        self._has_started = False  # as its startup probe says
        self._probes: dict[str, Probe] = {}
        self._hook: Future[Any] | None = None
        self._kill_s: float | None = None  # it is ending
        self._is_told = False

    # -- from start to end ---------------------------------------------------------------------

    def tick(self, now_s: float, *, restarts: bool) -> None:
        if self.running is None:
            if restarts and now_s >= self._not_before_s:
                self._start(now_s)
            return
        code = self.running.exit_code()
        if code is not None:
            self._note_end(code, now_s)
        elif self._kill_s is not None:
            self._tick_end(now_s)
        else:
            self._tick_probes(now_s)

    def _start(self, now_s: float) -> None:
        checkout = self.pod.node.images.get(self.spec["image"])
        if checkout is None:
            self.reason = "ImagePullBackOff"
            return
        self.running = self.pod.run(self.spec, checkout)
        self.reason = ""
        self._started_s, self._kill_s, self._is_told = now_s, None, False
        kinds = ("startupProbe", "livenessProbe", "readinessProbe")
        self._probes = {kind: Probe(self.spec[kind], self) for kind in kinds if self.spec.get(kind)}
        self._has_started = "startupProbe" not in self._probes
        self.is_ready = self._has_started and "readinessProbe" not in self._probes

    def _note_end(self, code: int, now_s: float) -> None:
        assert self.running is not None
        self.running.kill()  # what it left in a PID namespace that is not its own
        self.exit_codes.append(code)
        self.running, self.is_ready = None, False
        self.num_restarts += 1
        self.reason = "CrashLoopBackOff" if self._delay_s else f"Terminated ({code})"
        if now_s - self._started_s > _FORGIVEN_S:
            self._delay_s = 0.0
        self._not_before_s = now_s + self.pod.node.pace * self._delay_s
        self._delay_s = min(max(2 * self._delay_s, _FIRST_DELAY_S), _LONGEST_DELAY_S)

    def _tick_probes(self, now_s: float) -> None:
        for kind, probe in self._probes.items():
            if self._has_started == (kind == "startupProbe"):
                continue  # the others wait for the first, which is over once it succeeded
            verdict = probe.tick(now_s)
            if kind == "readinessProbe" and verdict is not None:
                self.is_ready = verdict
            elif kind == "startupProbe" and verdict:
                self._has_started = True
                self.is_ready = "readinessProbe" not in self._probes
            elif verdict is False:
                own_s = self.spec[kind].get("terminationGracePeriodSeconds")
                self.stop(self.pod.grace_s if own_s is None else own_s)

    def stop(self, grace_s: float) -> None:
        """Run its hook, then tell it to end; kill it when the grace period is over."""
        if self._kill_s is None:
            self._kill_s = time.monotonic() + grace_s
            hook = (self.spec.get("lifecycle") or {}).get("preStop")
            if hook and self.running is not None:
                self._hook = self.pod.node.pool.submit(self.check, hook, grace_s)

    def _tick_end(self, now_s: float) -> None:
        assert self.running is not None and self._kill_s is not None
        is_late = now_s >= self._kill_s
        if not self._is_told and (is_late or self._hook is None or self._hook.done()):
            self._is_told, self._hook = True, None
            self._kill_s = max(self._kill_s, now_s + _LEAST_S)
            self.running.signal(signal.SIGTERM)
        elif is_late:
            self.running.kill()

    def to_status(self) -> dict[str, Any]:
        """As the API server would show it."""
        state: dict[str, Any] = {"running": {}}
        if self.running is None:
            state = {"waiting": {"reason": self.reason, "message": self.spec["image"]}}
        common = {"name": self.name, "image": self.spec["image"], "ready": self.is_ready}
        return {**common, "restartCount": self.num_restarts, "state": state}

    # -- probes and hooks ----------------------------------------------------------------------

    def check(self, action: Mapping[str, Any], limit_s: float) -> bool:
        """Whether a probe's or a hook's action succeeds."""
        if "sleep" in action:
            return self._sleep(float(action["sleep"]["seconds"]))
        if "exec" in action:
            running = self.running
            command = action["exec"]["command"]
            return running is not None and running.execute(command, limit_s)[0] == 0
        target = action.get("httpGet") or action["tcpSocket"]
        address = (target.get("host") or self.pod.ip, self._port(target["port"]))
        try:
            if "tcpSocket" in action:
                socket.create_connection(address, limit_s).close()
                return True
            connection = http.client.HTTPConnection(*address, timeout=limit_s)
            try:
                headers = {each["name"]: each["value"] for each in target.get("httpHeaders", ())}
                connection.request("GET", target.get("path", "/"), headers=headers)
                return 200 <= connection.getresponse().status < 400
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return False

    def _sleep(self, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and not self.pod.is_gone:
            time.sleep(0.05)
        return True

    def _port(self, port: int | str) -> int:
        named = {each.get("name"): each["containerPort"] for each in self.spec.get("ports", ())}
        return int(named.get(port, port))
