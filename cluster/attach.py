"""The controller in a Ray cluster: made, or adopted with all that it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.cluster.controller import NAME, NAMESPACE, Claim, Controller
from outrider.cluster.errors import DetachedError
from outrider.cluster.events import Event, Kind, Say
from outrider.cluster.lease import LEASE_S, Driver
from outrider.cluster.ray_launch import START_S, RayLaunch, once
from outrider.cluster.ray_session import RaySession
from outrider.cluster.tasks import in_own_thread
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.workers.weights.environment import model_environment

T = TypeVar("T")

_RAY_S = 20.0  # for one call to Ray's head
_CLAIM_S = 5.0
_POLL_S = 0.25
_TAKE_OVER_S = LEASE_S + 2.0  # a driver that was killed just now held its lease until then
_SHUTDOWN_S = 10.0
_GONE_S = 30.0  # for the name of an actor that ends to be free
_FOR_EVER = -1


class Attaching:
    """One attempt, for as long as a session lasts. `DetachedError` if Ray does not answer."""

    def __init__(
        self, config: EngineConfig, session: RaySession, secret: str, driver: Driver, say: Say
    ) -> None:
        self._config = config
        self._session = session
        self._secret = secret
        self._driver = driver
        self._say = say

    async def attach(self, *, is_first: bool) -> RayLaunch:
        """Unless it `is_first`, replicas like these have served before, and are tried for ever."""
        actor = await _in_time(find_controller)
        if actor is not None:
            claim = await self._claimed(actor)
            refusal = self._refusal(claim)
            if claim is not None and not refusal:
                self._tell_adoption(claim)
                return RayLaunch(self._config, self._session, self._driver, actor, claim.bookmark)
            self._say(Event(Kind.TROUBLE, f"replicas run already and are started anew: {refusal}"))
            await self._end(actor, is_silent=claim is None)
        made = await self._made(is_first=is_first)
        return RayLaunch(self._config, self._session, self._driver, made)

    async def _made(self, *, is_first: bool) -> Any:
        """One that nobody waits for any more is ended: no server would direct it."""
        making = in_own_thread(lambda: self._make(is_first=is_first), "outrider-ray-make")
        try:
            return await _bounded(asyncio.shield(making))
        except asyncio.CancelledError:
            await asyncio.wait({making}, timeout=_RAY_S)
            if making.done() and making.exception() is None:
                ray.kill(making.result())
            raise

    def _make(self, *, is_first: bool) -> Any:
        actor: Any = ray.remote(Controller)
        try:
            return actor.options(
                name=NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=_FOR_EVER,
                max_task_retries=_FOR_EVER,
                # Whatever other node is lost, it is not; and with this one the server is.
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    self._session.node_id, soft=True
                ),
            ).remote(
                self._config,
                self._secret,
                self._session.node_id,
                model_environment(),
                can_grow=self._session.end_own is None,
                is_first=is_first,
            )
        except ValueError as error:  # another server was quicker
            raise _already_runs("another server") from error

    # -- one that runs already ----------------------------------------------------------------

    async def _claimed(self, actor: Any) -> Claim | None:
        """None if it does not answer, or is of another version; `ConfigError` if another driver
        goes on directing it."""
        began_s = time.monotonic()
        terms = self._driver, self._session.node_id, self._config
        while True:
            waited_s = time.monotonic() - began_s
            try:
                async with asyncio.timeout(_CLAIM_S):
                    claim: Claim = await once(actor, "claim", *terms)
            except (ActorDiedError, RayTaskError, AttributeError):
                return None
            except (RayError, TimeoutError):
                if waited_s >= START_S:  # Ray may be restarting it
                    return None
            else:
                if claim.is_granted:
                    return claim
                if waited_s >= _TAKE_OVER_S:
                    raise _already_runs(claim.before)
            await asyncio.sleep(_POLL_S)

    def _refusal(self, claim: Claim | None) -> str:
        """Why it cannot be adopted; empty if it can."""
        if claim is None:
            return "their controller does not answer"
        if claim.refusal:
            return claim.refusal
        return "" if claim.secret == self._secret else "they have another OUTRIDER_SECRET"

    def _tell_adoption(self, claim: Claim) -> None:
        whose = f" of {claim.before}" if claim.before else ""
        self._say(Event(Kind.STAGE, f"adopted the running replicas{whose}"))
        if claim.change:
            self._say(Event(Kind.STAGE, f"their settings differ: {claim.change}"))

    async def _end(self, actor: Any, *, is_silent: bool) -> None:
        if not is_silent:
            with contextlib.suppress(RayError, TimeoutError):  # it is killed in any case
                async with asyncio.timeout(_SHUTDOWN_S):
                    await once(actor, "shutdown", self._driver)
        await _in_time(lambda: ray.kill(actor))
        deadline_s = time.monotonic() + _GONE_S
        while await _in_time(find_controller) is not None:
            if time.monotonic() > deadline_s:
                raise DetachedError(f"the actor {NAME} does not end.")
            await asyncio.sleep(_POLL_S)


def find_controller() -> Any:
    """None if there is none."""
    try:
        return ray.get_actor(NAME, NAMESPACE)
    except ValueError:
        return None


def running_secret() -> str | None:
    """That of the replicas that run already in the cluster, if any do. Blocks."""
    actor = find_controller()
    if actor is None:
        return None
    try:
        return str(ray.get(once(actor, "secret"), timeout=_CLAIM_S))
    except (RayError, AttributeError, TimeoutError):
        return None


def _already_runs(whose: str) -> ConfigError:
    return ConfigError(
        f"a server already runs in this cluster (actor {NAME} of namespace {NAMESPACE}, directed "
        f"by {whose}); stop it first, or use another cluster."
    )


async def _in_time(work: Callable[[], T]) -> T:
    """A call to Ray's head, which blocks, and for ever if that is gone."""
    return await _bounded(in_own_thread(work, "outrider-ray-call"))


async def _bounded(work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_RAY_S):
            return await work
    except TimeoutError:
        raise DetachedError(f"Ray has not answered for {_RAY_S:g} s") from None
    except RayError as error:
        raise DetachedError(f"Ray does not answer: {error}") from error
