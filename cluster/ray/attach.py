"""Create the controller in a Ray cluster, or adopt a running one with its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from outrider.checkpoints.environment import model_environment
from outrider.cluster.errors import DetachedError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.ray.controller import NAME, NAMESPACE, Claim, Controller
from outrider.cluster.ray.launch import START_S, RayLaunch, once
from outrider.cluster.ray.lease import LEASE_S, DriverIdentity
from outrider.cluster.ray.session import RaySession
from outrider.cluster.tasks import in_own_thread
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")

_RAY_S = 20.0  # for one call to Ray's head
_CLAIM_S = 5.0
_POLL_S = 0.25
_TAKE_OVER_S = LEASE_S + 2.0  # a killed driver holds its lease until it expires
_SHUTDOWN_S = 10.0
_GONE_S = 30.0  # for Ray to free the name of an ended actor
_FOR_EVER = -1


class ControllerAttachment:
    """One attempt to attach within one Ray session. `DetachedError` if Ray does not answer."""

    def __init__(
        self,
        config: EngineConfig,
        session: RaySession,
        secret: str,
        driver: DriverIdentity,
        say: Say,
    ) -> None:
        self._config = config
        self._session = session
        self._secret = secret
        self._driver = driver
        self._say = say

    async def attach(self, *, is_first: bool) -> RayLaunch:
        """Unless it `is_first`, such replicas have served before, and failed starts are retried."""
        actor = await _in_time(find_controller)
        if actor is not None:
            claim = await self._claimed(actor)
            refusal = self._refusal(claim)
            if claim is not None and not refusal:
                self._report_adoption(claim)
                return RayLaunch(self._config, self._session, self._driver, actor, claim.bookmark)
            self._say(
                Event(EventKind.TROUBLE, f"replicas already run and are restarted: {refusal}")
            )
            await self._end(actor, is_silent=claim is None)
        made = await self._made(is_first=is_first)
        return RayLaunch(self._config, self._session, self._driver, made)

    async def _made(self, *, is_first: bool) -> Any:
        """Kill the new controller if this task is cancelled: no server would direct it."""
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
                # On the server's own node, so that the loss of another does not end it.
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
        except ValueError as error:  # another server created it first
            raise _already_runs("another server") from error

    # -- adopting a running controller --------------------------------------------------------

    async def _claimed(self, actor: Any) -> Claim | None:
        """None if it does not answer or runs another version. `ConfigError` if another driver
        keeps its lease."""
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
        """Why the controller cannot be adopted; empty if it can."""
        if claim is None:
            return "their controller does not answer"
        if claim.refusal:
            return claim.refusal
        return "" if claim.secret == self._secret else "they have another OUTRIDER_SECRET"

    def _report_adoption(self, claim: Claim) -> None:
        whose = f" of {claim.before}" if claim.before else ""
        self._say(Event(EventKind.STAGE, f"adopted the running replicas{whose}"))
        if claim.change:
            self._say(Event(EventKind.STAGE, f"their settings differ: {claim.change}"))

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
    """The controller's actor handle; None if there is none."""
    try:
        return ray.get_actor(NAME, NAMESPACE)
    except ValueError:
        return None


def running_secret() -> str | None:
    """The secret of replicas that already run in the cluster, if any. Blocks."""
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
    """A blocking call to Ray's head, with a timeout: it hangs if the head is gone."""
    return await _bounded(in_own_thread(work, "outrider-ray-call"))


async def _bounded(work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_RAY_S):
            return await work
    except TimeoutError:
        raise DetachedError(f"Ray has not answered for {_RAY_S:g} s") from None
    except RayError as error:
        raise DetachedError(f"Ray does not answer: {error}") from error
