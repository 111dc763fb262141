"""Replicas in a Ray cluster, through their controller."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from outrider.cluster.errors import ClusterError, DetachedError
from outrider.cluster.events import Bookmark, Say
from outrider.cluster.ray.controller import News
from outrider.cluster.ray.lease import DriverIdentity, LeaseLostError
from outrider.cluster.ray.session import RaySession
from outrider.cluster.tasks import in_own_thread
from outrider.config import EngineConfig
from outrider.errors import OutriderError
from outrider.links.cluster_view import ClusterView
from outrider.links.fleet_messages import ReplicaPlace, ReplicaState
from ray.exceptions import ActorDiedError, RayError, RayTaskError

# After it the server reattaches; a restart of the controller by Ray may take longer.
SILENCE_S = 10.0
START_S = 120.0  # for the first answer, while Ray starts the controller

_NEWS_S = 0.5
_ANSWER_S = 5.0  # beyond the timeout of a long poll
_VIEW_S = 2.0
_SHUTDOWN_S = 10.0
_KILL_S = 5.0


class RayLaunch:
    """See `outrider.cluster.launch.Launch`. Lasts as long as its session: `run` raises
    `DetachedError` when Ray or the controller is silent or gone."""

    def __init__(
        self,
        config: EngineConfig,
        session: RaySession,
        driver: DriverIdentity,
        controller: Any,
        bookmark: Bookmark | None = None,
    ) -> None:
        """`bookmark` is the position in the journal of an adopted controller."""
        self.on_change: list[Callable[[], None]] = []
        self.config = config  # for a restarted controller
        self.has_served = False
        self._session = session
        self._driver = driver
        self._controller = controller
        self._bookmark = bookmark or Bookmark()
        self._is_heard = bookmark is not None
        self._is_owner = True
        self._places: tuple[ReplicaPlace, ...] = ()
        self._is_over = asyncio.Event()

    @property
    def places(self) -> tuple[ReplicaPlace, ...]:
        return self._places

    async def view(self) -> ClusterView | None:
        try:
            async with asyncio.timeout(_VIEW_S):
                found: ClusterView = await self._once("view")
        except (RayError, TimeoutError):  # restarting
            return None
        return found

    async def run(self, say: Say) -> None:
        """Run until `stop`. Raises if a first start fails, or on unrecoverable loss."""
        running = asyncio.ensure_future(self._controller.run.remote())
        bookmark, timeout_s = self._bookmark, 0.0
        try:
            while True:
                is_over = running.done()
                news = await self._next_news(bookmark, 0.0 if is_over else timeout_s)
                await self._take(news, bookmark)
                bookmark, timeout_s = news.pages.bookmark, _NEWS_S
                for event in news.pages.events:
                    say(event)
                if is_over:
                    running.result()
                    return
        except RayTaskError as error:
            found = own_error(error)
            self._is_owner = not isinstance(found, LeaseLostError)
            raise found from None
        except RayError as error:
            raise DetachedError(f"the controller is lost: {error}") from error
        finally:
            running.cancel()
            self._is_over.set()

    async def _next_news(self, bookmark: Bookmark, timeout_s: float) -> News:
        """Long-poll the controller. `DetachedError` once it is silent for too long."""
        heard_s = time.monotonic()
        while True:
            if (failure := self._session.failure()) is not None:
                raise DetachedError(failure)
            try:
                async with asyncio.timeout(timeout_s + _ANSWER_S):
                    news: News = await self._once("news", self._driver, bookmark, timeout_s)
                self._is_heard = True
                return news
            except RayTaskError:
                raise
            except ActorDiedError as error:
                raise DetachedError(f"the controller has ended: {error}") from error
            except (RayError, TimeoutError) as error:
                failure = str(error).strip().partition("\n")[0] or "it does not answer"
            silent_s = time.monotonic() - heard_s
            if silent_s >= self._patience_s:
                raise DetachedError(f"the controller is silent for {silent_s:.0f} s: {failure}")
            await asyncio.sleep(_NEWS_S)

    @property
    def _patience_s(self) -> float:
        """Longer for a Ray of our own: detaching would end it, and its failure is noticed
        anyway."""
        is_own = self._session.end_own is not None
        return START_S if is_own or not self._is_heard else SILENCE_S

    def _once(self, method: str, *arguments: object) -> Any:
        return once(self._controller, method, *arguments)

    async def _take(self, news: News, bookmark: Bookmark) -> None:
        if bookmark.journal not in ("", news.pages.bookmark.journal):
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await self._once("adopt", self.config)  # a restarted controller
        else:
            self.config = news.config
        if news.places != self._places:
            self._places = news.places
            self.has_served |= any(each.state is ReplicaState.SERVING for each in self._places)
            for callback in self.on_change:
                callback()

    async def scale(self, num_replicas: int) -> None:
        await self._operate(self._controller.scale.remote(num_replicas))

    async def roll_out(self, config: EngineConfig, *, is_draft_only: bool) -> None:
        await self._operate(self._controller.roll_out.remote(config, is_draft_only))

    async def leave(self, hosts: Collection[str], limit_s: float) -> None:
        await self._operate(self._controller.leave.remote(tuple(hosts), limit_s))

    async def _operate(self, call: Any) -> None:
        """Wait for an operation. Ray repeats it on a restarted controller."""
        operation = asyncio.ensure_future(call)
        over = asyncio.create_task(self._is_over.wait())
        try:
            await asyncio.wait({operation, over}, return_when=asyncio.FIRST_COMPLETED)
            if not operation.done():
                raise ClusterError("Ray was lost meanwhile; try again once the server serves.")
            operation.result()
        except RayTaskError as error:
            raise own_error(error) from None
        except RayError as error:
            raise ClusterError(f"the controller is lost: {error}") from error
        finally:
            operation.cancel()
            over.cancel()

    async def stop(self) -> None:
        """Shut the controller down, unless another driver has taken its lease."""
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._once("shutdown", self._driver)
                await self._is_over.wait()
        except RayTaskError as error:
            self._is_owner &= not isinstance(own_error(error), LeaseLostError)
        except (RayError, TimeoutError):
            pass  # it is killed
        if self._is_owner:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_S):
                    await in_own_thread(lambda: ray.kill(self._controller), "outrider-ray-kill")

    def abort(self) -> None:
        if self._session.end_own is not None:
            self._session.end_own()
        elif self._is_owner:
            ray.kill(self._controller)


def once(actor: Any, method: str, *arguments: object) -> Any:
    """A call without Ray's retries."""
    return getattr(actor, method).options(max_task_retries=0).remote(*arguments)


def own_error(error: RayTaskError) -> OutriderError:
    cause = error.cause
    return cause if isinstance(cause, OutriderError) else ClusterError(str(error))
