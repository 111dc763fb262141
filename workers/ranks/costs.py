"""What a rank says its passes take: timed now, or known from a start before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from outrider.kernels.ops import Ops
from outrider.links.rank_messages import RankSettings, Ready, Role
from outrider.scheduler.costs import StepCosts
from outrider.stages import stage
from outrider.workers.costs import (
    are_alike,
    measure_draft,
    measure_drafting,
    measure_head,
    measure_target,
)
from outrider.workers.costs_kept import KeptCosts
from outrider.workers.groups.collective import Collective
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.runner import Runner

# Sizes that are timed to see whether tables still hold. The start of a server waits for it, and
# what is wrong all the same is put right by the steps themselves.
_PROBES, _DRAFT_PROBES = 2, 1


@dataclass(frozen=True, slots=True)
class RankCosts:
    """All ranks of a group run the same passes, since none can run one alone; the first one tells
    what they took, and knows what was kept."""

    role: str
    group: Collective
    runner: Runner
    ops: Ops
    head: HeadRunner | None

    def tell(self, secret: str, settings: RankSettings) -> Ready:
        with stage("timing passes"):
            return self._found(secret, settings)

    def _found(self, secret: str, settings: RankSettings) -> Ready:
        if self.runner.device.type != "cpu":
            return self._measure()
        runner = self.runner
        sizes = (runner.num_rows, runner.max_model_len, runner.decoder.spec)
        share = (self.group.size, torch.get_num_threads(), self.ops.name)
        kept = KeptCosts(secret, self.role, settings, sizes, share)
        found = kept.read() if self.group.rank == 0 else None
        costs = None if found is None else found.costs
        # Of a server that is gone they may be wrong: something may have been in its way.
        if not self._any(costs is not None):
            return self._measure_and_keep(kept)
        is_sure = self._any(found is not None and found.is_own)
        if not is_sure and not self._still_takes(costs):
            return self._measure_and_keep(kept)
        if costs is None:
            return Ready()
        if not is_sure:
            kept.write(costs)
        return self._told(costs)

    def _any(self, is_so: bool) -> bool:
        return bool(self.group.all_gather(torch.tensor([float(is_so)])).any())

    def _still_takes(self, costs: StepCosts | None) -> bool:
        """Whether a few passes take what these say, which the first rank has."""
        if self.role == Role.TARGET:
            verify = measure_target(self.runner, self.ops, self.head, num_sizes=_PROBES)
            return self._any(costs is not None and are_alike(verify, costs.verify))
        first, following = measure_drafting(self.runner, self.ops, num_sizes=_DRAFT_PROBES)
        return self._any(
            costs is not None
            and are_alike(first, costs.first_draft)
            and are_alike(following, costs.next_draft)
        )

    def _measure_and_keep(self, kept: KeptCosts) -> Ready:
        ready = self._measure()
        if self.group.rank == 0:
            kept.write_tables(ready.verify, ready.first_draft, ready.next_draft, ready.prefill_s)
        return ready

    def _told(self, costs: StepCosts) -> Ready:
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
