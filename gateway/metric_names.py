"""Every metric there is: its name, what it means, and what vLLM calls it.

vLLM's words are used where it has a metric of the same meaning. Labels are few and their values
known beforehand, so that no client can make them many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PREFIX, VLLM_PREFIX = "outrider:", "vllm:"


class Kind(StrEnum):
    """Of a metric, as Prometheus has it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Who counts."""

    GATEWAY = "gateway"  # of all processes, where there are several
    ENGINE = "engine"  # since its start; left out while there is none
    CONTROLLER = "controller"  # of whoever starts the engines; gateways ask it


@dataclass(frozen=True, slots=True)
class Described:
    """A metric. Its names are without the prefix, and without the "_total" of a counter."""

    name: str
    kind: Kind
    source: Source
    text: str
    labels: tuple[str, ...] = ("model",)
    is_vllms: bool = False  # vLLM has it under the same name
    vllm_others: tuple[str, ...] = ()  # it has or had it under these, or production-stack has
    vllm_replica: str = "engine"  # what the replica is called there, beside our own name of it

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def sample_name(self) -> str:
        """As a query names it; of a histogram, without what follows."""
        return self.full_name + ("_total" if self.kind is Kind.COUNTER else "")

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


# Our labels by vLLM's names, of metrics that it has as well.
VLLM_LABELS: Mapping[str, str] = {"model": "model_name", "reason": "finished_reason"}


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_GATEWAY, _ENGINE, _CONTROLLER = Source.GATEWAY, Source.ENGINE, Source.CONTROLLER
_REASON, _REPLICA = ("model", "reason"), ("model", "replica")
_ROLE, _POSITION = (*_REPLICA, "role"), (*_REPLICA, "position")

METRICS: tuple[Described, ...] = (
    # -- requests
    Described(
        "request_success",
        _C,
        _GATEWAY,
        "Requests that ran and have ended, by why.",
        _REASON,
        is_vllms=True,
    ),
    Described("refused_requests", _C, _GATEWAY, "Requests that were not begun, by why.", _REASON),
    Described(
        "resumed_requests", _C, _GATEWAY, "Times that a request went on elsewhere, by why.", _REASON
    ),
    Described(
        "internal_errors",
        _C,
        _GATEWAY,
        "Requests that failed by a fault of the server's own (HTTP 500, gRPC INTERNAL).",
    ),
    Described("active_requests", _G, _GATEWAY, "Requests in hand.", ()),
    Described("gateway_processes", _G, _GATEWAY, "Gateway processes that serve.", ()),
    Described(
        "metrics_in_memory",
        _G,
        _GATEWAY,
        "Gateway processes whose counts are on their own page only: the temporary folder is full.",
        (),
    ),
    Described("prompt_tokens", _C, _GATEWAY, "Tokens of prompts that were read.", is_vllms=True),
    Described(
        "generation_tokens", _C, _GATEWAY, "Tokens of texts that were passed on.", is_vllms=True
    ),
    Described(
        "request_prompt_tokens", _H, _GATEWAY, "Tokens of a request's prompt.", is_vllms=True
    ),
    Described(
        "request_generation_tokens", _H, _GATEWAY, "Tokens of a request's texts.", is_vllms=True
    ),
    Described(
        "time_to_first_token_seconds",
        _H,
        _GATEWAY,
        "Time from a request's arrival to its first token.",
        is_vllms=True,
    ),
    Described(
        "inter_token_latency_seconds",
        _H,
        _GATEWAY,
        "Time from one token of a text to the next; tokens that come together share it.",
        is_vllms=True,
        vllm_others=("time_per_output_token_seconds",),
    ),
    Described(
        "request_time_per_output_token_seconds",
        _H,
        _GATEWAY,
        "Time per token of a request's longest text, without its first.",
        is_vllms=True,
    ),
    Described(
        "e2e_request_latency_seconds",
        _H,
        _GATEWAY,
        "Time from a request's arrival to its end.",
        is_vllms=True,
    ),
    Described(
        "request_queue_time_seconds",
        _H,
        _GATEWAY,
        "Time that a request waited in the engine before it was begun.",
        is_vllms=True,
    ),
    Described(
        "request_prefill_time_seconds",
        _H,
        _GATEWAY,
        "Time from a request's beginning in the engine to its first token.",
        is_vllms=True,
    ),
    Described(
        "request_decode_time_seconds",
        _H,
        _GATEWAY,
        "Time from a request's first token to its last.",
        is_vllms=True,
    ),
    Described(
        "request_inference_time_seconds",
        _H,
        _GATEWAY,
        "Time from a request's beginning in the engine to its last token.",
        is_vllms=True,
    ),
    Described(
        "request_max_num_generation_tokens",
        _H,
        _GATEWAY,
        "Tokens of a request's longest text.",
        is_vllms=True,
    ),
    Described("request_params_n", _H, _GATEWAY, "Texts that a request asks for.", is_vllms=True),
    Described(
        "request_params_max_tokens",
        _H,
        _GATEWAY,
        "Most tokens of a text that a request asks for, where it has a limit.",
        is_vllms=True,
    ),
    # -- the replicas
    Described(
        "replicas_configured",
        _G,
        _CONTROLLER,
        "Replicas there should be, those of lost controllers included.",
        (),
    ),
    Described("replicas_ready", _G, _CONTROLLER, "Replicas that take new requests.", ()),
    Described(
        "replica_placement_seconds",
        _G,
        _CONTROLLER,
        "Time that a replica waited for room, so far while it still waits.",
        ("replica",),
    ),
    Described(
        "replica_start_seconds",
        _G,
        _CONTROLLER,
        "Time that the last start of a replica took once it had room, or found it anew.",
        ("replica",),
    ),
    # -- the engine
    Described(
        "engine_up",
        _G,
        _ENGINE,
        "Whether an engine answers.",
        ("replica",),
        vllm_others=("healthy_pods_total",),
        vllm_replica="server",
    ),
    Described(
        "arrivals_per_second",
        _G,
        _ENGINE,
        "Samples that arrive per second, over the last 64.",
        _REPLICA,
        vllm_others=("current_qps",),
        vllm_replica="server",
    ),
    Described(
        "engine_restarts",
        _C,
        _ENGINE,
        "Times the engine was started anew, or lost where nobody is known who starts it.",
        _REPLICA,
    ),
    Described("draft_restarts", _C, _ENGINE, "Times the draft was started anew.", _REPLICA),
    Described(
        "draft_up",
        _G,
        _ENGINE,
        "Whether the draft model takes part; not there without one.",
        _REPLICA,
    ),
    Described("ranks_up", _G, _ENGINE, "Processes that are ready, by what they run.", _ROLE),
    Described(
        "num_requests_running", _G, _ENGINE, "Samples being computed.", _REPLICA, is_vllms=True
    ),
    Described(
        "num_requests_waiting", _G, _ENGINE, "Samples that wait for room.", _REPLICA, is_vllms=True
    ),
    Described(
        "kv_cache_usage_perc",
        _G,
        _ENGINE,
        "Share of the target's KV blocks in use; 1 is all.",
        _REPLICA,
        is_vllms=True,
        vllm_others=("gpu_cache_usage_perc",),
    ),
    Described(
        "prefix_cache_queries",
        _C,
        _ENGINE,
        "Prompt tokens looked for in the cache.",
        _REPLICA,
        is_vllms=True,
        vllm_others=("gpu_prefix_cache_queries",),
    ),
    Described(
        "prefix_cache_hits",
        _C,
        _ENGINE,
        "Prompt tokens that were found in the cache.",
        _REPLICA,
        is_vllms=True,
        vllm_others=("gpu_prefix_cache_hits",),
    ),
    Described(
        "num_preemptions",
        _C,
        _ENGINE,
        "Samples that gave up their KV for another.",
        _REPLICA,
        is_vllms=True,
    ),
    Described(
        "num_fairness_preemptions",
        _C,
        _ENGINE,
        "Samples that gave up their rows to a tenant that waited without one.",
        _REPLICA,
    ),
    Described(
        "num_displaced",
        _C,
        _ENGINE,
        "Samples refused while they waited, as their tenant held most of a full queue.",
        _REPLICA,
    ),
    Described("engine_steps", _C, _ENGINE, "Passes of the target.", _REPLICA),
    Described(
        "iteration_tokens",
        _H,
        _ENGINE,
        "Tokens of prompts computed and of texts, in a pass of the target.",
        _REPLICA,
        vllm_others=("iteration_tokens_total",),
    ),
    # -- speculation
    Described(
        "spec_decode_num_drafts",
        _C,
        _ENGINE,
        "Rounds in which anything was drafted.",
        _REPLICA,
        is_vllms=True,
    ),
    Described(
        "spec_decode_num_draft_tokens", _C, _ENGINE, "Tokens drafted.", _REPLICA, is_vllms=True
    ),
    Described(
        "spec_decode_num_verified_tokens",
        _C,
        _ENGINE,
        "Drafted tokens that the target looked at.",
        _REPLICA,
    ),
    Described(
        "spec_decode_num_accepted_tokens",
        _C,
        _ENGINE,
        "Drafted tokens that were accepted.",
        _REPLICA,
        is_vllms=True,
    ),
    Described(
        "spec_decode_num_accepted_tokens_per_pos",
        _C,
        _ENGINE,
        "Drafted tokens that were accepted, by their place in the round, from 0.",
        _POSITION,
        is_vllms=True,
    ),
    Described(
        "draft_depth", _H, _ENGINE, "Tokens drafted in a round; 0 is plain decoding.", _REPLICA
    ),
    Described(
        "proposer_checked_tokens",
        _C,
        _ENGINE,
        "Guesses of a proposer that were compared with the text.",
        _ROLE,
    ),
    Described(
        "proposer_agreed_tokens",
        _C,
        _ENGINE,
        "Guesses of a proposer that were right; over those compared, its agreement.",
        _ROLE,
    ),
    Described(
        "draft_time_seconds",
        _C,
        _ENGINE,
        "Time that steps spent on drafting, waiting for drafts included.",
        _REPLICA,
    ),
    Described("verify_time_seconds", _C, _ENGINE, "Time of the target's passes.", _REPLICA),
    Described(
        "transfer_time_seconds",
        _C,
        _ENGINE,
        "Time that the target waited for drafts on their way to it.",
        _REPLICA,
    ),
    Described(
        "wait_time_seconds", _C, _ENGINE, "Time that the engine waited for verdicts.", _REPLICA
    ),
    Described(
        "speculation_gain",
        _G,
        _ENGINE,
        "Tokens per second over those of plain decoding, as estimated; not there while unknown.",
        _REPLICA,
    ),
)
BY_NAME: Mapping[str, Described] = {each.name: each for each in METRICS}
