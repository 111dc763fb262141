"""Every process started by hand and kept by a service manager, over TCP: on one host with ways that
can be cut, and on hosts that can be parted."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from cut_connections import Direction, Way, way_to
from hosts import Hosts
from kept_processes import Kept
from kill_load import Addresses
from kill_scenes import Scene, settings

from outrider.client import Client

_READY_S = 300.0
_FREE_PORTS = ("--set", "server.port=0", "--set", "server.grpc_port=0")
_LOOPBACK = "127.0.0.1"


class ByHand(Scene):
    """Ranks and gateway reach the engine over ways of their own."""

    name = "by hand"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kept: dict[str, Kept] = {}
        self.ways: dict[str, Way] = {}
        self._stack = ExitStack()
        self._environment = {"OUTRIDER_SECRET": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        try:
            self._prepare()
            host = self.address_of("engine")
            engine = f"{host}:{_free_port(host)}"
            self._keep(
                "engine", "outrider.engine", "--listen", f"tcp:{engine}", *settings(self.folder)
            )
            self.kept["engine"].find("(listening) on")
            for role in ("target", "draft"):
                arguments = ("--engine", f"tcp:{self.way(role, engine)}", "--role", role)
                self._keep(role, "outrider.workers", *arguments, "--rank", "0", "--size", "1")
            served = ("--set", f"server.host={self.address_of('gateway')}")
            dialled = ("--engine", f"tcp:{self.way('gateway', engine)}")
            self._keep("gateway", "outrider.gateway", *dialled, *served, *_FREE_PORTS)
            http = self.kept["gateway"].find(r"listening on (\S+) \(HTTP\)")
            self.where = Addresses(self.kept["gateway"].find(r"\(HTTP\) and (\S+)"), http)
            with Client(self.where.grpc_address) as client:
                client.wait_ready(_READY_S)
        except BaseException:
            self.kill()
            raise

    def _prepare(self) -> None:
        pass

    def address_of(self, role: str) -> str:
        return _LOOPBACK

    def way(self, role: str, engine: str) -> str:
        """By which it dials the engine."""
        self.ways[role] = self._stack.enter_context(way_to(engine))
        return self.ways[role].address

    def wrapper(self, role: str) -> Sequence[str]:
        return ()

    def _keep(self, role: str, *arguments: str) -> None:
        log = self.folder / f"{role}.log"
        self.kept[role] = Kept(log, arguments, self._environment, self.wrapper(role))

    def own_pids(self) -> list[int]:
        return [each.pid for each in self.kept.values()]

    def pids(self, role: str) -> list[int]:
        return self.rank_pids(role)

    def said(self) -> str:
        return "\n".join(f"{role}:\n{each.output}" for role, each in self.kept.items())

    def cut_inside_message(self, role: str, direction: Direction) -> set[int]:
        before = set(self.pids(role)) if role in self.roles else set()
        self.ways[role].cut_inside_message(direction)
        assert self.ways[role].was_halved.wait(30), "nothing was sent"
        return before

    def close(self) -> None:
        """As a service manager does: the gateway drains, the ranks end with their engine."""
        assert self.kept["gateway"].terminate() == 0, self.said()
        for role in self.roles:
            self.kept[role].keep_no_longer()
        assert self.kept["engine"].terminate() == 0, self.said()
        for role in self.roles:
            self.kept[role].wait_end()
        left = self.footprint.left()
        assert left == [], f"left behind: {left}"

    def kill(self) -> None:
        for each in self.kept.values():
            each.kill()
        self._stack.close()


class Apart(ByHand):
    """Engine, target and draft on hosts of their own; the gateway where the tests are."""

    name = "hosts"

    def _prepare(self) -> None:
        self.hosts = self._stack.enter_context(Hosts())
        self.by_role = {role: self.hosts.add(role) for role in ("engine", "target", "draft")}

    def address_of(self, role: str) -> str:
        host = self.by_role.get(role)
        return _LOOPBACK if host is None else host.ip

    def way(self, role: str, engine: str) -> str:
        return engine

    def wrapper(self, role: str) -> Sequence[str]:
        """Into its host's network; files are everybody's."""
        host = self.by_role.get(role)
        return () if host is None else ("nsenter", "-t", str(host.pid), "-n", "--")

    def part(self) -> set[int]:
        """Target and draft; the engine still reaches both."""
        self.hosts.part(self.by_role["target"], self.by_role["draft"])
        return set(self.pids("draft"))

    def unite(self) -> None:
        self.hosts.unite(self.by_role["target"], self.by_role["draft"])

    def cut_off(self, role: str) -> set[int]:
        """From everybody."""
        before = {self.kept[role].pid}
        self.hosts.cut(self.by_role[role])
        return before

    def reconnect(self, role: str) -> None:
        self.hosts.mend(self.by_role[role])


def _free_port(host: str) -> int:
    """Of a host whose ports are those of this one as far as anybody is concerned."""
    with socket.create_server((_LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
        return port
