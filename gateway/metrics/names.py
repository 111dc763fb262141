"""All metrics: their names, meanings, and vLLM's names of them.

A metric that vLLM has is named and described as there. Labels are few and their values bounded, so
that no client can inflate the cardinality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PREFIX, VLLM_PREFIX = "outrider:", "vllm:"


class MetricKind(StrEnum):
    """Prometheus's type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSource(StrEnum):
    """Which component counts."""

    GATEWAY = "gateway"  # summed over all its processes
    ENGINE = "engine"  # since its start; absent while there is none
    CONTROLLER = "controller"  # queried by gateways


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric. Its names are without the prefix, and without the "_total" of a counter."""

    name: str
    kind: MetricKind
    source: MetricSource
    text: str
    labels: tuple[str, ...] = ("model",)
    is_vllms: bool = False  # vLLM has it under the same name
    vllm_others: tuple[str, ...] = ()  # other names in vLLM, old ones or production-stack's
    vllm_replica: str = "engine"  # vLLM's label of the replica, beside our own

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def sample_name(self) -> str:
        """As queries name it; of a histogram, without its suffix."""
        return self.full_name + ("_total" if self.kind is MetricKind.COUNTER else "")

    @property
    def vllm_names(self) -> tuple[str, ...]:
        """With vLLM's prefix."""
        names = ((self.name,) if self.is_vllms else ()) + self.vllm_others
        return tuple(VLLM_PREFIX + name for name in names)

    def vllm_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels of a series under vLLM's names."""
        found = {VLLM_LABELS.get(name, name): value for name, value in labels.items()}
        if "replica" in labels:
            found[self.vllm_replica] = labels["replica"]
        return found


# vLLM's names of our labels.
VLLM_LABELS: Mapping[str, str] = {"model": "model_name", "reason": "finished_reason"}


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_GATEWAY, _ENGINE, _CONTROLLER = MetricSource.GATEWAY, MetricSource.ENGINE, MetricSource.CONTROLLER
_REASON, _REPLICA = ("model", "reason"), ("model", "replica")
_ROLE, _POSITION = (*_REPLICA, "role"), (*_REPLICA, "position")

METRICS: tuple[MetricSpec, ...] = (
    # -- requests
    MetricSpec(
        "request_success",
        _C,
        _GATEWAY,
        "Finished requests, by reason.",
        _REASON,
        is_vllms=True,
    ),
    MetricSpec("refused_requests", _C, _GATEWAY, "Refused requests, by reason.", _REASON),
    MetricSpec(
        "resumed_requests", _C, _GATEWAY, "Times a request was resumed, by reason.", _REASON
    ),
    MetricSpec(
        "internal_errors",
        _C,
        _GATEWAY,
        "Requests that failed by an internal error (HTTP 500, gRPC INTERNAL).",
    ),
    MetricSpec("active_requests", _G, _GATEWAY, "Active requests.", ()),
    MetricSpec("gateway_processes", _G, _GATEWAY, "Gateway processes that serve.", ()),
    MetricSpec(
        "metrics_in_memory",
        _G,
        _GATEWAY,
        "Gateway processes whose counts are on their own page only: the temporary folder is full.",
        (),
    ),
    MetricSpec("prompt_tokens", _C, _GATEWAY, "Prompt tokens of requests that ran.", is_vllms=True),
    MetricSpec("generation_tokens", _C, _GATEWAY, "Generated tokens.", is_vllms=True),
    MetricSpec("request_prompt_tokens", _H, _GATEWAY, "Prompt tokens of a request.", is_vllms=True),
    MetricSpec(
        "request_generation_tokens", _H, _GATEWAY, "Generated tokens of a request.", is_vllms=True
    ),
    MetricSpec(
        "time_to_first_token_seconds",
        _H,
        _GATEWAY,
        "Time from a request's arrival to its first token.",
        is_vllms=True,
    ),
    MetricSpec(
        "inter_token_latency_seconds",
        _H,
        _GATEWAY,
        "Time from one token of a text to the next; tokens that come together share it.",
        is_vllms=True,
        vllm_others=("time_per_output_token_seconds",),
    ),
    MetricSpec(
        "request_time_per_output_token_seconds",
        _H,
        _GATEWAY,
        "Time per token of a request's longest text, after the first token.",
        is_vllms=True,
    ),
    MetricSpec(
        "e2e_request_latency_seconds",
        _H,
        _GATEWAY,
        "Time from a request's arrival to its end.",
        is_vllms=True,
    ),
    MetricSpec(
        "request_queue_time_seconds",
        _H,
        _GATEWAY,
        "Time that a request waited in the engine's queue.",
        is_vllms=True,
    ),
    MetricSpec(
        "request_prefill_time_seconds",
        _H,
        _GATEWAY,
        "Time from a request's first scheduling to its first token.",
        is_vllms=True,
    ),
    MetricSpec(
        "request_decode_time_seconds",
        _H,
        _GATEWAY,
        "Time from a request's first token to its last.",
        is_vllms=True,
    ),
    MetricSpec(
        "request_inference_time_seconds",
        _H,
        _GATEWAY,
        "Time from a request's first scheduling to its last token.",
        is_vllms=True,
    ),
    MetricSpec(
        "request_max_num_generation_tokens",
        _H,
        _GATEWAY,
        "Generated tokens of a request's longest text.",
        is_vllms=True,
    ),
    MetricSpec("request_params_n", _H, _GATEWAY, "The parameter n of a request.", is_vllms=True),
    MetricSpec(
        "request_params_max_tokens",
        _H,
        _GATEWAY,
        "The parameter max_tokens of a request, where it has one.",
        is_vllms=True,
    ),
    # -- the replicas
    MetricSpec(
        "replicas_configured",
        _G,
        _CONTROLLER,
        "Configured replicas, those of lost controllers included.",
        (),
    ),
    MetricSpec("replicas_ready", _G, _CONTROLLER, "Replicas that take new requests.", ()),
    MetricSpec(
        "replica_placement_seconds",
        _G,
        _CONTROLLER,
        "Time that a replica waited for resources; so far, while it still waits.",
        ("replica",),
    ),
    MetricSpec(
        "replica_start_seconds",
        _G,
        _CONTROLLER,
        "Time of a replica's last start, from when it had its resources.",
        ("replica",),
    ),
    # -- the engine
    MetricSpec(
        "engine_up",
        _G,
        _ENGINE,
        "Whether an engine answers.",
        ("replica",),
        vllm_others=("healthy_pods_total",),
        vllm_replica="server",
    ),
    MetricSpec(
        "arrivals_per_second",
        _G,
        _ENGINE,
        "Samples that arrive per second, over the last 64.",
        _REPLICA,
        vllm_others=("current_qps",),
        vllm_replica="server",
    ),
    MetricSpec(
        "engine_restarts",
        _C,
        _ENGINE,
        "Restarts of the engine; without a controller, times it was lost.",
        _REPLICA,
    ),
    MetricSpec("draft_restarts", _C, _ENGINE, "Restarts of the draft.", _REPLICA),
    MetricSpec(
        "draft_up",
        _G,
        _ENGINE,
        "Whether the draft model takes part; absent without one.",
        _REPLICA,
    ),
    MetricSpec("ranks_up", _G, _ENGINE, "Ready processes, by role.", _ROLE),
    MetricSpec("num_requests_running", _G, _ENGINE, "Running samples.", _REPLICA, is_vllms=True),
    MetricSpec("num_requests_waiting", _G, _ENGINE, "Waiting samples.", _REPLICA, is_vllms=True),
    MetricSpec(
        "kv_cache_usage_perc",
        _G,
        _ENGINE,
        "Share of the target's KV blocks in use; 1 is all.",
        _REPLICA,
        is_vllms=True,
        vllm_others=("gpu_cache_usage_perc",),
    ),
    MetricSpec(
        "prefix_cache_queries",
        _C,
        _ENGINE,
        "Prompt tokens looked up in the prefix cache.",
        _REPLICA,
        is_vllms=True,
        vllm_others=("gpu_prefix_cache_queries",),
    ),
    MetricSpec(
        "prefix_cache_hits",
        _C,
        _ENGINE,
        "Prompt tokens found in the prefix cache.",
        _REPLICA,
        is_vllms=True,
        vllm_others=("gpu_prefix_cache_hits",),
    ),
    MetricSpec(
        "num_preemptions",
        _C,
        _ENGINE,
        "Samples preempted: their KV blocks were freed for another.",
        _REPLICA,
        is_vllms=True,
    ),
    MetricSpec(
        "num_fairness_preemptions",
        _C,
        _ENGINE,
        "Samples preempted for a waiting tenant without a row.",
        _REPLICA,
    ),
    MetricSpec(
        "num_displaced",
        _C,
        _ENGINE,
        "Waiting samples refused because their tenant held most of a full queue.",
        _REPLICA,
    ),
    MetricSpec("engine_steps", _C, _ENGINE, "Steps of the target.", _REPLICA),
    MetricSpec(
        "iteration_tokens",
        _H,
        _ENGINE,
        "Prompt and generated tokens per step of the target.",
        _REPLICA,
        vllm_others=("iteration_tokens_total",),
    ),
    # -- speculation
    MetricSpec(
        "spec_decode_num_drafts",
        _C,
        _ENGINE,
        "Rounds with draft tokens.",
        _REPLICA,
        is_vllms=True,
    ),
    MetricSpec(
        "spec_decode_num_draft_tokens", _C, _ENGINE, "Draft tokens.", _REPLICA, is_vllms=True
    ),
    MetricSpec(
        "spec_decode_num_verified_tokens",
        _C,
        _ENGINE,
        "Draft tokens verified by the target.",
        _REPLICA,
    ),
    MetricSpec(
        "spec_decode_num_accepted_tokens",
        _C,
        _ENGINE,
        "Accepted draft tokens.",
        _REPLICA,
        is_vllms=True,
    ),
    MetricSpec(
        "spec_decode_num_accepted_tokens_per_pos",
        _C,
        _ENGINE,
        "Accepted draft tokens, by their position in the round, from 0.",
        _POSITION,
        is_vllms=True,
    ),
    MetricSpec(
        "draft_depth", _H, _ENGINE, "Tokens drafted in a round; 0 is plain decoding.", _REPLICA
    ),
    MetricSpec(
        "proposer_checked_tokens",
        _C,
        _ENGINE,
        "Tokens of a proposer that were compared with the text.",
        _ROLE,
    ),
    MetricSpec(
        "proposer_agreed_tokens",
        _C,
        _ENGINE,
        "Tokens of a proposer that agreed with the text; over those compared, its agreement.",
        _ROLE,
    ),
    MetricSpec(
        "draft_time_seconds",
        _C,
        _ENGINE,
        "Time that steps spent on drafting, including waiting for drafts.",
        _REPLICA,
    ),
    MetricSpec("verify_time_seconds", _C, _ENGINE, "Time of the target's steps.", _REPLICA),
    MetricSpec(
        "transfer_time_seconds",
        _C,
        _ENGINE,
        "Time that the target waited for draft tokens in transfer.",
        _REPLICA,
    ),
    MetricSpec(
        "draft_ahead_rounds",
        _C,
        _ENGINE,
        "Rounds of a row that were drafted ahead of the outcome before.",
        _REPLICA,
    ),
    MetricSpec(
        "draft_ahead_hits",
        _C,
        _ENGINE,
        "Rounds drafted ahead that began with the drafts of a branch.",
        _REPLICA,
    ),
    MetricSpec("draft_ahead_tokens", _C, _ENGINE, "Tokens drafted in branches.", _REPLICA),
    MetricSpec(
        "draft_ahead_used_tokens",
        _C,
        _ENGINE,
        "Tokens drafted in branches that were proposed.",
        _REPLICA,
    ),
    MetricSpec(
        "wait_time_seconds", _C, _ENGINE, "Time that the engine waited for verdicts.", _REPLICA
    ),
    MetricSpec(
        "speculation_gain",
        _G,
        _ENGINE,
        "Estimated tokens per second over those of plain decoding; absent while unknown.",
        _REPLICA,
    ),
)
BY_NAME: Mapping[str, MetricSpec] = {each.name: each for each in METRICS}
