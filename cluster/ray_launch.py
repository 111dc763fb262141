"""Replicas kept by a controller in a Ray cluster, as the server sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.cluster.controller import NAME, NAMESPACE, Controller, News
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Bookmark, Say
from outrider.cluster.ray_session import RaySession
from outrider.config import EngineConfig
from outrider.errors import ConfigError, OutriderError
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace
from outrider.workers.weights.environment import model_environment

_NEWS_S = 0.5
_VIEW_S = 2.0
_SHUTDOWN_S = 10.0
_FOR_EVER = -1


class RayLaunch:
    """See `outrider.cluster.launch.Launch`."""

    def __init__(self, config: EngineConfig, session: RaySession, secret: str) -> None:
        self.on_change: list[Callable[[], None]] = []
        self._session = session
        self._config = config  # that a successor of the controller begins with
        self._places: tuple[ReplicaPlace, ...] = ()
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
                # Whatever other node is lost, it is not; and with this one the server is.
                scheduling_strategy=NodeAffinitySchedulingStrategy(session.node_id, soft=True),
            ).remote(
                config,
                secret,
                session.node_id,
                model_environment(),
                can_grow=session.end_own is None,
            )
        except ValueError as error:
            raise ConfigError(
                f"a server already runs in this cluster (actor {NAME} of namespace {NAMESPACE}); "
                "stop it first, or use another cluster."
            ) from error

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        return self._places

    async def view(self) -> ClusterView | None:
        try:
            async with asyncio.timeout(_VIEW_S):
                found: ClusterView = await self._controller.view.remote()
        except (RayError, TimeoutError):  # it is being restarted
            return None
        return found

    async def keep(self, say: Say) -> None:
        """Until `stop`; raises if one never came to run, or all are lost beyond repair."""
        running = asyncio.ensure_future(self._controller.run.remote())
        bookmark = Bookmark()
        try:
            while True:
                is_over = running.done()
                timeout_s = 0.0 if is_over else _NEWS_S
                news: News = await self._controller.news.remote(bookmark, timeout_s)
                await self._take(news, bookmark)
                bookmark = news.pages.bookmark
                for event in news.pages.events:
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

    async def _take(self, news: News, bookmark: Bookmark) -> None:
        if bookmark.journal not in ("", news.pages.bookmark.journal):
            await self._controller.adopt.remote(self._config)  # it is a successor
        else:
            self._config = news.config
        if news.places != self._places:
            self._places = news.places
            for hear in self.on_change:
                hear()

    async def scale(self, num_replicas: int) -> None:
        await self._order(self._controller.scale.remote(num_replicas))

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        await self._order(self._controller.roll_out.remote(config, is_draft_only))

    async def _order(self, order: Any) -> None:
        """A controller that is lost meanwhile begins with it anew, once it is back."""
        try:
            await order
        except RayTaskError as error:
            raise _own_error(error) from None
        except RayError as error:
            raise ClusterError(f"the controller is lost: {error}") from error

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


def _own_error(error: RayTaskError) -> OutriderError:
    cause = error.cause
    return cause if isinstance(cause, OutriderError) else ClusterError(str(error))
