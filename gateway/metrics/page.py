"""The page that Prometheus scrapes: metrics of the gateways and their engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from outrider.api_types.cluster_view import AskCluster
from outrider.gateway.metrics.engines import (
    ReplicaCounts,
    ReplicaNumbers,
    engine_families,
    number_families,
    numbers_of,
    replica_counts,
)
from outrider.gateway.metrics.files import counts_in_memory
from outrider.gateway.metrics.names import METRICS
from outrider.links.cluster_view import ClusterView
from outrider.links.gateway_messages import EngineStatus

if TYPE_CHECKING:
    from outrider.gateway.gateway import Gateway

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
KEEP_S = 0.5  # engines' answers are cached, for any number of scrapers

_Relabel: TypeAlias = Callable[[Mapping[str, str]], dict[str, str]]

_BY_FULL_NAME = {each.full_name: each for each in METRICS}


class MetricsPage:
    """The page of a gateway: of its own process, or of all processes that share its folder."""

    def __init__(self, gateway: Gateway, ask_cluster: AskCluster) -> None:
        self._gateway = gateway
        self._ask_cluster = ask_cluster
        self._asking = asyncio.Lock()
        self._known: list[ReplicaCounts] = []
        self._numbers = ReplicaNumbers(0, 0)
        self._known_until_s = 0.0

    async def render(self) -> bytes:
        gateway = self._gateway
        replicas = await self._ask()
        gateway.metrics.flush()
        engine = (*number_families(self._numbers), *engine_families(gateway.model, replicas))
        counted = gateway_families(gateway.metrics.registry)
        with_vllm = gateway.config.vllm_metrics
        # In a thread: a page of many processes takes milliseconds.
        return await asyncio.to_thread(page_of, (*counted, *engine), with_vllm)

    async def _ask(self) -> list[ReplicaCounts]:
        async with self._asking:
            if time.monotonic() >= self._known_until_s:
                replicas = self._gateway.replicas
                statuses, cluster = await asyncio.gather(replicas.statuses(), self._ask_cluster())
                missing = list(replicas.missing)
                losses = {each.name: max(each.link.num_connections - 1, 0) for each in replicas}
                counts = replica_counts(statuses | dict.fromkeys(missing), cluster, losses)
                self._known = [replace(each, name=replicas.short(each.name)) for each in counts]
                known = None if cluster is None else cluster.num_configured
                configured = replicas.num_published if known is None else known
                self._numbers = ReplicaNumbers(configured + len(missing), replicas.num_usable)
                self._known_until_s = time.monotonic() + KEEP_S
            return self._known


def gateway_families(registry: CollectorRegistry) -> Iterable[Metric]:
    """The metrics of this process, or of all that share its folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and not counts_in_memory() and os.path.isdir(folder):
        return _of_folder(Path(folder))
    return registry.collect()


def render_all(
    folder: Path,
    model: str,
    statuses: Mapping[str, EngineStatus | None],
    cluster: ClusterView | None = None,
    *,
    with_vllm: bool = False,
) -> bytes:
    """The same page for a process outside the gateways, from their folder."""
    engines = engine_families(model, replica_counts(statuses, cluster))
    numbers = [] if cluster is None else number_families(numbers_of(cluster))
    return page_of((*_of_folder(folder), *numbers, *engines), with_vllm)


def forget_process(folder: Path, pid: int) -> None:
    """A gateway process has ended: drop its gauges, keep its counters."""
    mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]


def _of_folder(folder: Path) -> Iterable[Metric]:
    collector: Any = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]
    found: Iterable[Metric] = collector.collect()
    return found


class _Families(Collector):
    def __init__(self, families: Iterable[Metric], with_vllm: bool) -> None:
        self._families = families
        self._with_vllm = with_vllm

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield _renamed(family, family.name)
            spec = _BY_FULL_NAME.get(family.name)
            if self._with_vllm and spec is not None:
                for name in spec.vllm_names:
                    yield _renamed(family, name, spec.vllm_labels)


def page_of(families: Iterable[Metric], with_vllm: bool) -> bytes:
    """The page as text; `with_vllm` adds vLLM's names."""
    return generate_latest(_Families(families, with_vllm))


def _renamed(family: Metric, name: str, labels: _Relabel = dict) -> Metric:
    """The same values under another name, without `_created` samples."""
    renamed = Metric(name, family.documentation, family.type)
    old = len(family.name)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            renamed.add_sample(name + sample.name[old:], labels(sample.labels), sample.value)
    return renamed
