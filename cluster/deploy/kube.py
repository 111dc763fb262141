"""A minimal Kubernetes API client for rollouts: HTTPS with the pod's own token."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, OutriderError

REQUEST_S = 30.0
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MERGE = "application/merge-patch+json"
_RETRIED = frozenset({429, 500, 502, 503, 504})

RAY_CLUSTERS = "apis/ray.io/v1", "rayclusters"
CONFIG_MAPS = "api/v1", "configmaps"
PODS = "api/v1", "pods"

Resource = tuple[str, str]


class KubeError(OutriderError):
    """The API server refused a request, or could not be reached."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_transient(self) -> bool:
        return self.status == 0 or self.status in _RETRIED


@dataclass(frozen=True, slots=True)
class Kube:
    """One namespace of an API server. Reads the token for every request: Kubernetes rotates it."""

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls) -> Kube:
        """The API server as seen from a pod with a service account."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (_ACCOUNT / "token").exists():
            raise ConfigError(
                "there is no Kubernetes API to reach; --kube works in a pod with a service "
                "account, as the chart's upgrade Job."
            )
        shown = f"[{host}]" if ":" in host else host
        namespace = (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        return cls(f"https://{shown}:{port}", namespace, _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def find(self, resource: Resource, labels: dict[str, str]) -> list[dict[str, Any]]:
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        query = urllib.parse.urlencode({"labelSelector": selector})
        items: list[dict[str, Any]] = self._send("GET", f"{self._path(resource)}?{query}")["items"]
        return items

    def create(self, resource: Resource, item: dict[str, Any]) -> bool:
        """False if one of that name exists already."""
        try:
            self._send("POST", self._path(resource), item)
        except KubeError as error:
            if error.status == 409:
                return False
            raise
        return True

    def patch(self, resource: Resource, name: str, change: dict[str, Any]) -> None:
        self._send("PATCH", f"{self._path(resource)}/{name}", change, _MERGE)

    def delete(self, resource: Resource, name: str) -> None:
        """Succeeds if it is gone already."""
        try:
            self._send("DELETE", f"{self._path(resource)}/{name}")
        except KubeError as error:
            if error.status != 404:
                raise

    def _path(self, resource: Resource) -> str:
        group, plural = resource
        return f"{group}/namespaces/{self.namespace}/{plural}"

    def _send(
        self, method: str, path: str, body: Any = None, content: str = "application/json"
    ) -> dict[str, Any]:
        headers = {"Accept": "application/json", "Content-Type": content}
        if self.token_file is not None:
            headers["Authorization"] = f"Bearer {self.token_file.read_text('utf-8').strip()}"
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.url}/{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        trust = None if self.ca_file is None else ssl.create_default_context(cafile=self.ca_file)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S, context=trust) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(4096).decode("utf-8", "replace")
            raise KubeError(f"{method} {path}: {_message(text, error)}", error.code) from error
        except (OSError, ValueError) as error:
            raise KubeError(f"{method} {path}: {error}.") from error
        return found


def _message(text: str, error: urllib.error.HTTPError) -> str:
    """The message of a Kubernetes `Status`."""
    try:
        found = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        found = f"{error.code} {error.reason}"
    return found if found.endswith(".") else f"{found}."
