"""What a target rank computes on a CPU, or under rejection sampling: tokens chosen on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.kernels.ops import Ops
from outrider.links.rank_messages import RankSettings
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.proposers.base import ProposerContext, Proposers, ProposerSettings
from outrider.workers.proposers.registry import build_proposers
from outrider.workers.ranks.mailbox import ReceivedRound
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.rows import RowTable
from outrider.workers.runner import Runner
from outrider.workers.sampling.verify import verification_mode
from outrider.workers.target import LocalTarget

if TYPE_CHECKING:
    from outrider.workers.gpu.link_rings import LinkRings


class TargetPass(Protocol):
    """Verifies a plan: a `LocalTarget`, or a fake."""

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict: ...


class VerifiedStep(NamedTuple):
    """A step that has ended."""

    found: Verdict

    @property
    def is_done(self) -> bool:
        return True

    def outcome(self) -> PackedOutcome:
        return PackedOutcome.of(self.found)

    def verdict(self) -> Verdict:
        return self.found


def target_context(
    runner: Runner, head: HeadRunner | None, ops: Ops, settings: RankSettings
) -> ProposerContext:
    """Of a target rank's own proposers: those without a draft model."""
    rows, verification = RowTable(runner.num_rows), verification_mode(settings.verification)
    own = ProposerSettings(settings.ngram_min, settings.ngram_max)
    return ProposerContext(rows, own, ops, verification, head=head)


class HostTarget:
    """Proposers without a model run here, in every rank: they depend on the text alone. So does a
    head: hidden states are the same in all ranks, bit for bit."""

    def __init__(self, target: TargetPass, proposers: Proposers) -> None:
        self._target = target
        self._proposers = proposers

    @classmethod
    def build(
        cls, runner: Runner, head: HeadRunner | None, ops: Ops, settings: RankSettings
    ) -> HostTarget:
        context = target_context(runner, head, ops, settings)
        target = LocalTarget(context.rows, runner, ops, context.verification)
        return cls(target, build_proposers(context))

    ring_shape = None

    def connect(self, rings: LinkRings | None) -> None:
        """Nothing: messages bring everything."""

    def begin(self, plan: StepPlan) -> Ticket:
        return self._proposers.propose(plan)

    def verify(self, plan: StepPlan, own: Ticket, drafted: ReceivedRound) -> VerifiedStep:
        return VerifiedStep(self._target.verify(plan, drafted.joined_with(own, plan)))

    def observe(self, verdict: Verdict) -> None:
        self._proposers.observe(verdict)
