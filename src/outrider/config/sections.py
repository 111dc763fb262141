"""The sections of the configuration: every setting with its rule and documentation."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from outrider.catalog.heads import HeadKind
from outrider.catalog.proposers import proposer_names
from outrider.checkpoints.resolve import BUNDLED_TARGET
from outrider.config.bundled import AUTO
from outrider.config.rules import (
    FLAG,
    POSITIVE,
    FieldError,
    Rule,
    Validated,
    choice,
    names_rule,
    setting,
    text_rule,
    whole,
)
from outrider.scheduler.policies import AHEAD_AUTO, AHEAD_MODES, GOODPUT, POLICIES

MAX_SPECULATIVE_TOKENS = 32

_QUANTIZATION = choice("fp8", "int8", optional=True)
_DTYPE = choice("auto", "float32", "bfloat16", "float16")
_DEVICE = Rule(
    str,
    "'auto', 'cpu', 'cuda' or 'cuda:N'",
    lambda v: re.fullmatch(r"auto|cpu|cuda(:\d+)?", v) is not None,
)
_REVISION = text_rule("a branch, tag or commit of the hub", optional=True)
_MODEL_WANTED = "a bundled model's name, a checkpoint folder, a .gguf file or a hub id"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(Validated):
    """The large model, whose text is generated."""

    _section = "target."

    model: str = setting(
        BUNDLED_TARGET,
        text_rule(_MODEL_WANTED),
        "The target: a bundled model's name, a checkpoint folder, a .gguf file or a hub id.",
    )
    tokenizer: str | None = setting(
        None,
        text_rule("a bundled model's name, a folder or a hub id", optional=True),
        "Its tokenizer, named like a model; unset is the one that comes with the target.",
    )
    revision: str | None = setting(
        None,
        _REVISION,
        "Revision of a hub id; a server resolves it to a commit once, for all its processes.",
    )
    dtype: str = setting(
        "auto",
        _DTYPE,
        "Type of weights and KV; auto is bfloat16 on CUDA and float32 on CPU, where weights then "
        "stay in the form they are stored in if that is smaller.",
    )
    quantization: str | None = setting(
        None,
        _QUANTIZATION,
        "8-bit weights of its layers: fp8 or int8; this saves memory and time on GPUs and, as int8 "
        "with dtype auto, on CPUs, where it only rounds otherwise. A quantized checkpoint is "
        "served as it is, without this.",
    )
    device: str = setting(
        "auto", _DEVICE, "Where it runs; auto is the first CUDA device, or else the CPU."
    )
    tensor_parallel: int = setting(1, whole(1), "Number of devices the weights are split over.")
    max_model_len: int | None = setting(
        None,
        whole(1, optional=True),
        "Longest prompt plus output in tokens; unset is what the checkpoint allows.",
    )

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """The tokenizer's source and revision."""
        if self.tokenizer is not None:
            return self.tokenizer, None
        return self.model, self.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(Validated):
    """The small model that proposes tokens."""

    _section = "draft."

    model: str | None = setting(
        AUTO,
        text_rule(_MODEL_WANTED, optional=True),
        "The draft, named like the target, or none; auto is the bundled one beside the bundled "
        "target unless ngram proposes, and none beside others.",
    )
    revision: str | None = setting(None, _REVISION, "Revision of a hub id.")
    dtype: str = setting(
        "auto",
        _DTYPE,
        "Type of weights and KV; auto is the target's, and weights in 8 bits on CPUs.",
    )
    quantization: str | None = setting(
        None,
        _QUANTIZATION,
        "8-bit weights of its layers: fp8 or int8, whatever the target's are; unset is none.",
    )
    device: str = setting("auto", _DEVICE, "Where it runs; auto is the target's device.")
    tensor_parallel: int = setting(
        1, whole(1), "Number of devices the weights are split over; need not be the target's."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(Validated):
    """A head on the target's hidden states, which proposes instead of a draft."""

    _section = "head."

    model: str | None = setting(
        None,
        text_rule("a checkpoint folder or a hub id", optional=True),
        "The head's checkpoint (EAGLE-3, speculators, MLP speculator, Medusa); it may also be "
        "given as draft.model if its files identify it as a head.",
    )
    revision: str | None = setting(None, _REVISION, "Revision of a hub id.")
    method: str = setting(
        "auto",
        choice("auto", *(kind.value for kind in HeadKind)),
        "Its kind; auto reads it from its files.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(Validated):
    """The proposer, the depth, and how draft tokens are verified."""

    _section = "speculation."

    method: str | None = setting(
        None,
        Rule(
            str,
            " or ".join(map(repr, (AUTO, *proposer_names()))) + ", or unset",
            lambda v: v == AUTO or v in proposer_names(),
            optional=True,
        ),
        "The proposer: draft, ngram or a kind of head; auto is the draft or the head if there is "
        "one, else, under the policy goodput, ngram on a CPU and none on a GPU. Unset is auto "
        "unless draft.model is none: then it is the head or none.",
    )
    policy: str = setting(
        GOODPUT,
        choice(*POLICIES),
        "How the depth of each round is chosen: goodput by estimated cost and yield of a step, "
        "threshold by arrival rate and acceptance, trim drafts to the maximum depth and verifies "
        "the likely tokens, fixed always uses the maximum depth, off drafts nothing.",
    )
    num_speculative_tokens: int | None = setting(
        None,
        whole(0, MAX_SPECULATIVE_TOKENS, optional=True),
        "Maximum depth: bound on the draft tokens per request and round under the policies goodput "
        "and threshold, unset is 4 on CPU and 5 on CUDA; under fixed and trim their exact number, "
        "unset is 2 on CPU and 5 on CUDA; 0 is plain decoding.",
    )
    verification: str = setting(
        "shared",
        choice("shared", "rejection"),
        "shared gives the text plain decoding gives; rejection keeps its distribution only.",
    )
    draft_ahead: str = setting(
        AHEAD_AUTO,
        choice(*AHEAD_MODES),
        "Whether a draft in ranks of its own drafts ahead, after the likeliest outcomes of the "
        "target's pass while that runs: auto if steps take less time so, on, off. Only on CPUs, "
        "with draft.tensor_parallel 1 and shared verification.",
    )
    ngram_min: int = setting(1, whole(1), "Shortest n-gram looked up in prompt and output.")
    ngram_max: int = setting(4, whole(1), "Longest n-gram looked up in prompt and output.")

    def _check_together(self) -> None:
        if self.ngram_min > self.ngram_max:
            raise FieldError(
                ("speculation.ngram_min", "speculation.ngram_max"),
                f"is {self.ngram_min}, above speculation.ngram_max ({self.ngram_max}); "
                "lower the first or raise the second.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Validated):
    """Memory for keys and values."""

    _section = "cache."

    block_size: int = setting(
        16,
        Rule(int, "a power of two from 1 to 256", lambda v: v in {2**e for e in range(9)}),
        "Tokens in one KV block.",
    )
    kv_cache_gb: float | None = setting(
        None,
        dataclasses.replace(POSITIVE, expected="a number > 0, or unset", optional=True),
        "Gigabytes (2**30 bytes) of KV for target and draft together; unset is chosen by device.",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        Rule(float, "a number in (0, 1]", lambda v: 0 < v <= 1),
        "Share of a GPU's memory that weights, passes and KV may take when kv_cache_gb is unset.",
    )
    prefix_caching: bool = setting(True, FLAG, "Reuse the KV of common prompt prefixes.")
    prefix_sharing: str = setting(
        "group",
        choice("group", "all"),
        "Which API keys share cached prefixes: group those of the same group, a key without one "
        "being its own group; all every key, which can then test the others' prompts.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Validated):
    """How requests share the passes of the target."""

    _section = "scheduler."

    max_num_seqs: int | None = setting(
        None,
        whole(1, optional=True),
        "Maximum number of running requests; unset is 64 on CPU, and by the GPU's memory 256 from "
        "60 GB, 128 from 30, else 64.",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        whole(1, optional=True),
        "Maximum number of tokens in one pass of the target, at least max_num_seqs; unset is 512 "
        "on CPU, and by the GPU's memory 2048 from 60 GB, 1024 from 30, else 512.",
    )
    step_limit_ms: float | None = setting(
        None,
        dataclasses.replace(POSITIVE, expected="a number > 0, or unset", optional=True),
        "Maximum milliseconds of a step that computes prompts beside decode rows; unset is 50 on "
        "CUDA and 500 on CPU.",
    )
    lag: int | None = setting(
        None,
        whole(0, 1, optional=True),
        "Steps planned before the last result is known; unset is what the workers can use: 1 on "
        "CUDA and where ranks are processes, else 0.",
    )
    priority_aging_s: float = setting(
        10.0, POSITIVE, "Seconds of waiting that lift a request by one priority."
    )
    max_waiting: int | None = setting(
        None,
        whole(1, optional=True),
        "Maximum number of waiting requests, each sample counting; unset is 4096 for a server and "
        "no limit for LLM.",
    )

    @property
    def num_seats(self) -> int:
        """`max_num_seqs` of a settled configuration (`outrider.engine.sizing`)."""
        assert self.max_num_seqs is not None, "the device decides first"
        return self.max_num_seqs

    @property
    def num_step_tokens(self) -> int:
        """`max_num_batched_tokens` of a settled configuration."""
        assert self.max_num_batched_tokens is not None, "the device decides first"
        return self.max_num_batched_tokens

    def _check_together(self) -> None:
        seats, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seats is not None and tokens is not None and tokens < seats:
            raise FieldError(
                ("scheduler.max_num_batched_tokens", "scheduler.max_num_seqs"),
                f"is {tokens}, below scheduler.max_num_seqs ({seats}); raise the first or lower "
                "the second.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Validated):
    """Where `outrider serve` puts the processes."""

    _section = "cluster."

    address: str | None = setting(
        None,
        text_rule("the address of a Ray cluster", optional=True),
        "Ray cluster to use; unset starts one on this machine for as long as it serves.",
    )
    ray_timeout_s: float = setting(
        0.0,
        Rule(float, "a number >= 0", lambda v: v >= 0),
        "Seconds to wait for the Ray cluster at `cluster.address` while it does not answer, e.g. "
        "because it is being started; 0 fails at once.",
    )
    replicas: int = setting(
        1,
        whole(1, 256),
        "Engines, each with its own target and draft, among which requests are divided.",
    )
    first_replica: int = setting(
        0,
        whole(0, 65535),
        "Number of the first replica, its name as `replica` in metrics and `outrider status`; "
        "servers that share gateways need distinct ones.",
    )
    listen: str | None = setting(
        None,
        text_rule("an address as 0.0.0.0:50060", optional=True),
        "Address at which gateways on other hosts get this server's replicas; unset is none. They "
        "and all engines share OUTRIDER_SECRET.",
    )
    target_labels: tuple[str, ...] = setting(
        (),
        names_rule("labels as key=value, with commas between them"),
        "Labels of the Ray nodes that the target may be placed on; none is any node.",
    )
    draft_labels: tuple[str, ...] = setting(
        (),
        names_rule("labels as key=value, with commas between them"),
        "Labels of the Ray nodes that the draft may be placed on; none is any node, the target's "
        "first.",
    )
    placement_timeout_s: float = setting(
        60.0, POSITIVE, "Seconds to wait for the cluster to have room for a model."
    )
    start_timeout_s: float = setting(
        600.0,
        POSITIVE,
        "Seconds until all ranks must have their weights; streams wait as long for an engine that "
        "is restarted, besides its placement.",
    )
    standby: bool = setting(
        True,
        FLAG,
        "Keep the processes of a standby engine started, without models, to take over when the "
        "present ones are lost; they take about 0.15 GB a rank, 0.2 GB in Ray.",
    )
    colocate: bool | None = setting(
        None,
        dataclasses.replace(FLAG, expected="true or false, or unset", optional=True),
        "Hold target and draft in the engine's process, without ranks; unset is true for models "
        "of one rank on the only GPU there is.",
    )

    @property
    def restart_timeout_s(self) -> float:
        """The time limit of placing and restarting all processes."""
        return self.placement_timeout_s + self.start_timeout_s
