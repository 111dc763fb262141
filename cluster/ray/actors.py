"""Engine and ranks as Ray actors: each is the process it stands for.

Ray starts, finds and ends them. Their traffic goes over their own links, not through Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Bookmark, Event, EventKind, Journal, Pages
from outrider.cluster.ray.engine_folder import make_engine_folder
from outrider.cluster.ray.facts import (
    logs_folder,
    num_nodes,
    own_gpu_ids,
    own_node_id,
    own_node_ip,
)
from outrider.cluster.ray.gpu_handover import await_gone
from outrider.cluster.ray.postmortem import OwnLog, redirect_output
from outrider.config import EngineConfig
from outrider.engine.hosting import EngineHost
from outrider.engine.rank_group import Report
from outrider.errors import ModelError, OutriderError
from outrider.links.gateway_messages import EngineStatus
from outrider.links.rank_messages import Role
from outrider.logs import setup_logging

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where an actor's process runs."""

    pid: int
    node_id: str
    node_ip: str
    gpu_ids: tuple[str, ...]
    log: OwnLog


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens: a Unix socket, and TCP if the cluster has or may get other nodes."""

    unix: str
    tcp: str | None
    node_id: str
    secret: str = field(repr=False)

    def address_from(self, node_ids: Set[str]) -> str:
        """One address that processes on all of these nodes can reach."""
        if node_ids <= {self.node_id}:
            return self.unix
        if self.tcp is None:
            raise ClusterError(
                "the engine was started when its node was the only one and listens on a Unix "
                "socket only; restart the server to use the nodes that were added."
            )
        return self.tcp


@dataclass(frozen=True, slots=True)
class EngineNews:
    """An engine's new events and its status. The status is None until the engine is ready."""

    pages: Pages
    status: EngineStatus | None


def own_place(log: OwnLog, before: ProcessPlace | None) -> ProcessPlace:
    """The place of this process. Waits until the process `before`, whose GPUs it takes, is gone."""
    if before is not None and before.gpu_ids and before.node_id == own_node_id():
        await_gone(before.pid)
    return ProcessPlace(os.getpid(), own_node_id(), own_node_ip(), own_gpu_ids(), log)


class RankActor:
    """One rank of a target or draft group. Never restarted alone: a group restarts as a whole."""

    def __init__(self, role: str, rank: int, size: int, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # before anything that reads it is imported
        self._role = role
        self._rank = rank
        self._size = size
        self._log = redirect_output(f"{role}-{rank}")
        setup_logging(role=role, rank=rank)

    def describe(self, before: ProcessPlace | None = None) -> ProcessPlace:
        return own_place(self._log, before)

    def run(self, endpoint: Endpoint) -> None:
        """Serve until the engine closes the link. Raises the cause of a failure."""
        from outrider.workers.ranks.start import RankPlace, run_rank  # torch, which only ranks need

        # Ranks on other nodes must be able to reach this one, even if the engine is local.
        own_host = None if endpoint.tcp is None else own_node_ip()
        address = endpoint.address_from({own_node_id()})
        place = RankPlace(address, Role(self._role), self._rank, self._size, own_host)
        try:
            run_rank(place, endpoint.secret)
        except ModelError as error:
            logger.error("%s", error)
            raise ModelError(f"on node {own_node_ip()}: {error}") from error
        except OutriderError as error:
            logger.error("%s", error)
            raise
        except Exception:
            logger.exception("this rank failed")
            raise


class EngineActor:
    """The scheduler and its step loop. Listens from the start; steps once the models are loaded, on
    ranks or in this process."""

    def __init__(self, config: EngineConfig, secret: str, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # before anything that reads it is imported
        self._secret = secret
        self._log = redirect_output("engine-0")
        setup_logging(config.log_level, role="engine", json_lines=config.log_format == "json")
        self._folder = make_engine_folder(logs_folder().parent)
        addresses = [f"unix:{self._folder}/e.sock"]
        # An existing cluster may get more nodes; gateways of other hosts always need TCP.
        cluster = config.cluster
        if cluster.address is not None or cluster.listen is not None or num_nodes() > 1:
            addresses.append(f"tcp:{own_node_ip()}:0")
        self._host = EngineHost(config, addresses, secret, is_checked=True)
        self._journal = Journal()

    async def describe(self, before: ProcessPlace | None = None) -> ProcessPlace:
        return await asyncio.to_thread(own_place, self._log, before)

    async def endpoint(self) -> Endpoint:
        unix, *tcp = self._host.addresses
        return Endpoint(unix, tcp[0] if tcp else None, own_node_id(), self._secret)

    async def run(self) -> None:
        """Load the models, here or on the ranks that connect, and serve until `stop`. Raises what
        ended it."""
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:
            logger.info("%s", line)
            self._journal.say_from_thread(Event(EventKind.STAGE, line), loop)

        def notify_ready() -> None:
            loop.call_soon_threadsafe(self._journal.wake)

        try:
            await asyncio.to_thread(self._serve, report, notify_ready)
        except OutriderError as error:
            logger.error("%s", error)
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self, report: Report, notify_ready: Callable[[], None]) -> None:
        try:
            self._host.start(report)
            notify_ready()
            self._host.run()
        finally:
            self._host.close()

    async def news(self, bookmark: Bookmark, timeout_s: float) -> EngineNews:
        """Long-polls for events after the bookmark; returns them with the status."""
        pages = await self._journal.read(bookmark, timeout_s)
        return EngineNews(pages, self._host.status())

    async def change_draft(self, config: EngineConfig) -> None:
        """Expect the draft of `config` to connect next."""
        self._host.change_draft(config)

    async def draft_error(self) -> str:
        """Why the last draft that connected was refused; empty if it was accepted."""
        return self._host.draft_error

    async def stop(self) -> None:
        """End `run` and the ranks after the current step."""
        self._host.stop()
