"""The pass costs that a rank reports: timed now, or from the cache of an earlier start."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outrider.kernels.ops import Ops
from outrider.links.rank_messages import RankSettings, Ready, Role
from outrider.progress_stages import stage
from outrider.scheduler.costs import StepCosts
from outrider.workers.costs import (
    are_alike,
    measure_draft,
    measure_drafting,
    measure_head,
    measure_target,
)
from outrider.workers.costs_cache import CostsCache
from outrider.workers.groups.collective import Collective
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.runner import Runner

# Sizes to time when checking cached tables: few, because start-up waits for it. Steps correct the
# tables later.
_PROBES, _DRAFT_PROBES = 2, 1


@dataclass(frozen=True, slots=True)
class RankCosts:
    """All ranks of a group run the same passes, since none can run one alone. The first rank
    reports the costs and reads the cache."""

    role: str
    group: Collective
    runner: Runner
    ops: Ops
    head: HeadRunner | None

    def measure(self, secret: str, settings: RankSettings) -> Ready:
        with stage("timing passes"):
            return self._cached_or_measured(secret, settings)

    def _cached_or_measured(self, secret: str, settings: RankSettings) -> Ready:
        if self.runner.device.type != "cpu":
            return self._measure()
        runner = self.runner
        sizes = (runner.num_rows, runner.max_model_len, runner.decoder.spec)
        share = (self.group.size, torch.get_num_threads(), self.ops.name)
        cache = CostsCache(secret, self.role, settings, sizes, share)
        cached = cache.read() if self.group.rank == 0 else None
        costs = None if cached is None else cached.costs
        # Another server's costs may be wrong: it may have been disturbed while measuring.
        if not self._any(costs is not None):
            return self._measure_and_cache(cache)
        is_trusted = self._any(cached is not None and cached.is_own)
        if not is_trusted and not self._still_holds(costs):
            return self._measure_and_cache(cache)
        if costs is None:
            return Ready()
        if not is_trusted:
            cache.write(costs)
        return self._ready_from(costs)

    def _any(self, condition: bool) -> bool:
        return bool(self.group.all_gather(torch.tensor([float(condition)])).any())

    def _still_holds(self, costs: StepCosts | None) -> bool:
        """Whether a few timed passes agree with the first rank's cached `costs`."""
        if self.role == Role.TARGET:
            verify = measure_target(self.runner, self.ops, self.head, num_sizes=_PROBES)
            return self._any(costs is not None and are_alike(verify, costs.verify))
        first, following = measure_drafting(self.runner, self.ops, num_sizes=_DRAFT_PROBES)
        return self._any(
            costs is not None
            and are_alike(first, costs.first_draft)
            and are_alike(following, costs.next_draft)
        )

    def _measure_and_cache(self, cache: CostsCache) -> Ready:
        ready = self._measure()
        if self.group.rank == 0:
            cache.write_tables(ready.verify, ready.first_draft, ready.next_draft, ready.prefill_s)
        return ready

    def _ready_from(self, costs: StepCosts) -> Ready:
        verify = costs.verify if self.role == Role.TARGET else None
        if self.role == Role.TARGET and self.head is None:
            return Ready(verify)
        return Ready(verify, costs.first_draft, costs.next_draft, costs.prefill_s)

    def _measure(self) -> Ready:
        if self.role == Role.TARGET:
            ready = Ready(verify=measure_target(self.runner, self.ops, self.head))
            if self.head is not None:
                first, following, _ = measure_head(self.head, self.ops)
                ready = replace(ready, first_draft=first, next_draft=following)
        else:
            first, following, prefill_s = measure_draft(self.runner, self.ops)
            ready = Ready(first_draft=first, next_draft=following, prefill_s=prefill_s)
        return ready if self.group.rank == 0 else Ready()
