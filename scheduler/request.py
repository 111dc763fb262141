"""One sample of a request as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from outrider.scheduler.hazards import RowLuck
from outrider.scheduler.pool import ROOT, Node
from outrider.scheduler.tenants import Tenant
from outrider.scheduler.types import NOBODY, Apart, FinishReason, RequestSpec, RowInit, SampleId

NO_BLOCKS: tuple[int, ...] = ()


class State(IntEnum):
    PARKED = 0  # waits for a sibling's prompt
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3  # its blocks go back, and it waits again, once no plan in flight names it
    FINISHED = 4


class Holding:
    """What a request holds in one pool: its block table and how much of it is computed.

    `computed` counts applied tokens with KV; `planned` adds the most that plans under way compute.
    """

    __slots__ = ("announced", "blocks", "computed", "node", "planned", "published")

    def __init__(self, root: Node) -> None:
        """`root` is what its first block follows."""
        self.blocks: list[int] = []
        self.announced = 0  # blocks the workers know of
        self.computed = 0
        self.planned = 0
        self.published = 0  # tokens whose blocks were offered to the prefix cache
        self.node = root

    def take_prefix(self, blocks: list[int], node: Node, block_size: int) -> None:
        self.blocks = blocks
        self.node = node
        self.published = self.computed = self.planned = len(blocks) * block_size

    def announce(self) -> tuple[int, tuple[int, ...]]:
        """Where the workers' table goes on, and the blocks it goes on with."""
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
    reads of its `spec` is held here as well."""

    __slots__ = (
        "apart",
        "arrival_s",
        "behind",
        "deadline_s",
        "depth",
        "draft",
        "draft_plans_in_flight",
        "drafts_in_flight",
        "followers",
        "generation",
        "in_flight",
        "in_prompt",
        "is_depth_fixed",
        "is_draft_given_up",
        "is_watched",
        "key",
        "luck",
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
        log-probabilities of the prompt, are known to the reader of one that is resumed."""
        self.sample_id = sample_id
        self.spec = spec
        self.tokens = [*spec.prompt_ids, *output_ids]
        self.prompt_len = len(spec.prompt_ids)
        self.seed = seed
        self.max_len = spec.max_len
        self.arrival_s = arrival_s
        self.stop_ids = frozenset(spec.stop_ids)
        self.key = (arrival_s, 0)  # the place in the queue, set when it is added
        self.tenant = Tenant(spec.tenant)  # the one known by this name, set when it is added
        self.may_be_displaced = False  # while it waits, by a tenant that has fewer waiting
        self.deadline_s = deadline_s
        self.is_watched = False  # by those who mind deadlines
        self.allow_drafts(True)
        self.is_depth_fixed = spec.is_depth_fixed
        self.apart = Apart.NEVER  # set when it is added
        self.luck = RowLuck()  # what its drafts came to so far
        self.followers: list[Request] = []
        self.state = State.WAITING
        self.num_preemptions = 0
        self.num_cached = 0
        self.queued_s: float | None = None  # until it first got a row; None: it has not
        self.started_s = 0.0  # when it last got a row
        self.missing_blocks = (0, 0)  # when it was last refused a row, and how much was cached then
        self.row = -1
        self.generation = 0
        self.in_flight = 0  # plans under way that name it
        self.drafts_in_flight = 0  # of these: those that use the draft's KV to draft
        self.draft_plans_in_flight = 0  # and those that use it at all
        self.is_draft_given_up = False  # for lack of memory, as long as it has its row
        self.behind = 0  # see `most_behind`
        self.in_prompt = True  # until the chunk with its last known token is planned
        self.prompt_logprobs_sent = prompt_logprobs_sent
        self.root: Node = spec.cache_salt or ROOT  # what its first blocks follow
        self.target = Holding(self.root)
        self.draft = Holding(self.root)
        self.upper = len(self.tokens)  # length if every draft in flight is accepted

    def allow_drafts(self, is_allowed: bool) -> None:
        """Whether it may draft as it wants to, as long as it has the row it is about to get."""
        drafts = is_allowed and self.spec.depth > 0 and self.spec.proposer != NOBODY
        self.proposer = self.spec.proposer if drafts else NOBODY
        self.depth = self.spec.depth if drafts else 0

    def start(self, row: int, generation: int) -> None:
        self.state = State.RUNNING
        self.row = row
        self.generation = generation
        self.in_prompt = True
        self.upper = len(self.tokens)

    @property
    def most_behind(self) -> int:
        """At most so many tokens are without draft KV once all plans in flight are back. After one
        that drafts nobody knows where the draft stands, but how far behind it can be."""
        return self.behind if self.drafts_in_flight else self.upper - self.draft.planned

    @property
    def may_reuse_prefix(self) -> bool:
        """Prompt logprobs need the logits of every prompt token, so they ignore cached KV."""
        wanted = self.spec.params.prompt_logprobs is not None
        return not wanted or self.prompt_logprobs_sent >= self.prompt_len - 1

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
        self.target = Holding(self.root)
        self.draft = Holding(self.root)
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
