"""One request as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from outrider.scheduler.params import SamplingParams
from outrider.scheduler.pool import ROOT
from outrider.scheduler.types import NOBODY, FinishReason, RowInit

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

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.announced = 0  # blocks the workers know of
        self.computed = 0
        self.planned = 0
        self.published = 0  # tokens whose blocks were offered to the prefix cache
        self.node = ROOT

    def take_prefix(self, blocks: list[int], node: int, block_size: int) -> None:
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
    """State of one sample of one request; `tokens` are prompt plus committed output."""

    __slots__ = (
        "arrival_s",
        "bad_word_ids",
        "behind",
        "deadline_s",
        "depth",
        "draft",
        "drafts_in_flight",
        "followers",
        "generation",
        "in_flight",
        "in_prompt",
        "is_watched",
        "key",
        "max_len",
        "missing_blocks",
        "num_cached",
        "num_preemptions",
        "params",
        "prompt_len",
        "prompt_logprobs_sent",
        "proposer",
        "request_id",
        "row",
        "seed",
        "state",
        "stop_ids",
        "target",
        "tokens",
        "upper",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_len: int,
        arrival_s: float,
        output_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
        deadline_s: float | None = None,
        proposer: str = NOBODY,
        depth: int = 0,
    ) -> None:
        """`max_len` bounds prompt plus output; `output_ids` resume a request that has some."""
        self.request_id = request_id
        self.tokens = [*prompt_ids, *output_ids]
        self.prompt_len = len(prompt_ids)
        self.params = params
        self.seed = seed
        self.max_len = max_len
        self.arrival_s = arrival_s
        self.stop_ids = frozenset(stop_ids)
        self.bad_word_ids = tuple(tuple(word) for word in bad_word_ids)
        self.key = (arrival_s, 0)  # the place in the queue, set when it is added
        self.deadline_s = deadline_s
        self.is_watched = False  # by those who mind deadlines
        self.proposer = proposer if depth > 0 else NOBODY
        self.depth = depth if proposer else 0
        self.followers: list[Request] = []
        self.state = State.WAITING
        self.num_preemptions = 0
        self.num_cached = 0
        self.missing_blocks = (0, 0)  # when it was last refused a row, and how much was cached then
        self.row = -1
        self.generation = 0
        self.in_flight = 0  # plans under way that name it
        self.drafts_in_flight = 0  # of these: those that use the draft's KV to draft
        self.behind = 0  # see `most_behind`
        self.in_prompt = True  # until the chunk with its last known token is planned
        self.prompt_logprobs_sent = 0
        self.target = Holding()
        self.draft = Holding()
        self.upper = len(self.tokens)  # length if every draft in flight is accepted

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
        wanted = self.params.prompt_logprobs is not None
        return not wanted or self.prompt_logprobs_sent >= self.prompt_len - 1

    def until_end(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The part of newly committed `tokens` that belongs to the text, and why it ends there."""
        room = self.max_len - len(self.tokens)
        if self.stop_ids and not self.stop_ids.isdisjoint(tokens):
            free = self.prompt_len + self.params.min_tokens - len(self.tokens)
            for index, token in enumerate(tokens[:room]):
                if token in self.stop_ids and index >= free:
                    return tokens[: index + 1], FinishReason.STOP
        if len(tokens) >= room:
            return tokens[:room], FinishReason.LENGTH
        return tokens, None

    def forget_kv(self) -> None:
        self.target = Holding()
        self.draft = Holding()
        self.row = -1

    def row_init(self) -> RowInit:
        return RowInit(
            row=self.row,
            generation=self.generation,
            request_id=self.request_id,
            token_ids=tuple(self.tokens),
            prompt_len=self.prompt_len,
            params=self.params,
            seed=self.seed,
            stop_ids=tuple(sorted(self.stop_ids)),
            bad_word_ids=self.bad_word_ids,
            target_cached=self.target.computed,
            draft_cached=self.draft.computed,
        )
