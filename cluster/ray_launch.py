"""An engine kept by a controller in a Ray cluster, as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from outrider.cluster.controller import NAME, NAMESPACE, ClusterStatus, Controller
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Bookmark, Pages, Say
from outrider.cluster.ray_session import RaySession
from outrider.cluster.replica import ProcessStatus
from outrider.config import EngineConfig
from outrider.errors import ConfigError, OutriderError
from outrider.gateway.engine_link import EngineAddress
from outrider.links.cluster_view import ClusterView, ProcessView

_NEWS_S = 0.5
_VIEW_S = 2.0
_SHUTDOWN_S = 10.0
_FOR_EVER = -1


class RayLaunch:
    """See `outrider.cluster.serving.Launch`."""

    def __init__(self, config: EngineConfig, session: RaySession) -> None:
        self._session = session
        self._is_over = asyncio.Event()
        actor: Any = ray.remote(Controller)
        try:
            self._controller = actor.options(
                name=NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=_FOR_EVER,
                max_task_retries=_FOR_EVER,
            ).remote(config, can_grow=session.end_own is None)
        except ValueError as error:
            raise ConfigError(
                f"a server already runs in this cluster (actor {NAME} of namespace {NAMESPACE}); "
                "stop it first, or use another cluster."
            ) from error

    async def locate(self) -> EngineAddress:
        endpoint = await self._controller.endpoint.remote()
        return EngineAddress(endpoint.address_from({self._session.node_id}), endpoint.secret)

    async def view(self) -> ClusterView | None:
        try:
            async with asyncio.timeout(_VIEW_S):
                found: ClusterStatus = await self._controller.status.remote()
        except (RayError, TimeoutError):  # it is being restarted
            return None
        return ClusterView(
            f"Ray actor {NAME}",
            found.state,
            found.restarts,
            found.draft_restarts,
            tuple(_process(each) for each in found.processes),
        )

    async def keep(self, say: Say) -> None:
        """Until `stop`; raises if it never came to run, or is lost beyond repair."""
        running = asyncio.ensure_future(self._controller.run.remote())
        bookmark = Bookmark()
        try:
            while True:
                is_over = running.done()
                timeout_s = 0.0 if is_over else _NEWS_S
                pages: Pages = await self._controller.news.remote(bookmark, timeout_s)
                bookmark = pages.bookmark
                for event in pages.events:
                    say(event)
                if is_over:
                    running.result()
                    return
        except RayTaskError as error:
            raise _own_error(error) from None
        except RayActorError as error:
            raise ClusterError(f"the controller is lost: {error}") from error
        finally:
            self._is_over.set()

    async def stop(self) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._controller.shutdown.remote()
                await self._is_over.wait()
        ray.kill(self._controller)

    def abort(self) -> None:
        if self._session.end_own is not None:
            self._session.end_own()
        else:
            ray.kill(self._controller)


def _process(status: ProcessStatus) -> ProcessView:
    place = status.place
    return ProcessView(
        status.role,
        status.rank,
        place.pid,
        place.node_ip,
        place.gpu_ids,
        status.restarts,
        status.state,
    )


def _own_error(error: RayTaskError) -> OutriderError:
    cause = error.cause
    return cause if isinstance(cause, OutriderError) else ClusterError(str(error))
