"""What kubelet does with a pod: makes its volumes, starts its containers and ends them. Probe
periods and restart delays are multiplied by `pace`; time limits and hooks are not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pod_containers import Container, Node
from pod_image import IMAGE_ENV, UID, Mount
from pod_memory import size_of
from pods import Running, Sandbox, decoded

GRACE_S = 30.0
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


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
