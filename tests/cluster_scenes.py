"""Servers over several nodes of Ray, and gateways of several controllers."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster_tools import all_pids, command_line, is_marked
from kept_processes import Kept
from kill_load import Addresses
from kill_scenes import RayActors, Scene, settings
from waits import wait_until

_NUM_NODES = 4
_OBJECT_STORE_BYTES = 80 * 2**20
_RAY_VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
_FREED_S = 20.0
_MARK = "_CONTROLLER_OF_TEST"
_LOOPBACK = "127.0.0.1"


class RayNodes(RayActors):
    """In a cluster of nodes with one CPU each, so that target and draft are on different ones; the
    driver's has none."""

    name = "Ray nodes"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._stack = ExitStack()

    def start(self) -> None:
        with ExitStack() as stack:
            self._start_ray(stack)
            self._stack = stack.pop_all()
        super().start()

    def _start_ray(self, stack: ExitStack) -> None:
        from ray.cluster_utils import Cluster

        self._ray_folder = tempfile.mkdtemp(prefix="k-")
        stack.callback(shutil.rmtree, self._ray_folder, ignore_errors=True)
        os.mkdir(f"{self._ray_folder}/ray")  # Ray writes there which cluster was started last
        os.environ |= _RAY_VARIABLES | {"RAY_TMPDIR": self._ray_folder}
        stack.callback(os.environ.pop, "RAY_TMPDIR")
        common: dict[str, Any] = {
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
        head = common | {"num_cpus": 0}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(self._cluster.shutdown)
        self._nodes = [self._cluster.add_node(num_cpus=1, **common) for _ in range(_NUM_NODES)]
        self.arguments = ("--set", f"cluster.address={self._cluster.address}")

    def pids(self, role: str) -> list[int]:
        """Actors are children of a Ray that was there before, so they are known by their names."""
        if role in ("engine", "controller"):
            raylets = set(self._raylets())
            pattern = self.patterns[role].removeprefix("^")
            names = {pid: command_line(pid) for pid in all_pids() if _parent(pid) in raylets}
            return [pid for pid, name in names.items() if name.startswith(pattern)]
        return super().pids(role)

    def own_pids(self) -> list[int]:
        actors = [pid for role in ("engine", "target", "draft") for pid in self.pids(role)]
        return [*super().own_pids(), *actors]

    def lose_node_of(self, role: str) -> set[int]:
        """All that runs there is gone at once."""
        [pid] = self.pids(role)
        raylet = _parent(pid)
        [node] = [each for each in self._nodes if _raylet_of(each) == raylet]
        there = {each for each in all_pids() if _parent(each) == raylet}
        lost = there & {each for name in self.roles for each in self.pids(name)}
        os.kill(raylet, signal.SIGKILL)
        for each in there:
            os.kill(each, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.remove(node)
        return lost

    def close(self) -> None:
        super().close()
        wait_until(lambda: not self._held(), _FREED_S, lambda: f"still held: {self._held()}")

    def _held(self) -> list[str]:
        """What Ray still keeps for the server."""
        import ray as untyped

        ray: Any = untyped

        ray.init(self._cluster.address, log_to_driver=False, configure_logging=False)
        try:
            groups = ray.util.placement_group_table().values()
            held = [f"placement group {each['name']}" for each in groups if _is_held(each)]
            free, total = ray.available_resources(), ray.cluster_resources()
            if free.get("CPU") != total.get("CPU"):
                held.append(f"CPUs: {free.get('CPU')} of {total.get('CPU')} are free")
            folders = Path(self._ray_folder).glob("ray/session_*/e-*")
            return held + [str(folder) for folder in folders]
        finally:
            ray.shutdown()

    def kill(self) -> None:
        super().kill()
        self._stack.close()

    def _raylets(self) -> list[int]:
        return [_raylet_of(each) for each in [self._cluster.head_node, *self._nodes]]


def _is_held(group: Mapping[str, Any]) -> bool:
    return bool(group["state"] != "REMOVED")


def _raylet_of(node: Any) -> int:
    [raylet] = node.all_processes["raylet"]
    pid: int = raylet.process.pid
    return pid


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Controllers(Scene):
    """Two controllers with a replica each, and two gateways that know both, each kept by somebody
    else, as pods are."""

    name = "controllers"
    counts = MappingProxyType({"target": 2, "draft": 2})

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kept: dict[str, Kept] = {}
        self._token = secrets.token_hex(8)
        self._environment = {
            "OUTRIDER_SECRET": secrets.token_hex(16),
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        self._temporary = tempfile.mkdtemp(prefix="k-")
        try:
            desks = [f"{_LOOPBACK}:{port}" for port in _free_ports(2)]
            for index, desk in enumerate(desks):
                name = f"controller {index}"
                words = ["--no-ray", *settings(self.folder), "--set", f"cluster.listen={desk}"]
                self._keep(name, "controller", *words)
            http, other_http, *grpc = _free_ports(4)
            for index, (port, grpc_port) in enumerate(zip((http, other_http), grpc, strict=True)):
                words = ["--controllers", ",".join(desks), "--set", f"server.port={port}"]
                words += ["--set", f"server.grpc_port={grpc_port}"]
                self._keep(f"gateway {index}", "gateway", *words)
            both = ",".join(f"{_LOOPBACK}:{port}" for port in grpc)
            self.where = Addresses(f"ipv4:{both}", f"{_LOOPBACK}:{http}")
            self.wait_whole(set())
        except BaseException:
            self.kill()
            raise

    def _keep(self, name: str, *arguments: str) -> None:
        log = self.folder / f"{name}.log"
        own = {"TMPDIR": self._temporary_of(name), _MARK: f"{self._token} {name}"}
        environment = self._environment | own
        self._kept[name] = Kept(log, ["outrider", *arguments], environment)

    def _temporary_of(self, name: str) -> str:
        folder = os.path.join(self._temporary, name.replace(" ", "-"))
        os.makedirs(folder, exist_ok=True)
        return folder

    def _pids_of(self, name: str) -> list[int]:
        return [pid for pid in all_pids() if is_marked(pid, f"{_MARK}={self._token} {name}")]

    def own_pids(self) -> list[int]:
        return [pid for name in self._kept for pid in self._pids_of(name)]

    def pids(self, role: str) -> list[int]:
        return self.rank_pids(role)

    def said(self) -> str:
        return "\n".join(f"{name}:\n{each.output}" for name, each in self._kept.items())

    def lose_controller(self) -> set[int]:
        """With all it has started and written, as when its host is lost."""
        name = "controller 0"
        lost = set(self._pids_of(name))
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._temporary_of(name), ignore_errors=True)
        self._temporary_of(name)
        return lost

    def lose_gateway(self) -> set[int]:
        lost = {self._kept["gateway 0"].pid}
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        return lost

    def close(self) -> None:
        for name in ("gateway 0", "gateway 1", "controller 0", "controller 1"):
            assert self._kept[name].terminate() == 0, self._kept[name].output
        wait_until(lambda: not self.own_pids(), 10, lambda: f"left: {self.own_pids()}")
        files = [file for name in self._kept for file in os.listdir(self._temporary_of(name))]
        left = [*files, *self.footprint.left()]
        assert left == [], f"left behind: {left}"

    def kill(self) -> None:
        for each in self._kept.values():
            each.keep_no_longer()
        for pid in self.own_pids():
            os.kill(pid, signal.SIGKILL)
        for each in self._kept.values():
            each.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((_LOOPBACK, 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
