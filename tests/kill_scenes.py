"""Servers to break: started, broken, seen whole again, and stopped with nothing left."""

from __future__ import annotations

import os
import shutil
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster_tools import ServeProcess, command_line
from footprints import Footprint, holders_of
from head_checkpoints import save_spelling
from kill_load import Addresses
from waits import wait_until

from outrider import OutriderError
from outrider.client import Client

WHOLE_S = 300.0  # until all that was lost is there again
DRAIN_S = 60.0
ENDING_S = 30.0  # after that, for the processes to end
STALL_S = 5.0
NUM_GATEWAYS = NUM_REPLICAS = 2
_RANKS = ("target", "draft")
_MODELS = (*_RANKS, "head")


def settings(folder: Path) -> list[str]:
    """Of a server of the models in this folder."""
    each = {f"{name}.model": folder / name for name in _MODELS if (folder / name).is_dir()} | {
        "deterministic": "true",
        "speculation.policy": "fixed",
        "cache.kv_cache_gb": 0.05,
        "num_threads": 1,
        "stall_timeout_s": STALL_S,
        "server.drain_s": DRAIN_S,
        "cluster.colocate": "false",
        # What waits for its turn is no process of the server's yet; it has tests of its own.
        "cluster.standby": "false",
    }
    return [word for name, value in each.items() for word in ("--set", f"{name}={value}")]


class Scene(ABC):
    """A server with models of its own, under `folder`."""

    name: str
    where: Addresses
    roles: Sequence[str] = _RANKS
    counts: Mapping[str, int] = MappingProxyType({})  # processes of each role, if not one

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.footprint = Footprint()
        self.expected: list[Any] | None = None  # results of the load, undisturbed and not drafted
        self.origins: list[Any] | None = None  # who wrote each token of it, undisturbed

    def take_models(self, pair: Any) -> None:
        """Fill the folder."""
        for name in _RANKS:
            shutil.copytree(getattr(pair, name), self.folder / name)

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def own_pids(self) -> list[int]: ...

    @abstractmethod
    def pids(self, role: str) -> list[int]:
        """Of processes of this role that work."""

    @abstractmethod
    def said(self) -> str:
        """All that an operator has been told."""

    @abstractmethod
    def close(self) -> None:
        """End what is left, with assertions that nothing else is."""

    @abstractmethod
    def kill(self) -> None:
        """End everything, whatever it leaves."""

    def tally(self) -> Mapping[str, int]:
        """How many things of each kind it has now, which must be as many when it is whole again."""
        return {}

    def signal(self, role: str, number: signal.Signals = signal.SIGKILL) -> set[int]:
        pids = set(self.pids(role)[:1])
        assert pids, f"there is no {role}"
        for pid in pids:
            os.kill(pid, number)
        return pids

    def wait_whole(self, lost: set[int]) -> None:
        """Until every role is there, and none of it is what was lost."""

        def is_whole() -> bool:
            found = {role: self.pids(role) for role in self.roles}
            are_there = all(len(pids) == self.counts.get(role, 1) for role, pids in found.items())
            return are_there and lost.isdisjoint(pid for pids in found.values() for pid in pids)

        wait_until(is_whole, WHOLE_S, lambda: f"not whole again:\n{self.said()}")

    def rank_pids(self, role: str) -> list[int]:
        try:
            with Client(self.where.grpc_address, resume=False) as client:
                engines = [each.engine for each in client.status().replicas]
        except OutriderError:
            return []
        ranks = [rank for engine in engines if engine is not None for rank in engine.ranks]
        return [rank.pid for rank in ranks if rank.role == role and rank.state == "ready"]


class Served(Scene):
    """`outrider serve`."""

    arguments: Sequence[str] = ()
    later: Sequence[str] = ()  # behind all settings
    patterns: Mapping[str, str]  # of command lines, by role; ranks else as the engine names them
    counts: Mapping[str, int] = MappingProxyType({"gateway": NUM_GATEWAYS})

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._is_told = False

    def start(self) -> None:
        words = [*self.arguments, *settings(self.folder), *self.later]
        self.server = ServeProcess("--processes", str(self.counts["gateway"]), *words)
        try:
            self.server.wait_ready().close()
        except BaseException:
            self.kill()
            raise
        self.where = Addresses(self.server.grpc_address, self.server.http_address)

    def own_pids(self) -> list[int]:
        return self.server.left_pids()

    def pids(self, role: str) -> list[int]:
        if role not in self.patterns:
            return self.rank_pids(role)
        found = self.server.pids_of(self.patterns[role])
        if role == "gateway":  # those that clients are connected to first
            port = int(self.where.grpc_address.rpartition(":")[2])
            busy = holders_of(port, found)
            return busy + [pid for pid in found if pid not in busy]
        return found

    def said(self) -> str:
        return self.server.output

    def terminate(self) -> None:
        """Once: a second signal would end it at once."""
        if not self._is_told and self.server.is_running:
            self._is_told = True
            self.server.terminate()

    def close(self) -> None:
        self.terminate()
        assert self.server.wait(DRAIN_S + ENDING_S) == 0, self.server.output
        self.server.wait_nothing_left()
        left = [*self.server.left_files(), *self.footprint.left()]
        assert left == [], f"left behind: {left}"

    def kill(self) -> None:
        self.server.__exit__(None, None, None)


class Children(Served):
    """Without Ray: engine and ranks are child processes."""

    name = "host"
    arguments: Sequence[str] = ("--no-ray",)
    patterns: Mapping[str, str] = {"gateway": "outrider[.]gateway", "engine": "outrider[.]engine"}
    roles: Sequence[str] = ("gateway", "engine", *_RANKS)

    def tally(self) -> Mapping[str, int]:
        kinds = [name.rpartition("-")[0] for name in self.server.left_files()]
        kinds += [line.partition(" ")[0] for line in self._modules()]
        return Counter(kinds)

    def _modules(self) -> list[str]:
        lines = [command_line(pid) for pid in self.own_pids()]
        return [line.partition(" -m ")[2] for line in lines]


class WithHead(Children):
    """A head on the target's hidden states drafts: it has no process of its own."""

    name = "head"
    roles = ("gateway", "engine", "target")
    counts: Mapping[str, int] = MappingProxyType({"gateway": 1})

    def take_models(self, pair: Any) -> None:
        save_spelling(self.folder)


class WithHeadOverRanks(WithHead):
    """The same in each of two ranks, which draft alike without a word to each other."""

    name = "head, two ranks"
    arguments = ("--no-ray", "--set", "target.tensor_parallel=2")
    counts = MappingProxyType({"gateway": 1, "target": 2})


class WithHeadAndSpare(WithHead):
    """The next engine waits beside the present one, with ranks that have no weights yet."""

    name = "head, spare"
    counts = MappingProxyType({"gateway": 1, "engine": 2})
    later = ("--set", "cluster.standby=true")

    def start(self) -> None:
        super().start()
        self.wait_whole(set())


class Replicas(Children):
    """Two engines with models of their own."""

    name = "replicas"
    arguments = ("--no-ray", "--set", f"cluster.replicas={NUM_REPLICAS}")
    counts = MappingProxyType(
        {"gateway": NUM_GATEWAYS, "engine": NUM_REPLICAS} | dict.fromkeys(_RANKS, NUM_REPLICAS)
    )


class RayActors(Served):
    """In a Ray that the server starts: engine, ranks and controller are actors."""

    name = "Ray"
    patterns = {
        "gateway": "outrider[.]gateway",
        "engine": "^ray::EngineActor",
        "controller": "^ray::Controller",
    }
    roles: Sequence[str] = ("gateway", "engine", "controller", *_RANKS)


class RayWithHead(RayActors):
    """The same with a head in the target's actor."""

    name = "Ray, head"
    roles = ("gateway", "engine", "controller", "target")

    def take_models(self, pair: Any) -> None:
        save_spelling(self.folder)
