"""What Ray knows of cluster, node and process, with types."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray

Resources: TypeAlias = Mapping[str, float]
"""Amounts by name: "CPU", "GPU"."""

_ray: Any = ray  # much of it declares no types


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
    """Where "auto" leads, if that is known; any other address as it is."""
    if address != "auto":
        return address
    try:
        return str(_ray._private.services.canonicalize_bootstrap_address(address) or address)
    except (OSError, ValueError):
        return address


def dead_services() -> list[str]:
    """Those that have ended of a Ray that was started here."""
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
    """GPUs this process was given."""
    return tuple(map(str, _ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))


def node_memory() -> tuple[int, int]:
    """Bytes in use on this node, and all it has: of the container, if it is one."""
    used: int = _ray._private.utils.get_used_memory()
    total: int = _ray._private.utils.get_system_memory()
    return used, total


def hush() -> None:
    """Keep Ray from writing about lost processes to standard output: whoever serves tells that
    itself, in a line. Ray has no public switch for it. Nor does it have to say in a thread that it
    leaves SIGTERM to us."""
    _ray._private.worker._worker_logs_enabled = False
    logging.getLogger(_ray._private.worker.__name__).addFilter(_is_not_about_sigterm)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("SIGTERM handler is not set")


def logs_folder() -> Path:
    """Where the processes of this Ray session log, on this node."""
    return Path(_ray._private.worker.global_worker.node.get_logs_dir_path())


def end_without_asking() -> None:
    """Have `ray.shutdown` kill the processes of a Ray that was started here, rather than ask each
    and wait a second for its answer."""
    for infos in _ray._private.worker._global_node.all_processes.values():
        for info in infos:
            info.process.terminate = info.process.kill
