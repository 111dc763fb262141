"""Requests that hold a row and KV blocks: admission, growth, preemption and release.

A request that ends or is preempted while a plan names it is *leaving*: it keeps row and blocks
until that plan has returned, so that no pass in flight ever writes into another request's blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Set

from outrider.scheduler.pool import BlockPool, Node
from outrider.scheduler.request import BlockTable, Request, RequestState
from outrider.scheduler.waiting import WaitingQueue

_DRAFT_HEADROOM = 256
"""Tokens beyond its text that a row's first draft blocks have room for."""


class RunningRequests:
    """Rows and both pools, with the requests that hold them."""

    def __init__(
        self,
        num_rows: int,
        target_pool: BlockPool,
        draft_pool: BlockPool,
        waiting: WaitingQueue,
        with_kv: Set[str],
        needing_next_token: Set[str] = frozenset(),
    ) -> None:
        """`with_kv` names the proposers with KV in the draft pool, `needing_next_token` those that
        keep data beside a token's KV in the target's pool that depends on the next token."""
        self.num_rows = num_rows
        self.target_pool = target_pool
        self.draft_pool = draft_pool
        self.running: list[Request] = []  # by key: the first is served first and preempted last
        self.leaving: set[Request] = set()
        self.released_rows: list[int] = []  # since the last plan
        self.draft_released_rows: list[int] = []  # likewise, of the draft's KV alone
        self.num_preemptions = 0
        self.preempted: set[Request] = set()  # in the step being planned
        self.spare_blocks = 0  # for drafts, in the step being planned
        self._block_size = target_pool.block_size
        self._waiting = waiting
        self._with_kv = with_kv
        self._needing_next_token = needing_next_token
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._generations = [0] * num_rows

    # -- admission and release ---------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Give `request` a row and its cached prefix, if the rest of its text fits as well.

        It must fit beside one more block for each running request: a prompt that would be preempted
        at once is not worth computing.
        """
        pool = self.target_pool
        if not self._free_rows or self._still_lacks_blocks(request):
            return False
        num_free = pool.num_free
        blocks, node = self._cached_prefix(request)
        needed = pool.blocks_for(len(request.tokens) + 1) - len(blocks)
        if needed + len(self.running) > pool.num_free:
            num_idle = num_free - pool.num_free  # cached, without other holders
            pool.release(blocks)
            request.missing_blocks = (needed + num_idle, pool.num_published)
            return False
        request.target.take_prefix(blocks, node, pool.block_size)
        request.num_cached = request.target.computed
        if request.proposer in self._with_kv:
            found = self.draft_pool.match(request.tokens, request.root)
            request.draft.take_prefix(*found, pool.block_size)
        row = self._free_rows.pop()
        self._generations[row] += 1
        request.start(row, self._generations[row])
        request.tenant.num_running += 1
        insort(self.running, request, key=_key)
        return True

    def _cached_prefix(self, request: Request) -> tuple[list[int], Node]:
        pool = self.target_pool
        if not request.may_reuse_prefix:
            return [], request.root
        needs_next_token = request.proposer in self._needing_next_token
        blocks, node = pool.match(request.tokens, request.root, takes_bare=not needs_next_token)
        if blocks and needs_next_token:
            # The head's entry of a block's last token depends on the first token of the next block,
            # which is unknown for the last block found. (A block shared by two texts keeps the
            # entry of the first: drafts may suffer, never the text.)
            node = pool.parent_of(blocks[-1])
            pool.release(blocks[-1:])
            blocks = blocks[:-1]
        return blocks, node

    def _still_lacks_blocks(self, request: Request) -> bool:
        """Whether the blocks it lacked at its last attempt are still lacking, without matching its
        text again: it can have gained no more than was published since."""
        needed, num_published = request.missing_blocks
        gained = self.target_pool.num_published - num_published
        return needed - gained + len(self.running) > self.target_pool.num_free

    def end(self, request: Request, *, was_running: bool) -> None:
        """A running or leaving request has finished."""
        if was_running:
            self._stop(request)
        self.leave(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again and is recomputed."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        self.preempted.add(request)
        self._stop(request)
        request.state = RequestState.PREEMPTED
        self.leave(request)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        tenant = request.tenant
        tenant.num_running -= 1
        if not tenant.num_running:
            tenant.without_row_s = self._waiting.now_s

    def preempt_for(self, first: Request, min_run_s: float, num_tenants: int) -> bool:
        """Free a row for `first`, whose tenant has none. The victim is the least urgent request
        after `first` of the most served tenant with more than its share of rows (of `num_tenants`);
        it has run for `min_run_s`, so that two tenants do not preempt each other in turns.
        """
        now_s, num_running = self._waiting.now_s, len(self.running)
        standing = self._waiting.standing(first)
        victim: Request | None = None
        for request in self.running:  # among equals the last
            owner = request.tenant
            if (
                self._waiting.standing(request) > standing
                and owner.num_running * num_tenants > num_running
                and now_s - request.started_s >= min_run_s
                and (victim is None or owner.service >= victim.tenant.service)
            ):
                victim = request
        if victim is None:
            return False
        self.preempt(victim)
        return True

    def leave(self, request: Request) -> None:
        """Give back row and blocks, now or when the last plan naming the request has returned."""
        if request.in_flight:
            self.leaving.add(request)
            return
        self.leaving.discard(request)
        self.target_pool.release(request.target.blocks)
        self.draft_pool.release(request.draft.blocks)
        self._free_rows.append(request.row)
        self.released_rows.append(request.row)
        if request.row in self.draft_released_rows:
            self.draft_released_rows.remove(request.row)
        request.forget_kv()
        if request.state is RequestState.PREEMPTED:
            request.state = RequestState.WAITING
            request.tenant.num_waiting += 1
            self._waiting.push(request)

    # -- growth -----------------------------------------------------------------------------

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks up to `num_tokens`. If none are free, preempt the last request of the
        most served tenant."""
        pool, held = self.target_pool, request.target.blocks
        missing = pool.blocks_for(num_tokens) - len(held)
        if missing <= 0:
            return True
        while (blocks := pool.allocate(missing)) is None:
            if self.leaving:
                return False  # a verdict will free blocks
            victim = max(reversed(self.running), key=_service)  # the last of several
            self.preempt(victim)
            if victim is request:
                return False
        held += blocks
        return True

    def reserve_lookahead(self, request: Request, num_tokens: int) -> bool:
        """The same from spare blocks: drafts never preempt."""
        size, held = self._block_size, request.target.blocks
        missing = -(-num_tokens // size) - len(held)
        if missing <= 0:
            return True
        lookahead = min(missing, -(-num_tokens // size) - -(-request.upper // size))
        blocks = self.target_pool.allocate(missing) if lookahead <= self.spare_blocks else None
        if blocks is None:
            return False
        self.spare_blocks -= lookahead
        held += blocks
        return True

    def count_spare_blocks(self, short: Iterable[Request]) -> None:
        """Before drafts are planned: the free blocks left after every request's next token or
        prompt. Only requests in `short` may lack blocks for that."""
        size = self.target_pool.block_size
        needed = 0
        for request in short:  # `upper` is the length of a prompt as well
            missing = request.upper - len(request.target.blocks) * size
            if missing > 0:
                needed += -(-missing // size)
        self.spare_blocks = max(self.target_pool.num_free - needed, 0)

    def reserve_draft(self, request: Request, num_tokens: int, depth: int) -> bool:
        """Draft blocks for `num_tokens` more known tokens and the drafts, from what is free.

        The draft's pool may be far smaller than the target's. So a row starts with headroom or not
        at all, and one that cannot grow gives up its draft blocks for good: rows that each hold a
        part would deadlock.
        """
        table, pool = request.draft, self.draft_pool
        if request.is_draft_given_up:
            return False
        planned = table.planned + num_tokens
        end = request.upper + depth - 1 if depth else planned
        missing = -(-end // self._block_size) - len(table.blocks)
        if missing > 0:
            ahead = min(request.max_len, max(request.upper, end) + _DRAFT_HEADROOM)
            num_blocks = -(-ahead // self._block_size) - len(table.blocks)
            is_first = not table.announced
            blocks = pool.allocate(num_blocks)
            if blocks is None and not is_first:
                blocks = pool.allocate(missing)
            if blocks is None:
                if not is_first:
                    self.give_up_draft(request)
                return False
            table.blocks += blocks
        if not depth:
            table.planned = planned
        return True

    def give_up_draft(self, request: Request) -> None:
        """The request decodes plainly from now on; its draft blocks are freed once no plan names
        them."""
        request.is_draft_given_up = True
        if not request.draft_plans_in_flight:
            if request.draft.planned:
                self.draft_released_rows.append(request.row)
            self.draft_pool.release(request.draft.blocks)
            request.draft = BlockTable(request.root)

    def return_lookahead(self, request: Request) -> None:
        """Release blocks beyond the applied text and what plans in flight may add."""
        if request.in_prompt:
            return
        keep = -(-request.upper // self._block_size)
        if len(request.target.blocks) > keep:
            self.target_pool.release(request.target.cut(keep))

    def forget_draft(self) -> None:
        """The draft's KV is lost: release every block held in its pool."""
        self.draft_released_rows.clear()
        for request in (*self.running, *self.leaving):
            self.draft_pool.release(request.draft.blocks)
            request.draft = BlockTable(request.root)
            request.behind = request.upper
        self.draft_pool.forget_published()

    def resize_draft(self, pool: BlockPool) -> None:
        """Switch to the pool of a new draft, which is empty."""
        self.forget_draft()
        self.draft_pool = pool

    def publish(self, request: Request) -> None:
        """Publish newly completed blocks of applied text in the prefix caches."""
        target, draft = request.target, request.draft
        if target.computed - target.published >= self._block_size:
            needing_next_token = self._needing_next_token
            is_bare = bool(needing_next_token) and request.proposer not in needing_next_token
            self._publish(self.target_pool, target, request.tokens, is_bare)
        if draft.computed - draft.published >= self._block_size:
            self._publish(self.draft_pool, draft, request.tokens)

    def _publish(
        self, pool: BlockPool, table: BlockTable, tokens: list[int], is_bare: bool = False
    ) -> None:
        size = self._block_size
        if not pool.prefix_caching:
            return
        complete = min(table.computed, len(tokens))  # a stop may cut text after it was computed
        for start in range(table.published, complete - size + 1, size):
            block = table.blocks[start // size]
            own = tokens[start : start + size]
            table.node = pool.publish(block, table.node, own, is_bare=is_bare)
            table.published = start + size

    def check_integrity(self) -> None:
        """Every block and every row is accounted for; AssertionError if not."""
        holders = [*self.running, *self.leaving]
        self.target_pool.check_integrity(request.target.blocks for request in holders)
        self.draft_pool.check_integrity(request.draft.blocks for request in holders)
        rows = [*self._free_rows, *(request.row for request in holders)]
        assert sorted(rows) == list(range(self.num_rows)), f"rows lost: {rows}"


def _service(request: Request) -> int:
    return request.tenant.service


def _key(request: Request) -> tuple[float, int]:
    return request.key
