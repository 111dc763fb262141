"""Engine and ranks as Ray actors: each is the process it stands for.

Ray starts, finds and ends them. What they say to each other goes over their own links.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from outrider.cluster.engine_folder import make_engine_folder
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Bookmark, Event, Journal, Kind, Pages
from outrider.cluster.gpu_turn import await_gone
from outrider.cluster.postmortem import OwnLog, redirect_output
from outrider.cluster.ray_facts import (
    logs_folder,
    num_nodes,
    own_gpu_ids,
    own_node_id,
    own_node_ip,
)
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
    """Where an engine listens: on its node, and for other nodes if there are or may be any."""

    unix: str
    tcp: str | None
    node_id: str
    secret: str = field(repr=False)

    def address_from(self, node_ids: Set[str]) -> str:
        """For processes that are on these nodes, and are to use the same one."""
        if node_ids <= {self.node_id}:
            return self.unix
        if self.tcp is None:
            raise ClusterError(
                "the engine was started when its node was the only one, and listens there only; "
                "start the server anew to use the nodes that were added."
            )
        return self.tcp


@dataclass(frozen=True, slots=True)
class EngineNews:
    """What an engine has said, and how it is; no status before it is ready."""

    pages: Pages
    status: EngineStatus | None


def own_place(log: OwnLog, before: ProcessPlace | None) -> ProcessPlace:
    """Of this process; known once one `before` it, whose GPUs it has now, is gone."""
    if before is not None and before.gpu_ids and before.node_id == own_node_id():
        await_gone(before.pid)
    return ProcessPlace(os.getpid(), own_node_id(), own_node_ip(), own_gpu_ids(), log)


class RankActor:
    """One rank of a target or draft group. It is not restarted: a group restarts whole."""

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
        """Serve until the engine ends the link; raises what went wrong."""
        from outrider.workers.ranks.start import RankPlace, run_rank  # torch, which only ranks need

        # Whatever way it reaches the engine, ranks of other nodes must reach it, now or later.
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
            logger.exception("this rank has failed")
            raise


class EngineActor:
    """The scheduler and its step loop. Listens from the start; steps once the models are there, on
    ranks or in this process."""

    def __init__(self, config: EngineConfig, secret: str, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)  # before anything that reads it is imported
        self._secret = secret
        self._log = redirect_output("engine-0")
        setup_logging(config.log_level, role="engine", json_lines=config.log_format == "json")
        self._folder = make_engine_folder(logs_folder().parent)
        addresses = [f"unix:{self._folder}/e.sock"]
        # A cluster that was there before may get more nodes; guests are elsewhere in any case.
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
        """Start the models, here or on the ranks that dial in, and serve until `stop`; raises what
        ended it."""
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:
            logger.info("%s", line)
            self._journal.say_from_thread(Event(Kind.STAGE, line), loop)

        def tell_ready() -> None:
            loop.call_soon_threadsafe(self._journal.wake)

        try:
            await asyncio.to_thread(self._serve, report, tell_ready)
        except OutriderError as error:
            logger.error("%s", error)
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self, report: Report, tell_ready: Callable[[], None]) -> None:
        try:
            self._host.start(report)
            tell_ready()
            self._host.run()
        finally:
            self._host.close()

    async def news(self, bookmark: Bookmark, timeout_s: float) -> EngineNews:
        """Lines after the bookmark, waited for, and the status."""
        pages = await self._journal.read(bookmark, timeout_s)
        return EngineNews(pages, self._host.status())

    async def change_draft(self, config: EngineConfig) -> None:
        """The draft that dials in next is the one of `config`."""
        self._host.change_draft(config)

    async def draft_error(self) -> str:
        """Why the last draft that dialled in was not taken in; empty if it was."""
        return self._host.draft_error

    async def stop(self) -> None:
        """End `run`, ranks included, after the step under way."""
        self._host.stop()
