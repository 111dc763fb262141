"""Typed access to Ray's state of cluster, node and process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray

Resources: TypeAlias = Mapping[str, float]
"""Amounts by name: "CPU", "GPU"."""

_ray: Any = ray  # largely untyped


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive."""

    id: str
    ip: str
    labels: Mapping[str, str]
    has: Resources
    free: Resources


def live_nodes() -> list[Node]:
    free = _ray._private.state.available_resources_per_node()
    return [
        Node(
            each["NodeID"],
            each["NodeManagerAddress"],
            each.get("Labels") or {},
            each["Resources"],
            free.get(each["NodeID"], {}),
        )
        for each in _ray.nodes()
        if each["Alive"]
    ]


def live_node_ids() -> set[str]:
    return {each["NodeID"] for each in _ray.nodes() if each["Alive"]}


def cluster_resources() -> Resources:
    found: Resources = _ray.cluster_resources()
    return found


def free_resources() -> Resources:
    found: Resources = _ray.available_resources()
    return found


def num_nodes() -> int:
    return sum(node["Alive"] for node in _ray.nodes())


def bootstrap_address(address: str) -> str:
    """Resolves "auto" if possible; returns other addresses unchanged."""
    if address != "auto":
        return address
    try:
        return str(_ray._private.services.canonicalize_bootstrap_address(address) or address)
    except (OSError, ValueError):
        return address


def dead_services() -> list[str]:
    """Ended services of a Ray that this process started."""
    node = _ray._private.worker._global_node
    dead = {kind for kind, _ in node.dead_processes()} if node is not None else set()
    return sorted(dead & {"gcs_server", "raylet"})


def own_node_id() -> str:
    found: str = _ray.get_runtime_context().get_node_id()
    return found


def own_node_ip() -> str:
    found: str = _ray.util.get_node_ip_address()
    return found


def own_gpu_ids() -> tuple[str, ...]:
    """GPUs that Ray gave this process."""
    return tuple(map(str, _ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))


def node_memory() -> tuple[int, int]:
    """Used and total bytes of memory on this node, or in its container."""
    used: int = _ray._private.utils.get_used_memory()
    total: int = _ray._private.utils.get_system_memory()
    return used, total


def silence_ray_logs() -> None:
    """Silence Ray's messages on lost processes, which the server reports itself, and its warning
    that a thread cannot install a SIGTERM handler. Ray has no public switch for either."""
    _ray._private.worker._worker_logs_enabled = False
    logging.getLogger(_ray._private.worker.__name__).addFilter(_is_not_about_sigterm)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("SIGTERM handler is not set")


def logs_folder() -> Path:
    """The log folder of this Ray session on this node."""
    return Path(_ray._private.worker.global_worker.node.get_logs_dir_path())


def kill_on_shutdown() -> None:
    """Have `ray.shutdown` SIGKILL the processes of a Ray started here; SIGTERM takes a second
    each."""
    for infos in _ray._private.worker._global_node.all_processes.values():
        for info in infos:
            info.process.terminate = info.process.kill
