"""One sample of a request as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from outrider.scheduler.acceptance import AcceptanceBias
from outrider.scheduler.pool import ROOT, Node
from outrider.scheduler.tenants import Tenant
from outrider.scheduler.types import (
    NO_PROPOSER,
    Exclusive,
    FinishReason,
    RequestSpec,
    RowInit,
    SampleId,
)

NO_BLOCKS: tuple[int, ...] = ()


class RequestState(IntEnum):
    PARKED = 0  # waits for a sibling's prompt
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3  # its blocks go back, and it waits again, once no plan in flight names it
    FINISHED = 4


class BlockTable:
    """A request's block table in one pool, and how much of it is computed.

    `computed` counts applied tokens with KV; `planned` adds what plans in flight compute at most.
    """

    __slots__ = ("announced", "blocks", "computed", "node", "planned", "published")

    def __init__(self, root: Node) -> None:
        """`root` is the parent of its first block."""
        self.blocks: list[int] = []
        self.announced = 0  # blocks already sent to the workers
        self.computed = 0
        self.planned = 0
        self.published = 0  # tokens whose blocks were offered to the prefix cache
        self.node = root

    def take_prefix(self, blocks: list[int], node: Node, block_size: int) -> None:
        self.blocks = blocks
        self.node = node
        self.published = self.computed = self.planned = len(blocks) * block_size

    def announce(self) -> tuple[int, tuple[int, ...]]:
        """The blocks not sent to the workers yet, and their index in the table."""
        start, size = self.announced, len(self.blocks)
        if start == size:
            return start, NO_BLOCKS
        self.announced = size
        return start, tuple(self.blocks[start:])

    def cut(self, num_blocks: int) -> list[int]:
        """Give up all but the first `num_blocks`; returns the others."""
        rest = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        self.announced = min(self.announced, num_blocks)
        return rest


class Request:
    """State of one sample of a request; `tokens` are prompt plus committed output. What every step
    reads of its `spec` is copied here."""

    __slots__ = (
        "acceptance_bias",
        "arrival_s",
        "behind",
        "deadline_s",
        "depth",
        "draft",
        "draft_plans_in_flight",
        "drafts_in_flight",
        "exclusive",
        "followers",
        "generation",
        "in_flight",
        "in_prompt",
        "is_depth_fixed",
        "is_draft_given_up",
        "is_watched",
        "key",
        "max_len",
        "may_be_displaced",
        "missing_blocks",
        "num_cached",
        "num_preemptions",
        "prompt_len",
        "prompt_logprobs_sent",
        "proposer",
        "queued_s",
        "root",
        "row",
        "sample_id",
        "seed",
        "spec",
        "started_s",
        "state",
        "stop_ids",
        "target",
        "tenant",
        "tokens",
        "upper",
    )

    def __init__(
        self,
        sample_id: SampleId,
        spec: RequestSpec,
        *,
        seed: int,
        arrival_s: float,
        deadline_s: float | None = None,
        output_ids: Sequence[int] = (),
        prompt_logprobs_sent: int = 0,
    ) -> None:
        """`seed` is the sample's. `output_ids`, and the first `prompt_logprobs_sent`
        log-probabilities of the prompt, are known to the client of a resumed request."""
        self.sample_id = sample_id
        self.spec = spec
        self.tokens = [*spec.prompt_ids, *output_ids]
        self.prompt_len = len(spec.prompt_ids)
        self.seed = seed
        self.max_len = spec.max_len
        self.arrival_s = arrival_s
        self.stop_ids = frozenset(spec.stop_ids)
        self.key = (arrival_s, 0)  # its place in the queue, set when it is added
        self.tenant = Tenant(spec.tenant)  # replaced by the scheduler's own when it is added
        self.may_be_displaced = False  # while it waits, in favour of a tenant with fewer waiting
        self.deadline_s = deadline_s
        self.is_watched = False  # by `Deadlines`
        self.allow_drafts(True)
        self.is_depth_fixed = spec.is_depth_fixed
        self.exclusive = Exclusive.NEVER  # set when it is added
        self.acceptance_bias = AcceptanceBias()  # how its drafts have done so far
        self.followers: list[Request] = []
        self.state = RequestState.WAITING
        self.num_preemptions = 0
        self.num_cached = 0
        self.queued_s: float | None = None  # until it first got a row; None: it never had one
        self.started_s = 0.0  # when it last got a row
        self.missing_blocks = (0, 0)  # when admission last failed, and how much was cached then
        self.row = -1
        self.generation = 0
        self.in_flight = 0  # plans in flight that name it
        self.drafts_in_flight = 0  # of these: those that draft with the draft's KV
        self.draft_plans_in_flight = 0  # and those that use it at all
        self.is_draft_given_up = False  # for lack of memory, as long as it has its row
        self.behind = 0  # bound on tokens without draft KV while drafts are in flight
        self.in_prompt = True  # until the chunk with its last known token is planned
        self.prompt_logprobs_sent = prompt_logprobs_sent
        self.root: Node = spec.cache_salt or ROOT  # parent of its first blocks
        self.target = BlockTable(self.root)
        self.draft = BlockTable(self.root)
        self.upper = len(self.tokens)  # length if every draft in flight is accepted

    def allow_drafts(self, is_allowed: bool) -> None:
        """Whether it may draft with its proposer; fixed while it has the row it is about to get."""
        drafts = is_allowed and self.spec.depth > 0 and self.spec.proposer != NO_PROPOSER
        self.proposer = self.spec.proposer if drafts else NO_PROPOSER
        self.depth = self.spec.depth if drafts else 0

    def start(self, row: int, generation: int) -> None:
        self.state = RequestState.RUNNING
        self.row = row
        self.generation = generation
        self.in_prompt = True
        self.upper = len(self.tokens)

    @property
    def may_reuse_prefix(self) -> bool:
        """Prompt logprobs need the logits of every prompt token, so they ignore cached KV."""
        needs_logits = self.spec.params.prompt_logprobs is not None
        return not needs_logits or self.prompt_logprobs_sent >= self.prompt_len - 1

    def until_end(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The part of newly committed `tokens` that belongs to the text, and why it ends there."""
        room = self.max_len - len(self.tokens)
        if self.stop_ids and not self.stop_ids.isdisjoint(tokens):
            free = self.prompt_len + self.spec.params.min_tokens - len(self.tokens)
            for index, token in enumerate(tokens[:room]):
                if token in self.stop_ids and index >= free:
                    return tokens[: index + 1], FinishReason.STOP
        if len(tokens) >= room:
            return tokens[:room], FinishReason.LENGTH
        return tokens, None

    def forget_kv(self) -> None:
        self.target = BlockTable(self.root)
        self.draft = BlockTable(self.root)
        self.is_draft_given_up = False
        self.row = -1

    def row_init(self) -> RowInit:
        return RowInit(
            row=self.row,
            generation=self.generation,
            sample_id=self.sample_id,
            token_ids=tuple(self.tokens),
            prompt_len=self.prompt_len,
            params=self.spec.params,
            seed=self.seed,
            stop_ids=tuple(sorted(self.stop_ids)),
            bad_word_ids=self.spec.bad_word_ids,
            target_cached=self.target.computed,
            draft_cached=self.draft.computed,
            proposer=self.proposer,
        )
