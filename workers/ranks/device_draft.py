"""What a draft rank computes on a GPU: see `DraftStep`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.kernels.ops import Ops
from outrider.links.rank_messages import RankSettings, StepBounds
from outrider.scheduler.types import NONE_AHEAD, Agreement, AheadCounts, RowInit, StepPlan
from outrider.workers.gpu.draft_step import DraftStep
from outrider.workers.gpu.link_rings import LinkRings, RingShape
from outrider.workers.gpu.stream_counter import can_wait
from outrider.workers.proposers.base import ProposerSettings
from outrider.workers.ranks.device_target import step_sizes
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.ranks.packed_round import PackedRound, RoundWriter
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode


def build_draft_step(
    runner: Runner, ops: Ops, settings: RankSettings, bounds: StepBounds
) -> DraftStep:
    """Its passes are not captured yet."""
    own = ProposerSettings(settings.ngram_min, settings.ngram_max)
    verification = verification_mode(settings.verification)
    return DraftStep(runner, ops, own, verification, step_sizes(bounds))


class DeviceDraft:
    def __init__(self, step: DraftStep, *, is_alone: bool) -> None:
        """Ranks of a group share outcomes in a collective: they cannot wait on the device."""
        self._step = step
        self._is_alone = is_alone

    @property
    def ring_shape(self) -> RingShape | None:
        return self._step.ring_shape if self._is_alone and can_wait(self._step.device) else None

    def connect(self, rings: LinkRings | None) -> None:
        self._step.connect(rings)

    def adopt(self, epoch: int, rows: Sequence[RowInit]) -> None:
        self._step.adopt(epoch, rows)

    def prepare(self, plan: StepPlan, has_outcome: Callable[[], bool]) -> None:
        self._step.prepare(plan)

    def follow(self, plan: StepPlan) -> None:
        self._step.follow(plan)

    def propose(self, plan: StepPlan) -> PackedRound:
        started = self._step.propose(plan)
        writer = RoundWriter(plan, self._step.base_lens(started.rows))
        return writer.write(started.wait())

    def take_ahead_counts(self) -> AheadCounts:
        return NONE_AHEAD

    def observe(self, outcome: PackedOutcome) -> None:
        self._step.observe(outcome)

    def catch_up(self) -> tuple[float, tuple[Agreement, ...]]:
        found = [each.wait() for each in self._step.catch_up()]
        agreements = tuple(each for _, some in found for each in some)
        return sum(seconds for seconds, _ in found), agreements
