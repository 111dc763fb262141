"""A cluster that runs a Helm release: Helm keeps objects in `kube_api.py`, and pods follow them as
the controllers of Kubernetes and KubeRay would have it, in the namespaces of `pods.py`.

    with PodCluster(pace=0.2) as cluster:
        cluster.install(chart_tools.example_values("cpu-demo"))
        cluster.wait_ready()
        address = cluster.address("demo-outrider-gateway", 50051)   # 127.0.0.1:...; also 8000
        target = cluster.pod("target")
        cluster.kill(target, RANK)                # a process, by a pattern of its command line
        target.delete()                           # as `kubectl delete pod`; `lose()`: power cut
        cluster.drain(target.host)                # cordons the node and evicts its pods
        cluster.install(new_values)               # again: helm upgrade
        print(cluster.report())                   # states and logs

Images are names in `cluster.images`, each of a checkout; another name stays in ImagePullBackOff.
Network policies are not enforced, and seccomp profiles not applied.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import helm_python
import kuberay
import yaml
from certificates import Authority
from chart_tools import CHART, NAMESPACE, RELEASE
from cut_connections import Way, way_to
from kube_api import running_api
from kubelet import Pod, describe
from pod_containers import Node
from pod_image import UID
from pods import ROOT, Machine
from waits import wait_until

UP_S = 240.0
_TICK_S = 0.1
_REPOSITORIES = ("outrider-engine", "outrider-engine-cpu", "outrider-gateway")
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_WARM = """
from outrider.kernels.cpu.build import library_path
from outrider.workers.weights.checkpoint import checkpoint_folder
library_path()
checkpoint_folder("smollm2-135m-instruct")
"""
# Of command lines. What was a spare keeps its name; the oldest is the one that works.
RANK, ENGINE = "^ray::(RankActor|SpareRank)", "^ray::(EngineActor|SpareEngine)"
CONTROLLER, GCS = "python3 .*outrider controller", "gcs_server"
NEXT = "next"  # tag of another image that is there, of the same checkout


def default_images() -> dict[str, Path]:
    """Those that the chart's examples name."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    tags = (version, NEXT)
    return {f"registry.example/{name}:{tag}": ROOT for name in _REPOSITORIES for tag in tags}


class PodCluster:
    """Leaving the context ends everything in it, at once."""

    def __init__(
        self,
        *,
        pace: float = 1.0,
        nodes: Sequence[str] = ("node-a", "node-b"),
        is_warm: bool = True,  # volumes named models have the bundled pair, converted
    ) -> None:
        self.images = default_images()
        self.pods: list[Pod] = []
        self.nodes = list(nodes)
        self.cordoned: set[str] = set()
        self._pace = pace
        self._is_warm = is_warm
        self._is_installed = False
        self._drained: set[str] = set()
        self._made: dict[tuple[str, str], list[kuberay.Wanted]] = {}  # by name and version
        self._hosts = ""
        self._ways: dict[tuple[str, int], Way] = {}
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._num_ticks = 0
        self._error = ""
        self._stack = ExitStack()

    def __enter__(self) -> PodCluster:
        with ExitStack() as stack:
            self._machine = stack.enter_context(Machine())
            self.api, url = stack.enter_context(running_api())
            access = {"clusters": [{"name": "here", "cluster": {"server": url}}]}
            access["contexts"] = [{"name": "here", "context": {"cluster": "here"}}]
            content = json.dumps({"kind": "Config", "current-context": "here", **access})
            self._helm = stack.enter_context(
                helm_python.Config(
                    kubeconfig_content=content,
                    namespace=NAMESPACE,
                    storage_driver="memory",
                    qps=1000.0,
                    burst_limit=1000,
                )
            )
            warm = _warmed(self._machine.folder / "warm") if self._is_warm else None
            self._node = Node(self._machine, self._get, self.images, warm, self._pace)
            self._publish_api(url, stack)
            stack.callback(self._node.pool.shutdown, cancel_futures=True)
            thread = threading.Thread(target=self._run, name="pods", daemon=True)
            thread.start()
            stack.callback(self._end, thread)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _publish_api(self, url: str, stack: ExitStack) -> None:
        """For pods, with TLS; and have it know of pods and run Jobs."""
        host = f"{self._machine.switch.subnet}.1"
        authority = Authority(self._machine.folder)
        issued = authority.issue(address=host)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(issued.cert, issued.key)
        way = stack.enter_context(way_to(url.removeprefix("http://"), host, context))
        self._node.api = way.address
        self._node.account = {
            "token": b"a token",
            "namespace": NAMESPACE.encode(),
            "ca.crt": authority.cert.read_bytes(),
        }
        vars(self.api).update(find_pods=self.pod_objects, run_job=self.run_job)

    def pod_objects(self) -> list[dict[str, Any]]:
        return [each.to_object() for each in list(self.pods) if not each.is_gone]

    def run_job(self, job: Mapping[str, Any]) -> bool:
        """Run the pod of a Job to its end; whether it succeeded."""
        with self._lock:
            pod = self._create(job, "", job["spec"]["template"])
        limit_s = job["spec"].get("activeDeadlineSeconds", UP_S)
        try:
            self.wait(lambda: pod.is_done or pod.is_gone, limit_s)
        except AssertionError:
            return False
        return not pod.is_gone and all(each.exit_codes[-1] == 0 for each in pod.containers)

    def _get(self, kind: str, name: str) -> Mapping[str, Any]:
        return self.api.objects[kind, name]

    # -- what tests do -------------------------------------------------------------------------

    def install(self, values: Mapping[str, Any], limit_s: float = UP_S) -> None:
        """Install the release, or upgrade it; hooks are waited for."""
        act = self._helm.upgrade if self._is_installed else self._helm.install
        act(CHART, RELEASE, dict(values), timeout=int(limit_s))
        self._is_installed = True

    def uninstall(self) -> None:
        self._helm.uninstall(RELEASE, timeout=int(UP_S))

    def of(self, component: str) -> list[Pod]:
        """Pods of a component that are not gone, oldest first."""
        return [each for each in self.pods if each.component == component and not each.is_gone]

    def pod(self, component: str, index: int = 0) -> Pod:
        return [each for each in self.of(component) if not each.is_deleted][index]

    def address(self, service: str, port: int) -> str:
        """Of a Service on this machine: each connection goes to one of its ready pods."""
        with self._lock:
            if (service, port) not in self._ways:
                self._ways[service, port] = self._stack.enter_context(way_to(""))
                self._update_ways()
            return self._ways[service, port].address

    def wait_ready(self, limit_s: float = UP_S) -> None:
        self.wait(self.is_whole, limit_s)

    def is_whole(self) -> bool:
        """All pods that there should be are ready, and none is about to go."""
        with self._lock:
            there = [each for each in self.pods if not each.is_done]
            wanted = sum(count for *_, count in self._wanted())
            return len(there) == wanted and all(each.is_ready for each in there)

    def wait(self, condition: Callable[[], bool], limit_s: float = UP_S) -> None:
        wait_until(lambda: condition() or bool(self._error), limit_s, self.report)
        assert not self._error, self._error

    def kill(self, pod: Pod, pattern: str, number: signal.Signals = signal.SIGKILL) -> int:
        """The oldest process of a pod whose command line the pattern is found in."""
        found = pod.processes(pattern)
        assert found, f"no process of {pod.name} matches {pattern}: {pod.processes()}"
        pid = min(found, key=lambda each: int(_stat(each)[19]))
        os.kill(pid, number)
        return pid

    def drain(self, node: str) -> None:
        """Cordon a node and evict its pods, as budgets allow."""
        with self._lock:
            self.cordoned.add(node)
            self._drained.add(node)

    def uncordon(self, node: str) -> None:
        with self._lock:
            self.cordoned.discard(node)
            self._drained.discard(node)

    def report(self) -> str:
        return describe([each for each in self.pods if not each.is_gone])

    # -- controllers ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over.wait(_TICK_S):
            try:
                with self._lock:
                    self._tick()
            except Exception:
                self._error = traceback.format_exc()
                return

    def _end(self, thread: threading.Thread) -> None:
        self._is_over.set()
        thread.join(60)
        for each in self.pods:
            if not each.is_gone:
                each.lose()

    def _tick(self) -> None:
        self._num_ticks += 1
        for pod in self.pods:
            pod.tick()
        self.pods = [each for each in self.pods if not each.is_gone]
        self._reconcile()
        for pod in self.pods:
            if pod.host in self._drained and not pod.is_deleted and self._may_evict(pod):
                pod.delete()
        self._update_hosts()
        self._update_ways()

    def _reconcile(self) -> None:
        owners = set(self.api.objects)
        for pod in self.pods:
            if pod.owner not in owners:
                pod.delete()
        for item, group, template, count in self._wanted():
            mine = [each for each in self.pods if each.owner == _key(item)]
            mine = [each for each in mine if each.labels.get("group-of-tests") == group]
            if item["kind"] == "Deployment":
                self._roll(item, template, count, mine)
            elif item["kind"] == "StatefulSet":
                self._roll_in_place(item, template, count, mine)
            else:  # KubeRay counts a pod until it is gone
                for _ in range(count - len(mine)):
                    self._create(item, group, template)
                for each in mine[count:]:
                    each.delete()

    def _objects(self) -> list[tuple[tuple[str, str], dict[str, Any]]]:
        return sorted(dict(self.api.objects).items(), key=lambda each: each[0])

    def _wanted(self) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any], int]]:
        """Groups of pods: owner, name of the group, template, count."""
        for (kind, name), item in self._objects():
            if kind == "RayCluster":
                key = name, item["metadata"]["resourceVersion"]
                if key not in self._made:
                    self._made[key] = list(kuberay.wanted(item))
                for group, count, template in self._made[key]:
                    yield item, group, template, 0 if item["spec"].get("suspend") else count
            elif kind in ("Deployment", "StatefulSet"):
                yield item, "", item["spec"]["template"], item["spec"].get("replicas", 1)

    def _roll(
        self, item: Mapping[str, Any], template: Mapping[str, Any], count: int, mine: list[Pod]
    ) -> None:
        rolling = item["spec"].get("strategy", {}).get("rollingUpdate", {})
        surge, missing = rolling.get("maxSurge", 1), rolling.get("maxUnavailable", 0)
        live = [each for each in mine if not each.is_deleted]
        new = [each for each in live if each.labels["pod-template-hash"] == _digest(template)]
        old = [each for each in live if each not in new]
        for _ in range(min(count - len(new), count + surge - len(live))):
            self._create(item, "", template)
        num_ready = sum(each.is_ready for each in live)
        for each in sorted(old, key=lambda pod: pod.is_ready) + new[count:]:
            if not each.is_ready or num_ready > count - missing:
                num_ready -= each.is_ready
                each.delete()

    def _roll_in_place(
        self, item: Mapping[str, Any], template: Mapping[str, Any], count: int, mine: list[Pod]
    ) -> None:
        """By their numbers, one at a time."""
        named = {each.name: each for each in mine}
        for index in range(count):
            pod = named.get(f"{item['metadata']['name']}-{index}")
            if pod is None:
                self._create(item, "", template, str(index))
            if pod is None or not pod.is_ready:
                return
        for pod in reversed(mine):
            if pod.labels["pod-template-hash"] != _digest(template) or len(mine) > count:
                pod.delete()
                return

    def _create(
        self, item: Mapping[str, Any], group: str, template: Mapping[str, Any], suffix: str = ""
    ) -> Pod:
        owner = item["metadata"]["name"]
        infix = {"": "", "headgroup": "-head"}.get(group, f"-{group}-worker")
        suffix = suffix or "".join(random.choices(_LETTERS, k=5))
        pod = Pod(self._node, f"{owner}{infix}-{suffix}", NAMESPACE, template)
        pod.labels |= {"pod-template-hash": _digest(template), "group-of-tests": group}
        pod.owner = _key(item)
        pod.host = self._place(pod)
        pod.write_hosts(self._hosts)
        self.pods.append(pod)
        return pod

    def _place(self, pod: Pod) -> str:
        """With its siblings of one RayCluster, else where there are fewest."""
        free = [each for each in self.nodes if each not in self.cordoned] or self.nodes
        if pod.owner[0] == "RayCluster":
            for sibling in self.pods:
                if sibling.owner == pod.owner and sibling.host in free:
                    return sibling.host
        return min(free, key=lambda node: sum(each.host == node for each in self.pods))

    def _may_evict(self, pod: Pod) -> bool:
        """Whether the budgets of a pod that is ready leave room for its end."""
        for (kind, _), item in self._objects():
            if kind == "PodDisruptionBudget" and pod.is_ready:
                labels, spec = item["spec"]["selector"]["matchLabels"], item["spec"]
                if not _selects(labels, pod.labels):
                    continue
                wanted = [
                    count
                    for _, _, template, count in self._wanted()
                    if _selects(labels, template["metadata"].get("labels") or {})
                ]
                least = spec.get("minAvailable", sum(wanted) - int(spec.get("maxUnavailable", 0)))
                ready = [p for p in self.pods if p.is_ready and _selects(labels, p.labels)]
                if len(ready) - 1 < int(least):
                    return False
        return True

    # -- services ------------------------------------------------------------------------------

    def _services(self) -> Iterator[Mapping[str, Any]]:
        for (kind, _), item in self._objects():
            if kind == "Service":
                yield item
            elif kind == "RayCluster":
                yield kuberay.service(item)

    def _endpoints(self, service: Mapping[str, Any]) -> list[Pod]:
        spec = service["spec"]
        found = [
            each for each in self.pods if _selects(spec.get("selector") or {"": ""}, each.labels)
        ]
        if spec.get("publishNotReadyAddresses"):
            return found
        ready = [each for each in found if each.is_ready]
        # A proxy sends to those that end, if they still serve and there are no others.
        is_proxied = spec.get("clusterIP") != "None"
        return ready or ([each for each in found if each.serves] if is_proxied else [])

    def _update_hosts(self) -> None:
        lines = []
        for service in self._services():
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            short = f"{name}.{namespace}"
            names = f"{short}.svc.cluster.local {short}.svc {short} {name}"
            found = self._endpoints(service)
            if service["spec"].get("clusterIP") != "None":
                found = found[:1]
            lines += [f"{pod.ip} {names}" for pod in found]
        text = "\n".join(lines) + "\n"
        if text != self._hosts:
            self._hosts = text
            for pod in self.pods:
                pod.write_hosts(text)

    def _update_ways(self) -> None:
        services = {each["metadata"]["name"]: each for each in self._services()}
        for (name, port), way in self._ways.items():
            found = self._endpoints(services[name]) if name in services else []
            way.is_closed = not found
            if found:
                pod = found[self._num_ticks % len(found)]
                way.target = f"{pod.ip}:{port}"


def _stat(pid: int) -> list[str]:
    """What the system says of a process after its name; at 19, when it began."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _digest(template: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _selects(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return wanted.items() <= labels.items()


def _warmed(folder: Path) -> Path:
    """A cache of the images' user with what starts would else each convert and compile."""
    source = Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider")
    subprocess.run(
        [sys.executable, "-c", _WARM],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OUTRIDER_CACHE": str(source)},
        check=True,
        timeout=UP_S,
    )
    with suppress(FileExistsError):
        folder.mkdir()
    wanted = re.compile("gguf|fingerprints|kernels")
    for each in source.iterdir():
        if wanted.fullmatch(each.name):
            shutil.copytree(each, folder / "outrider" / each.name)
    subprocess.run(["chown", "-R", f"{UID}:{UID}", str(folder)], check=True)
    return folder
