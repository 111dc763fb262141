"""Random users of a simulated scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

from scheduler_tools import PLAIN, Simulation, make_request

from outrider.catalog.proposers import DRAFT, NGRAM
from outrider.errors import CapacityError
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import NO_PROPOSER

WITH_PROMPT_LOGPROBS = SamplingParams(max_tokens=None, prompt_logprobs=1)
WITH_MIN_TOKENS = SamplingParams(max_tokens=None, min_tokens=4)
MAX_LEN = 48


def random_simulation(rng: random.Random, lag: int, head: str | None = None) -> Simulation:
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    largest = -(-MAX_LEN // block_size)
    num_blocks = rng.choice([largest // 2 + 1, largest, largest + 3, 2 * largest, 4 * largest])
    max_num_seqs = rng.choice([1, 2, 8, 8])
    return Simulation(
        num_blocks=num_blocks,
        draft_blocks=rng.choice([0, num_blocks // 3, num_blocks]),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=max_num_seqs + rng.choice([0, 1, 5, 20, 100]),
        lag=lag,
        prefix_caching=rng.random() < 0.7,
        acceptance=[rng.randint(0, 6) for _ in range(rng.randint(1, 12))],
        head=head,
    )


class Crowd:
    """Users of one simulation, as random as they come."""

    def __init__(
        self,
        simulation: Simulation,
        rng: random.Random,
        proposers: Sequence[str] = (NO_PROPOSER, DRAFT, NGRAM),
        tenants: Sequence[str] = (),
    ) -> None:
        """Requests are those of any of the `tenants`, or else of one."""
        self.simulation = simulation
        self._proposers = proposers
        self._tenants = tenants
        self._rng = rng
        self._num_added = 0
        self._openings = [[rng.randint(0, 49) for _ in range(24)] for _ in range(2)]

    def add_one(self) -> None:
        rng = self._rng
        now_s = self.simulation.now_s
        opening = rng.choice(self._openings)[: rng.choice([0, 4, 11, 24])]
        prompt = opening + [rng.randint(0, 49) for _ in range(rng.randint(1, 6))]
        output = [rng.randint(0, 49) for _ in range(rng.choice([0, 0, 0, 5]))]
        length = len(prompt) + len(output)
        longest = rng.choice([MAX_LEN // 2, MAX_LEN])
        max_len = rng.randint(length + 1, max(longest, length + 1))
        priority = rng.choice([0, 0, 0, -1, 2])
        siblings = rng.choice([1, 1, 1, 3])
        proposer, depth = rng.choice(self._proposers), rng.randint(0, 6)
        tenant = rng.choice(self._tenants) if self._tenants else ""
        for index in range(siblings):
            request = make_request(
                f"r{self._num_added}.{index}",
                prompt,
                max_len=max_len,
                output_ids=output,
                seed=index,
                arrival_s=now_s,
                stop_ids=rng.choice([(), (), (1, 2, 3), range(10)]),
                deadline_s=rng.choice([None, None, None, now_s + rng.randint(0, 30)]),
                proposer=proposer,
                depth=depth,
                priority=priority,
                tenant=tenant,
                params=rng.choice([PLAIN, PLAIN, WITH_MIN_TOKENS, WITH_PROMPT_LOGPROBS]),
            )
            first = f"r{self._num_added}.0" if index else None
            try:
                self.simulation.add(request, after=first)
            except CapacityError:
                pool = self.simulation.target_pool
                assert pool.blocks_for(max_len) > pool.num_blocks
        self._num_added += 1

    def cancel_one(self) -> None:
        ids = list(self.simulation.live)
        if ids:
            self.simulation.cancel(self._rng.choice(ids))

    def act(self) -> None:
        """Something, or nothing, between two steps."""
        event = self._rng.choice(["add"] * 6 + ["cancel"] * 2 + ["draft"] + [""] * 8)
        if event == "add":
            for _ in range(self._rng.choice([1, 1, 3])):
                self.add_one()
        elif event == "cancel":
            self.cancel_one()
        elif event == "draft":
            if self.simulation.scheduler.has_draft:
                self.simulation.lose_draft()
            else:
                self.simulation.regain_draft()
