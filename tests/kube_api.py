"""As much of Kubernetes' API as Helm and an upgrade's Job need. Objects are kept; what was asked is
recorded, in order. Of what would happen in a cluster two things do: RayClusters have pods, as
KubeRay would make them, and Jobs are run by a function of the test."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from outrider.cluster.deploy.kube import Kube
from outrider.cluster.deploy.kube_rollout import RolloutPlan, roll_out
from outrider.errors import OutriderError

# By version: names in paths, and kinds.
RESOURCES = {
    "v1": {
        "services": "Service",
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "batch/v1": {"jobs": "Job"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "ray.io/v1": {"rayclusters": "RayCluster"},
}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_ITEM = re.compile(r"/(?:api|apis)/(.+)/namespaces/[^/]+/([a-z]+)(?:/([^/]+))?")


class KubeApi:
    """A server on a free port of this host."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}  # by kind and name
        self.changes: list[tuple[str, str, str]] = []  # what was done to which kind and name
        self.bad_images: set[str] = set()  # that no registry has
        self.serving: list[set[str]] = []  # RayClusters whose head was ready, after every change
        self.find_pods: Callable[[], list[dict[str, Any]]] | None = None  # in place of those above
        self.run_job: Callable[[dict[str, Any]], bool] | None = None  # whether it succeeds
        self.changed_at = threading.Condition()
        self.is_over = False
        self._serial = 0

    def named(self, kind: str) -> list[str]:
        return sorted(name for k, name in self.objects if k == kind)

    def changed(self, kind: str) -> list[tuple[str, str]]:
        return [(what, name) for what, k, name in self.changes if k == kind]

    def answer(
        self, verb: str, path: str, body: Any, query: dict[str, str], content: str
    ) -> tuple[int, dict[str, Any]]:
        known = _described(path)
        if known is not None:
            return 200, known
        found = _ITEM.fullmatch(path)
        kind = RESOURCES.get(found[1], {}).get(found[2]) if found is not None else None
        if found is None or kind is None:
            return 404, _status(404, path)
        with self.changed_at:
            before = self._serial
            code, answer = self._of_item(verb, found[1], kind, found[3], body, query, content)
            if self._serial != before:
                self._reconcile()
                self.changed_at.notify_all()
        if kind == "Job" and code == 201:
            threading.Thread(target=self._run, args=(answer,), daemon=True).start()
        return code, answer

    def _of_item(
        self,
        verb: str,
        version: str,
        kind: str,
        name: str | None,
        body: Any,
        query: dict[str, str],
        content: str,
    ) -> tuple[int, dict[str, Any]]:
        if verb == "GET" and name is None:
            metadata = {"resourceVersion": str(self._serial)}
            items = self.selected(kind, query)
            return 200, {
                "apiVersion": version,
                "kind": f"{kind}List",
                "metadata": metadata,
                "items": items,
            }
        name = name or body["metadata"]["name"]
        before = self.objects.get((kind, name))
        if before is None and (verb in ("GET", "DELETE") or "merge-patch" in content):
            return 404, _status(404, name)
        if verb == "GET" and before is not None:
            return 200, before
        if verb == "POST" and before is not None:
            return 409, _status(409, name)
        if verb == "DELETE":
            self._remove(kind, name)
            self.changes.append(("delete", kind, name))
            return 200, _status(200, name)
        if "merge-patch" in content and before is not None:
            body = _merged(before, body)
        self._keep(kind, name, body)
        self.changes.append(("create" if before is None else "update", kind, name))
        return 201 if before is None else 200, body

    def _keep(self, kind: str, name: str, item: dict[str, Any]) -> None:
        self._serial += 1
        metadata = {"uid": f"{kind}-{name}", "resourceVersion": str(self._serial)}
        version = next(v for v, kinds in RESOURCES.items() if kind in kinds.values())
        item |= {"apiVersion": version, "kind": kind, "metadata": item["metadata"] | metadata}
        self.objects[kind, name] = item

    def _remove(self, kind: str, name: str) -> None:
        self._serial += 1
        del self.objects[kind, name]

    def selected(self, kind: str, query: dict[str, str]) -> list[dict[str, Any]]:
        if kind == "Pod" and self.find_pods is not None:
            items = {each["metadata"]["name"]: each for each in self.find_pods()}
        else:
            items = {name: item for (k, name), item in self.objects.items() if k == kind}
        labels = dict(p.split("=") for p in query.get("labelSelector", "").split(",") if p)
        fields = dict(p.split("=") for p in query.get("fieldSelector", "").split(",") if p)
        wanted = fields.get("metadata.name")
        return [
            item
            for name, item in items.items()
            if wanted in (None, name)
            and labels.items() <= item["metadata"].get("labels", {}).items()
        ]

    # -- what a cluster would do ----------------------------------------------------------------

    def _reconcile(self) -> None:
        """As KubeRay: a RayCluster that is not suspended has its pods."""
        if self.find_pods is not None:
            return
        wanted: dict[str, dict[str, Any]] = {}
        for (kind, name), cluster in self.objects.items():
            if kind == "RayCluster" and not cluster["spec"].get("suspend"):
                wanted |= self._pods_of(name, cluster["spec"])
        for kind, name in list(self.objects):
            is_own = kind == "Pod" and "ray.io/cluster" in _labels(self.objects[kind, name])
            if is_own and name not in wanted:
                self._remove("Pod", name)
        for name, pod in wanted.items():
            if self.objects.get(("Pod", name), {}).get("status") != pod["status"]:
                self._keep("Pod", name, pod)
        ready = {
            _labels(item)["ray.io/cluster"]
            for (kind, name), item in self.objects.items()
            if kind == "Pod" and name.endswith("-head") and not item["status"]["stuck"]
        }
        self.serving.append(ready)

    def _pods_of(self, name: str, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
        found = {}
        groups = [("head", spec["headGroupSpec"])]
        groups += [(each["groupName"], each) for each in spec["workerGroupSpecs"]]
        images = {each["template"]["spec"]["containers"][0]["image"] for _, each in groups}
        for group, each in groups:
            template = each["template"]
            image = template["spec"]["containers"][0]["image"]
            labels = dict(template["metadata"]["labels"])
            labels |= {"ray.io/cluster": name, "ray.io/node-type": _node_type(group)}
            waiting = {"reason": "ImagePullBackOff", "message": f"Back-off pulling image {image}"}
            is_stuck = image in self.bad_images
            state = {"waiting": waiting} if is_stuck else {"running": {}}
            ready = "False" if images & self.bad_images else "True"
            found[f"{name}-{group}"] = {
                "metadata": {"name": f"{name}-{group}", "labels": labels},
                "spec": template["spec"],
                "status": {
                    "stuck": is_stuck,
                    "conditions": [{"type": "Ready", "status": ready}],
                    "containerStatuses": [{"name": group, "image": image, "state": state}],
                },
            }
        return found

    def _run(self, job: dict[str, Any]) -> None:
        is_done = self.run_job is None or self.run_job(job)
        with self.changed_at:
            name = job["metadata"]["name"]
            if ("Job", name) in self.objects:
                kind = "Complete" if is_done else "Failed"
                conditions = [{"type": kind, "status": "True", "reason": "Test"}]
                status = {"conditions": conditions, "succeeded": int(is_done)}
                self._keep("Job", name, job | {"status": status | {"failed": int(not is_done)}})
                self.changed_at.notify_all()

    def watch(self, path: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        """What is there, then every change, until the test is over."""
        found = _ITEM.fullmatch(path)
        assert found is not None
        version, kind = found[1], RESOURCES[found[1]][found[2]]
        known: dict[str, dict[str, Any]] = {}
        has_begun = query.get("sendInitialEvents") != "true" and "resourceVersion" in query
        while not self.is_over:
            with self.changed_at:
                now = {each["metadata"]["name"]: each for each in self.selected(kind, query)}
                serial = self._serial
            for name in known.keys() - now.keys():
                yield {"type": "DELETED", "object": known[name]}
            for name, item in now.items():
                before = known.get(name)
                if before is None:
                    yield {"type": "ADDED", "object": item}
                elif before["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                    yield {"type": "MODIFIED", "object": item}
            known = now
            if not has_begun:
                has_begun = True
                metadata: dict[str, Any] = {"resourceVersion": str(serial)}
                metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
                bookmark = {"apiVersion": version, "kind": kind, "metadata": metadata}
                yield {"type": "BOOKMARK", "object": bookmark}
            with self.changed_at:
                if self._serial == serial:
                    self.changed_at.wait(1.0)


def _labels(item: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = item["metadata"].get("labels", {})
    return found


def _node_type(group: str) -> str:
    return "head" if group == "head" else "worker"


def _merged(base: Any, change: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    kept = {key: value for key, value in base.items() if change.get(key, value) is not None}
    return kept | {k: _merged(base.get(k), v) for k, v in change.items() if v is not None}


def _described(path: str) -> dict[str, Any] | None:
    """What the server has, as clients ask at first."""
    groups = [version for version in RESOURCES if "/" in version]
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "groups": [_group(version) for version in groups]}
    if path.startswith("/openapi/v3"):
        return _validation(path.removeprefix("/openapi/v3").strip("/"))
    if path.startswith("/apis/apiextensions.k8s.io/"):
        return {"kind": "CustomResourceDefinitionList", "items": []}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in RESOURCES:
        return None
    resources = [
        {"name": name, "kind": kind, "namespaced": True, "verbs": _VERBS}
        for name, kind in RESOURCES[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _validation(place: str) -> dict[str, Any]:
    """That objects are checked by the server, so that Helm need not."""
    if not place:
        places = [_place(version) for version in RESOURCES]
        return {"paths": {p: {"serverRelativeURL": f"/openapi/v3/{p}"} for p in places}}
    (version,) = (each for each in RESOURCES if _place(each) == place)
    group, _, short = version.rpartition("/")
    paths = {}
    for name, kind in RESOURCES[version].items():
        described = {"group": group, "version": short, "kind": kind}
        patch = {
            "parameters": [{"name": "fieldValidation", "in": "query"}],
            "responses": {},
            "x-kubernetes-group-version-kind": described,
        }
        paths[f"/{place}/namespaces/{{namespace}}/{name}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}


def _place(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _group(version: str) -> dict[str, Any]:
    name, _, short = version.partition("/")
    found = {"groupVersion": version, "version": short}
    return {"name": name, "versions": [found], "preferredVersion": found}


def _status(code: int, about: str) -> dict[str, Any]:
    reason = {404: "NotFound", 409: "AlreadyExists"}.get(code, "")
    status = "Failure" if code >= 400 else "Success"
    kind = {"apiVersion": "v1", "kind": "Status", "code": code}
    return {**kind, "status": status, "reason": reason, "message": about}


@contextmanager
def running_api() -> Iterator[tuple[KubeApi, str]]:
    """The API and its address."""
    api = KubeApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = yaml.load(self.rfile.read(size), Loader=_LOADER) if size else None
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            if query.get("watch") in ("true", "1"):
                self._watch(parts.path, query)
                return
            content = self.headers.get("Content-Type") or ""
            code, answer = api.answer(self.command, parts.path, body, query, content)
            payload = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def _watch(self, path: str, query: dict[str, str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):
                for event in api.watch(path, query):
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                    self.wfile.flush()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="kube-api", daemon=True)
    thread.start()
    try:
        yield api, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        with api.changed_at:
            api.is_over = True
            api.changed_at.notify_all()
        server.shutdown()
        server.server_close()
        thread.join(60)


def run_upgrade(
    api: KubeApi,
    url: str,
    job: dict[str, Any],
    said: list[str],
    settle_s: float | None = None,
) -> bool:
    """What the one container of the chart's upgrade Job does, with the volume that it mounts."""
    template = job["spec"]["template"]["spec"]
    [container] = template["containers"]
    *command, path = container["args"]
    assert command == ["outrider", "rollout", "--kube"]
    [volume] = [each for each in template["volumes"] if "configMap" in each]
    data = api.objects["ConfigMap", volume["configMap"]["name"]]["data"]
    settings, *items = yaml.load_all(data[path.rpartition("/")[2]], Loader=_LOADER)
    plan = RolloutPlan.of(settings, items)
    if settle_s is not None:
        plan = dataclasses.replace(plan, settle_s=settle_s)
    kube = Kube(url, plan.namespace)
    try:
        asyncio.run(roll_out(kube, plan, lambda event: said.append(event.text)))
    except OutriderError as error:
        said.append(str(error))
        return False
    return True
