"""What kubelet does with a pod: starts its containers, probes and restarts them, and ends them.

`Pod.tick` is called again and again and never waits; probes and hooks run in threads. Probe
periods and restart delays are multiplied by `pace`; time limits and hooks are not.
"""

from __future__ import annotations

import http.client
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pod_memory import size_of
from pods import IMAGE_ENV, UID, Machine, Mount, Running, Sandbox, decoded

GRACE_S = 30.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 10.0, 300.0
_FORGIVEN_S = 600.0  # a container that ran as long is restarted at once again
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
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


class Pod:
    """One on this node, until it is gone."""

    def __init__(self, node: Node, name: str, namespace: str, template: Mapping[str, Any]) -> None:
        self.node = node
        self.name = name
        self.namespace = namespace
        self.labels: dict[str, str] = dict(template["metadata"].get("labels") or {})
        self.spec: Mapping[str, Any] = template["spec"]
        self.owner: tuple[str, str] = ("", "")  # kind and name
        self.host = ""  # the node's name
        self.is_gone = False
        self.deleted_s: float | None = None
        self._sandbox: Sandbox = node.machine.sandbox(name)
        self.ip = self._sandbox.ip
        self._volumes: dict[str, tuple[Path, str]] = {}
        self._init = [Container(self, each) for each in self.spec.get("initContainers", ())]
        self.containers = [Container(self, each) for each in self.spec["containers"]]

    @property
    def grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", GRACE_S))

    @property
    def component(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def is_deleted(self) -> bool:
        return self.deleted_s is not None

    @property
    def serves(self) -> bool:
        """All containers are ready, whether it is ending or not."""
        return not self.is_gone and not self._init and all(c.is_ready for c in self.containers)

    @property
    def is_ready(self) -> bool:
        return self.serves and not self.is_deleted

    @property
    def is_done(self) -> bool:
        """It ran to its end and is not restarted."""
        policy = self.spec.get("restartPolicy", "Always")
        codes = [c.exit_codes[-1] if c.exit_codes else None for c in self.containers]
        if policy == "Always" or any(c.running is not None for c in self.containers):
            return False
        return all(code == 0 or (code is not None and policy == "Never") for code in codes)

    def container(self, name: str) -> Container:
        return next(each for each in self.containers if each.name == name)

    def log(self, name: str = "") -> str:
        """What a container has written, or all of them."""
        folder = self.node.machine.folder / "logs"
        paths = sorted(folder.glob(f"{self.name}.{name or '*'}.log"))
        return "".join(f"== {each.name}\n{each.read_text(errors='replace')}" for each in paths)

    def state(self) -> str:
        parts = [
            f"{c.name}: {'ready' if c.is_ready else c.reason or 'running'}"
            f"{f' ({c.num_restarts} restarts)' if c.num_restarts else ''}"
            for c in (*self._init, *self.containers)
        ]
        ending = " terminating" if self.is_deleted else ""
        return f"{self.name} {self.ip} on {self.host}{ending}: {', '.join(parts)}"

    def to_object(self) -> dict[str, Any]:
        """As the API server would show it."""
        metadata = {"name": self.name, "namespace": self.namespace, "labels": dict(self.labels)}
        if self.deleted_s is not None:
            metadata["deletionTimestamp"] = f"{self.deleted_s:.1f}"
        phase = "Succeeded" if self.is_done else "Pending" if self._init else "Running"
        conditions = {"PodScheduled": True, "Ready": self.is_ready}
        return {
            **{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.spec},
            "status": {
                **{"phase": phase, "podIP": self.ip},
                "conditions": [{"type": k, "status": str(v)} for k, v in conditions.items()],
                "initContainerStatuses": [each.to_status() for each in self._init],
                "containerStatuses": [each.to_status() for each in self.containers],
            },
        }

    def processes(self, pattern: str = "") -> dict[int, str]:
        """Command lines that the pattern is found in, by pid."""
        found = self._sandbox.processes() if not self.is_gone else {}
        return {pid: line for pid, line in found.items() if re.search(pattern, line)}

    def write_hosts(self, text: str) -> None:
        if not self.is_gone:
            self._sandbox.write_hosts(f"127.0.0.1 localhost\n{self.ip} {self.name}\n{text}")

    def delete(self, grace_s: float | None = None) -> None:
        """Have its hooks run and its containers end; it is gone when all are."""
        if self.deleted_s is None:
            self.deleted_s = time.monotonic()
            for each in (*self._init, *self.containers):
                each.stop(self.grace_s if grace_s is None else grace_s)

    def lose(self) -> None:
        """At once, as if its node had lost its power."""
        self.deleted_s = self.deleted_s or time.monotonic()
        self._remove()

    def tick(self) -> None:
        now_s = time.monotonic()
        if self.is_gone:
            return
        restarts = not self.is_deleted and not self.is_done
        if self._init:  # one after the other
            first = self._init[0]
            first.tick(now_s, restarts=restarts)
            if first.exit_codes and first.exit_codes[-1] == 0:
                self._init.pop(0)
        else:
            for each in self.containers:
                each.tick(now_s, restarts=restarts)
        every = (*self._init, *self.containers)
        if self.is_deleted and all(each.running is None for each in every):
            self._remove()

    def _remove(self) -> None:
        self.is_gone = True
        for each in (*self._init, *self.containers):
            if each.running is not None:
                each.running.kill()
        self._sandbox.remove()
        self.node.machine.memory.forget(self.name)

    # -- containers as the spec has them -------------------------------------------------------

    def run(self, spec: Mapping[str, Any], checkout: Path) -> Running:
        context = {
            **(self.spec.get("securityContext") or {}),
            **(spec.get("securityContext") or {}),
        }
        environment = self._environment(spec)
        words = [*(spec.get("command") or ["entrypoint.sh"]), *(spec.get("args") or ())]
        limits = (spec.get("resources") or {}).get("limits") or {}
        return Running(
            self._sandbox,
            spec["name"],
            [_expanded(word, environment) for word in words],
            environment,
            [*map(self._mount, spec.get("volumeMounts", ())), *self._account()],
            checkout,
            user=(context.get("runAsUser", UID), context.get("runAsGroup", UID)),
            memory_bytes=size_of(limits.get("memory")),
            shares_processes=bool(self.spec.get("shareProcessNamespace")),
        )

    def _account(self) -> list[Mount]:
        if not self.node.account or self.spec.get("automountServiceAccountToken") is False:
            return []
        if _ACCOUNT not in self._volumes:
            self._volumes[_ACCOUNT] = self._sandbox.files("account", self.node.account), "ro"
        return [Mount("ro", str(self._volumes[_ACCOUNT][0]), _ACCOUNT)]

    def _mount(self, mount: Mapping[str, Any]) -> Mount:
        name = mount["name"]
        if name not in self._volumes:
            volume = next(each for each in self.spec["volumes"] if each["name"] == name)
            self._volumes[name] = self._volume(volume)
        folder, mode = self._volumes[name]
        source = folder / mount["subPath"] if mount.get("subPath") else folder
        return Mount("ro" if mount.get("readOnly") else mode, str(source), mount["mountPath"])

    def _volume(self, volume: Mapping[str, Any]) -> tuple[Path, str]:
        """A folder, and whether it may be written to."""
        name = volume["name"]
        if "configMap" in volume:
            item = self.node.get("ConfigMap", volume["configMap"]["name"])
            return self._sandbox.files(name, decoded(item)), "ro"
        if "secret" in volume:
            item = self.node.get("Secret", volume["secret"]["secretName"])
            return self._sandbox.files(name, decoded(item)), "ro"
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"]), "rw"
        warm = self.node.warm if name == "models" else None
        return self._sandbox.empty_dir(name, volume.get("emptyDir") or {}, warm), "rw"

    def _environment(self, spec: Mapping[str, Any]) -> dict[str, str]:
        found = dict(IMAGE_ENV) | {"HOSTNAME": self.name}
        if self.node.api:
            host, _, port = self.node.api.rpartition(":")
            found |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        for source in spec.get("envFrom", ()):
            kind = "ConfigMap" if "configMapRef" in source else "Secret"
            item = self.node.get(kind, next(iter(source.values()))["name"])
            found |= {key: value.decode() for key, value in decoded(item).items()}
        for each in spec.get("env", ()):
            value = self._value(each["valueFrom"]) if "valueFrom" in each else each.get("value", "")
            found[each["name"]] = _expanded(str(value), found)
        return found

    def _value(self, source: Mapping[str, Any]) -> str:
        for kind, reference in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
            if reference in source:
                chosen = source[reference]
                try:
                    return decoded(self.node.get(kind, chosen["name"]))[chosen["key"]].decode()
                except KeyError:
                    if chosen.get("optional"):
                        return ""
                    raise
        path: str = source["fieldRef"]["fieldPath"]
        if path.startswith("metadata.labels["):
            return self.labels[path.split("'")[1]]
        return {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "spec.nodeName": self.host,
            "status.podIP": self.ip,
        }[path]


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """With the variables that Kubernetes puts in."""
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda found: values.get(found[1], found[0]), text)


def describe(pods: Sequence[Pod], lines: int = 40) -> str:
    """What each pod is about, and the end of its logs."""
    parts = []
    for pod in pods:
        with suppress(OSError):
            parts += [pod.state(), *pod.log().splitlines()[-lines:]]
    return "\n".join(parts)
