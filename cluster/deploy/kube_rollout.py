"""Replaces the RayClusters of a release one at a time, before Helm applies the release.

The chart runs this as a hook before an upgrade or a rollback. A RayCluster's name ends with a hash
of its spec, so the successor of `llm-0-aaaaaaaa` is `llm-0-bbbbbbbb`. A predecessor is suspended,
not deleted, until every successor serves: a rollback is one patch. All state is in the cluster: the
next run resumes an interrupted one.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from outrider.cluster.deploy.kube import CONFIG_MAPS, PODS, RAY_CLUSTERS, Kube, KubeError
from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event, EventKind, Say
from outrider.cluster.rolling import roll
from outrider.errors import ConfigError

POLL_S = 2.0
STUCK_S = 60.0  # tolerates a short outage of the image registry
RETRY_S = 60.0  # tolerates a short outage of the API server
END_S = 60.0  # beyond a replica's own shutdown timeout
_CLUSTER = "ray.io/cluster"
_NODE_TYPE = "ray.io/node-type"
# Container states that waiting does not fix, if they last longer than `STUCK_S`.
_STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
    }
)

T = TypeVar("T")


# -- desired state ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DesiredReplica:
    """The desired objects of one replica."""

    index: int
    cluster: dict[str, Any]
    config_map: dict[str, Any]

    @property
    def name(self) -> str:
        found: str = self.cluster["metadata"]["name"]
        return found


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The plan that the chart renders for the Job."""

    release: str
    namespace: str
    base: str  # prefix of all names
    labels: dict[str, str]  # of all RayClusters and pods of the release
    max_surge: int
    settle_s: float  # a successor serves this long before its predecessor drains
    start_s: float  # timeout of a start
    stop_s: float  # timeout of an end
    replicas: tuple[DesiredReplica, ...]

    @classmethod
    def of(cls, text: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> RolloutPlan:
        """From the settings and the objects of all replicas."""
        try:
            base = str(text["base"])
            maps = {each["metadata"]["name"]: each for each in items if each["kind"] == "ConfigMap"}
            desired = tuple(
                DesiredReplica(index_of(base, name), dict(each), dict(maps[name]))
                for each in items
                if each["kind"] == "RayCluster"
                for name in (each["metadata"]["name"],)
            )
            return cls(
                str(text["release"]),
                str(text["namespace"]),
                base,
                {str(key): str(value) for key, value in text["labels"].items()},
                int(text["maxSurge"]),
                float(text["settleSeconds"]),
                float(text["startSeconds"]),
                float(text["stopSeconds"]),
                desired,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the rollout's file cannot be read: {error!r}.") from error


def read_plan(path: Path) -> RolloutPlan:
    """Read YAML documents: the settings, then the objects of all replicas."""
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    found = [each for each in documents if each is not None]
    if not found:
        raise ConfigError(f"{path} is empty; it must hold the plan that the chart renders.")
    return RolloutPlan.of(found[0], found[1:])


def index_of(base: str, name: str) -> int:
    """The replica's index in a RayCluster's name."""
    found = re.fullmatch(rf"{re.escape(base)}-(\d+)-[0-9a-f]{{8}}", name)
    if found is None:
        raise ValueError(f"{name} is not a replica of {base}")
    return int(found[1])


# -- observed state -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObservedCluster:
    """One RayCluster and its pods."""

    name: str
    index: int
    is_suspended: bool
    is_deleted: bool  # gone or terminating
    serves: bool  # its head pod is ready
    num_pods: int
    stuck: str = ""  # why a pod cannot start
    pending: str = ""  # why a pod has no node


def observe(
    base: str, clusters: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]
) -> dict[str, ObservedCluster]:
    """All RayClusters of the release by name, including deleted ones that still have pods."""
    owners: dict[str, Mapping[str, Any]] = {each["metadata"]["name"]: each for each in clusters}
    by_owner: dict[str, list[Mapping[str, Any]]] = {name: [] for name in owners}
    for pod in pods:
        owner = pod["metadata"].get("labels", {}).get(_CLUSTER)
        if owner is not None:
            by_owner.setdefault(owner, []).append(pod)
    found = {}
    for name, own in by_owner.items():
        try:
            index = index_of(base, name)
        except ValueError:
            continue
        cluster = owners.get(name, {})
        live = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]
        heads = [pod for pod in live if pod["metadata"]["labels"].get(_NODE_TYPE) == "head"]
        found[name] = ObservedCluster(
            name,
            index,
            bool(cluster.get("spec", {}).get("suspend")),
            not cluster or "deletionTimestamp" in cluster["metadata"],
            any(_is_ready(pod) for pod in heads),
            len(own),
            next((reason for pod in live if (reason := _stuck(pod))), ""),
            next((reason for pod in live if (reason := _pending(pod))), ""),
        )
    return found


def _conditions(pod: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {each["type"]: each for each in pod.get("status", {}).get("conditions") or ()}


def _is_ready(pod: Mapping[str, Any]) -> bool:
    return _conditions(pod).get("Ready", {}).get("status") == "True"


def _stuck(pod: Mapping[str, Any]) -> str:
    status = pod.get("status", {})
    for key in ("initContainerStatuses", "containerStatuses"):
        for each in status.get(key) or ():
            waiting = each.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in _STUCK:
                words = waiting.get("message") or each.get("image", "")
                return f"pod {pod['metadata']['name']}: {waiting['reason']}: {words}".rstrip(": .")
    return ""


def _pending(pod: Mapping[str, Any]) -> str:
    placed = _conditions(pod).get("PodScheduled", {})
    if placed.get("status") != "False":
        return ""
    return f"pod {pod['metadata']['name']} is pending: {placed.get('message', '')}".rstrip(": .")


# -- reconciling --------------------------------------------------------------------------------


class Release:
    """The RayClusters of a release, through the API."""

    def __init__(self, kube: Kube, plan: RolloutPlan, say: Say) -> None:
        self.plan = plan
        self._kube = kube
        self._say = say

    async def observe(self) -> dict[str, ObservedCluster]:
        labels = self.plan.labels
        clusters = await self._call(partial(self._kube.find, RAY_CLUSTERS, labels))
        pods = await self._call(partial(self._kube.find, PODS, labels))
        return observe(self.plan.base, clusters, pods)

    async def create(self, desired: DesiredReplica) -> None:
        """Create the objects with Helm's ownership metadata, so that Helm adopts them."""
        for resource, item in ((CONFIG_MAPS, desired.config_map), (RAY_CLUSTERS, desired.cluster)):
            await self._call(partial(self._kube.create, resource, self._owned(item)))

    async def suspend(self, name: str, *, is_suspended: bool) -> None:
        change = {"spec": {"suspend": is_suspended}}
        await self._call(partial(self._kube.patch, RAY_CLUSTERS, name, change))

    async def delete(self, name: str) -> None:
        for resource in (RAY_CLUSTERS, CONFIG_MAPS):
            await self._call(partial(self._kube.delete, resource, name))

    def say(self, text: str, kind: EventKind = EventKind.STAGE) -> None:
        self._say(Event(kind, text))

    def _owned(self, item: Mapping[str, Any]) -> dict[str, Any]:
        metadata = dict(item["metadata"])
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            "meta.helm.sh/release-name": self.plan.release,
            "meta.helm.sh/release-namespace": self.plan.namespace,
        }
        return {**item, "metadata": metadata}

    async def _call(self, work: Callable[[], T]) -> T:
        """Retry for `RETRY_S` while the API server is away."""
        deadline_s, pause_s = time.monotonic() + RETRY_S, 0.5
        while True:
            try:
                return await asyncio.to_thread(work)
            except KubeError as error:
                if not error.is_transient or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 8.0)

    # -- waits ----------------------------------------------------------------------------------

    async def wait_serving(self, name: str, settle_s: float) -> None:
        """Wait until it has served for `settle_s` without a break. Raises the cause of a
        failure."""
        began_s = time.monotonic()
        serving_s: float | None = None
        stuck_s: float | None = None
        while True:
            now_s, found = time.monotonic(), (await self.observe()).get(name)
            if found is None or found.is_deleted:
                raise ClusterError(f"RayCluster {name} is gone.")
            serving_s = (serving_s or now_s) if found.serves else None
            if serving_s is not None and now_s - serving_s >= settle_s:
                return
            stuck_s = (stuck_s or now_s) if found.stuck and not found.serves else None
            if stuck_s is not None and now_s - stuck_s >= STUCK_S:
                raise ClusterError(f"RayCluster {name} cannot start: {found.stuck}.")
            if serving_s is None and now_s - began_s > self.plan.start_s:
                why = found.stuck or found.pending or "see the logs of its pods"
                raise ClusterError(
                    f"RayCluster {name} does not serve after {self.plan.start_s:g} s: {why}."
                )
            await asyncio.sleep(POLL_S)

    async def wait_ended(self, name: str) -> None:
        """Wait until it has no pods."""
        limit_s = self.plan.stop_s + END_S
        deadline_s = time.monotonic() + limit_s
        while (found := (await self.observe()).get(name)) is not None and found.num_pods:
            if time.monotonic() > deadline_s:
                raise ClusterError(f"RayCluster {name} still has pods after {limit_s:g} s.")
            await asyncio.sleep(POLL_S)

    async def wait_others(self, index: int) -> None:
        """Wait until every other replica serves, since this one is about to end."""
        others = {each.index for each in self.plan.replicas if each.index != index}
        deadline_s = time.monotonic() + self.plan.start_s
        while True:
            found = (await self.observe()).values()
            # A new replica does not count: it has never served.
            known = {each.index for each in found} & others
            away = known - {each.index for each in found if each.serves}
            if not away:
                return
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"replica {min(away)} does not serve, and with upgrade.maxSurge 0 no other may "
                    "end meanwhile; repair it first, or set upgrade.maxSurge to 1."
                )
            await asyncio.sleep(POLL_S)


class ClusterSwap:
    """See `outrider.cluster.rolling.Swap`. Each step is idempotent."""

    def __init__(self, release: Release, desired: DesiredReplica) -> None:
        self.name = str(desired.index)
        self._release = release
        self._desired = desired

    async def can_surge(self) -> bool:
        return self._release.plan.max_surge > 0

    async def start(self) -> None:
        release, name = self._release, self._desired.name
        found = (await release.observe()).get(name)
        if found is not None and found.is_deleted:
            await release.wait_ended(name)
            found = None
        if found is None:
            release.say(f"replica {self.name}: starting RayCluster {name}")
            await release.create(self._desired)
        elif found.is_suspended:
            release.say(f"replica {self.name}: resuming RayCluster {name}")
            await release.suspend(name, is_suspended=False)
        await release.wait_serving(name, release.plan.settle_s)
        release.say(f"replica {self.name}: RayCluster {name} serves", EventKind.REPAIR)

    async def retire(self) -> None:
        release = self._release
        olds = [each for each in await self._others() if not each.is_suspended or each.num_pods]
        if olds and not await self.can_surge():
            await release.wait_others(self._desired.index)
        for old in olds:
            release.say(f"replica {self.name}: suspending RayCluster {old.name}")
            await release.suspend(old.name, is_suspended=True)
            await release.wait_ended(old.name)

    async def undo(self) -> None:
        release, new = self._release, self._desired.name
        olds = await self._others()
        if not olds:
            return
        old = next((each for each in olds if each.serves), olds[0])
        found = (await release.observe()).get(new)
        has_new = found is not None and not found.is_deleted
        if has_new and not (found is not None and found.serves and await self.can_surge()):
            await release.delete(new)
            await release.wait_ended(new)
            has_new = False
        if old.is_suspended:
            release.say(f"replica {self.name}: resuming RayCluster {old.name}")
            await release.suspend(old.name, is_suspended=False)
            await release.wait_serving(old.name, release.plan.settle_s)
        if has_new:
            await release.delete(new)
            await release.wait_ended(new)

    async def finish(self) -> None:
        """Delete the predecessors, once every successor serves."""
        for old in await self._others():
            await self._release.delete(old.name)

    async def _others(self) -> list[ObservedCluster]:
        """RayClusters of the same replica with another spec, the running ones first."""
        found = (await self._release.observe()).values()
        index, name = self._desired.index, self._desired.name
        others = [e for e in found if e.index == index and e.name != name and not e.is_deleted]
        return sorted(others, key=lambda each: (each.is_suspended, not each.serves, each.name))


async def roll_out(kube: Kube, plan: RolloutPlan, say: Say) -> None:
    """Replace every replica that has a predecessor; Helm creates new ones. If a successor does not
    serve, roll all back and raise `OutriderError`."""
    release = Release(kube, plan, say)
    found = (await release.observe()).values()
    serving = {each.index for each in found if each.serves}
    desired = {each.name for each in plan.replicas}
    old = {each.index for each in found if each.name not in desired and not each.is_deleted}
    # Replicas that do not serve come first: nothing is lost, and the upgrade may repair them.
    swaps = [
        ClusterSwap(release, each)
        for each in sorted(plan.replicas, key=lambda each: (each.index in serving, each.index))
        if each.index in old
    ]
    await roll(swaps, say)
    for swap in swaps:
        await swap.finish()
    count = "no replica has" if not swaps else f"replicas replaced: {len(swaps)}; none has"
    release.say(f"{count} a predecessor", EventKind.REPAIR)
