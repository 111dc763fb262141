"""Pods as KubeRay 1.6 makes them of a RayCluster, by its documentation and its CRDs.

Ray's probes ask its dashboard agent, which only `ray[default]` has; without it they look for Ray's
processes instead.

The first container of a template gets Ray's command line, environment and probes; the rest of the
template stays as it is. Workers wait for the head in an init container.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pod_image import PACKAGES
from pod_memory import size_of

PORT, DASHBOARD_PORT, AGENT_PORT, METRICS_PORT = 6379, 8265, 52365, 8080
_WAIT = """
while ! ray health-check --address {address} > /dev/null 2>&1; do
  echo "$SECONDS seconds elapsed: Waiting for GCS to be ready."
  sleep 5
done
echo "GCS is ready."
"""


class Wanted(NamedTuple):
    """Pods of one group."""

    group: str
    num_pods: int
    template: dict[str, Any]


def service(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """The head's: headless, and published before the head is ready."""
    name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
    ports = {"gcs-server": PORT, "dashboard": DASHBOARD_PORT, "metrics": METRICS_PORT}
    return {
        "kind": "Service",
        "metadata": {"name": f"{name}-head-svc", "namespace": namespace},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"ray.io/cluster": name, "ray.io/node-type": "head"},
            "ports": [{"name": each, "port": port} for each, port in ports.items()],
        },
    }


def wanted(cluster: Mapping[str, Any]) -> Iterator[Wanted]:
    spec = cluster["spec"]
    yield Wanted("headgroup", 1, _template(cluster, spec["headGroupSpec"], None))
    for group in spec["workerGroupSpecs"]:
        name = group["groupName"]
        yield Wanted(name, group["replicas"], _template(cluster, group, name))


def _template(
    cluster: Mapping[str, Any], group: Mapping[str, Any], worker: str | None
) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(group["template"])
    name = cluster["metadata"]["name"]
    made["metadata"].setdefault("labels", {}).update(
        group.get("labels") or {},
        **{
            "ray.io/cluster": name,
            "ray.io/node-type": "head" if worker is None else "worker",
            "ray.io/group": worker or "headgroup",
            "ray.io/identifier": f"{name}-{'worker' if worker else 'head'}",
            "ray.io/is-ray-node": "yes",
        },
    )
    ray = made["spec"]["containers"][0]
    host = f"{name}-head-svc.{cluster['metadata']['namespace']}.svc.cluster.local"
    start = _start_command(group, ray, f"{host}:{PORT}" if worker else None)
    if not ray.get("command") and not ray.get("args"):
        ray |= {"command": ["/bin/bash", "-c", "--"], "args": [f"ulimit -n 65536; {start}"]}
    _set_environment(cluster, ray, start, host if worker else None)
    for kind, delay_s, failures in (("livenessProbe", 30, 120), ("readinessProbe", 10, 10)):
        probe = {"initialDelaySeconds": delay_s, "failureThreshold": failures}
        probe |= {"periodSeconds": 5, "timeoutSeconds": 5}
        ray.setdefault(kind, probe | _healthy(is_head=worker is None))
    if worker:
        made["spec"].setdefault("initContainers", []).append(_waiting(ray, f"{host}:{PORT}"))
    return made


def _healthy(*, is_head: bool) -> dict[str, Any]:
    """One path tells of the raylet and, on the head, of the GCS."""
    has_agent = importlib.util.find_spec("aiohttp_cors") or Path(PACKAGES, "aiohttp_cors").is_dir()
    if has_agent:
        return {"httpGet": {"path": "/api/healthz", "port": AGENT_PORT}}
    names = ("raylet", "gcs_server") if is_head else ("raylet",)
    return {"exec": {"command": ["bash", "-c", " && ".join(f"pgrep -x {n}" for n in names)]}}


def _start_command(group: Mapping[str, Any], ray: Mapping[str, Any], address: str | None) -> str:
    options: dict[str, str] = {
        "block": "true",
        "metrics-export-port": str(METRICS_PORT),
        "dashboard-agent-listen-port": str(AGENT_PORT),
    }
    if address is None:
        options["dashboard-host"] = "0.0.0.0"
    else:
        options["address"] = address
    memory = ((ray.get("resources") or {}).get("limits") or {}).get("memory")
    if memory is not None:
        options["memory"] = str(size_of(memory))
    if group.get("labels"):
        options["labels"] = ",".join(f"{k}={v}" for k, v in sorted(group["labels"].items()))
    options |= {key: str(value) for key, value in (group.get("rayStartParams") or {}).items()}
    words = [f"--{k}" if v == "true" else f"--{k}={v}" for k, v in sorted(options.items())]
    return " ".join(["ray start", *([] if address else ["--head"]), *words])


def _set_environment(
    cluster: Mapping[str, Any], ray: dict[str, Any], start: str, host: str | None
) -> None:
    """What the template sets itself stays."""
    values = {
        "RAY_PORT": str(PORT),
        "RAY_ADDRESS": f"{host or '127.0.0.1'}:{PORT}",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
        "KUBERAY_GEN_RAY_START_CMD": start,
    }
    if host is not None:
        values |= {"FQ_RAY_IP": host, "RAY_IP": host.partition(".")[0]}
    fields = {
        "RAY_CLUSTER_NAME": "metadata.labels['ray.io/cluster']",
        "RAY_CLOUD_INSTANCE_ID": "metadata.name",
        "RAY_NODE_TYPE_NAME": "metadata.labels['ray.io/group']",
    }
    added: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in values.items()]
    for name, path in fields.items():
        added.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    auth = cluster["spec"].get("authOptions") or {}
    if auth.get("mode") == "token":
        secret = auth.get("secretName") or cluster["metadata"]["name"]
        token = {"secretKeyRef": {"name": secret, "key": "auth_token"}}
        added.append({"name": "RAY_AUTH_MODE", "value": "token"})
        added.append({"name": "RAY_AUTH_TOKEN", "valueFrom": token})
    own = ray.setdefault("env", [])
    names = {each["name"] for each in own}
    own.extend(each for each in added if each["name"] not in names)


def _waiting(ray: Mapping[str, Any], address: str) -> dict[str, Any]:
    taken = ("image", "imagePullPolicy", "securityContext", "env", "volumeMounts")
    return {
        **{key: copy.deepcopy(ray[key]) for key in taken if key in ray},
        "name": "wait-gcs-ready",
        "command": ["/bin/bash", "-c", "--"],
        "args": [_WAIT.format(address=address)],
        "resources": {"limits": {"cpu": "200m", "memory": "256Mi"}},
    }
