"""The status of a server: its model, settings, replicas and processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from outrider import __version__
from outrider.api_types.cluster_view import AskCluster, cluster_to_proto
from outrider.api_types.convert import STATES, engine_to_proto
from outrider.config import EngineConfig
from outrider.gateway.gateway import Gateway
from outrider.gateway.routing.replicas import ReplicaLinks
from outrider.links.cluster_view import ClusterView
from outrider.links.gateway_messages import EngineFacts, EngineStatus, ModelStatus, RankStatus
from outrider.proto import control_pb2


async def status_of(gateway: Gateway, ask_cluster: AskCluster) -> control_pb2.GetStatusResponse:
    statuses, cluster = await asyncio.gather(gateway.replicas.statuses(), ask_cluster())
    names = [replica.name for replica in gateway.replicas.connected]
    engine = next((status for name in names if (status := statuses.get(name))), None)
    response = control_pb2.GetStatusResponse(
        model=gateway.model,
        version=__version__,
        state=STATES[gateway.state],
        uptime_s=gateway.uptime_s,
        active_requests=len(gateway.active_requests),
        replicas=_replicas(gateway.replicas, statuses, cluster),
    )
    if gateway.facts is not None:
        response.settings.CopyFrom(_settings(gateway.facts, engine))
    if engine is not None:
        response.engine.CopyFrom(engine_to_proto(engine))
    if cluster is not None:
        response.cluster.CopyFrom(cluster_to_proto(cluster))
    return response


def _replicas(
    replicas: ReplicaLinks, statuses: Mapping[str, EngineStatus | None], cluster: ClusterView | None
) -> Iterator[control_pb2.ReplicaState]:
    views = {} if cluster is None else {view.name: view for view in cluster.replicas}
    for replica in replicas:
        view, status = views.get(replica.name), statuses.get(replica.name)
        yield control_pb2.ReplicaState(
            name=replica.name,
            state=replica.state,
            load=replica.link.load,
            restarts=0 if view is None else view.restarts,
            draft_restarts=0 if view is None else view.draft_restarts,
            engine=None if status is None else engine_to_proto(status),
        )


def _settings(facts: EngineFacts, engine: EngineStatus | None) -> control_pb2.EngineSettings:
    config = EngineConfig.from_settings(facts.settings)
    return control_pb2.EngineSettings(
        target=config.target.model,
        draft=config.draft.model or config.head.model or "",
        target_tensor_parallel=config.target.tensor_parallel,
        draft_tensor_parallel=config.draft.tensor_parallel if facts.has_draft else 0,
        method=config.method or "off",
        depth=facts.depth if _drafts(config) else 0,
        depth_reason=_depth_reason(config, engine),
        policy=config.speculation.policy,
        verification=config.speculation.verification,
        deterministic=config.deterministic,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        kernels=facts.kernels,
    )


def _drafts(config: EngineConfig) -> bool:
    return config.method is not None and config.speculation.policy != "off"


def _depth_reason(config: EngineConfig, engine: EngineStatus | None) -> str:
    if config.method is None:
        return "no proposer"
    if not _drafts(config):
        return "as the policy says"
    if config.speculation.num_speculative_tokens is not None:
        return "set by speculation.num_speculative_tokens"
    parts: list[RankStatus | ModelStatus] = [*engine.ranks, *engine.models] if engine else []
    devices = [part.device for part in parts if part.role == "target"]
    kind = devices[0].partition(":")[0] if devices else ""
    return f"the default on {kind}" if kind else "the default of the target's device"
