"""As much of Kubernetes' API as Helm needs to install, look up and upgrade: objects are kept and
nothing is done about them. What was asked is recorded, in order."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import yaml

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
        self._lock = threading.Lock()
        self._serial = 0

    def named(self, kind: str) -> list[str]:
        return sorted(name for k, name in self.objects if k == kind)

    def changed(self, kind: str) -> list[tuple[str, str]]:
        return [(what, name) for what, k, name in self.changes if k == kind]

    def answer(self, verb: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        known = _described(path)
        if known is not None:
            return 200, known
        found = _ITEM.fullmatch(path)
        kind = RESOURCES.get(found[1], {}).get(found[2]) if found is not None else None
        if found is None or kind is None:
            return 404, _status(404, path)
        with self._lock:
            return self._of_item(verb, found[1], kind, found[3], body)

    def _of_item(
        self, verb: str, version: str, kind: str, name: str | None, body: Any
    ) -> tuple[int, dict[str, Any]]:
        if verb == "GET" and name is None:
            items = [item for (k, _), item in self.objects.items() if k == kind]
            return 200, {"apiVersion": version, "kind": f"{kind}List", "items": items}
        name = name or body["metadata"]["name"]
        before = self.objects.get((kind, name))
        if verb in ("GET", "DELETE") and before is None:
            return 404, _status(404, name)
        if verb == "GET" and before is not None:
            return 200, before
        if verb == "DELETE":
            del self.objects[kind, name]
            self.changes.append(("delete", kind, name))
            return 200, _status(200, name)
        self._serial += 1
        body["metadata"] |= {"uid": f"{kind}-{name}", "resourceVersion": str(self._serial)}
        self.objects[kind, name] = body
        self.changes.append(("create" if before is None else "update", kind, name))
        return 201 if before is None else 200, body


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
    reason = "NotFound" if code == 404 else ""
    status = "Failure" if code == 404 else "Success"
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
            code, answer = api.answer(self.command, urlsplit(self.path).path, body)
            payload = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

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
        server.shutdown()
        server.server_close()
        thread.join(60)
