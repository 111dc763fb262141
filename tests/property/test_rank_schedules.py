"""Real ranks, links and step loop around fake models: whatever is delayed, killed, cut off or hung
at whatever moment, every request gets the text of plain decoding."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from scheduler_tools import Simulation, make_request

from outrider.catalog.proposers import DRAFT
from outrider.engine import rank_workers
from outrider.engine.rank_group import RankGroup
from outrider.engine.rank_workers import RemoteDraft, RemoteTarget
from outrider.engine.step import StepLoop
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.frames import LinkError
from outrider.links.listener import Arrival
from outrider.links.rank_messages import (
    DraftGroupJoined,
    Hello,
    Join,
    LinkOpened,
    ReleaseLink,
    Role,
    StopRank,
)
from outrider.scheduler.ahead import AheadControl
from outrider.scheduler.policies import AHEAD_ON
from outrider.scheduler.request import Request, RequestState
from outrider.scheduler.types import StepPlan, Ticket, Verdict
from outrider.testing.fake_draft import FakeDraft
from outrider.testing.fake_workers import FakeWorkers
from outrider.workers.gpu.link_rings import LinkRings
from outrider.workers.groups.collective import SingleRankGroup
from outrider.workers.proposers.base import Proposers
from outrider.workers.ranks import mailbox
from outrider.workers.ranks.draft import DraftRank
from outrider.workers.ranks.host_draft import HostDraft
from outrider.workers.ranks.host_target import HostTarget
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.mailbox import ProposalLinkError, ReceivedRound
from outrider.workers.ranks.packed_outcome import PackedOutcome
from outrider.workers.ranks.proposal_link import ProposalLink
from outrider.workers.ranks.target import TargetRank

NUM_ROWS = 4
DELAY_S = 0.002
STALL_S = 1.5  # of a hung draft
SEEDS = range(12)
MANY_SEEDS = range(1000, 3000)
DISTURBANCES = ("kill", "cut", "hang", "replace")


class SocketLinks:
    """Opens both ends of proposal links in this process."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._lock = threading.Lock()

    def listen(self, number: int) -> ProposalLink:
        return self._open(number, 0)

    def dial(self, number: int) -> ProposalLink:
        link = self._open(number, 1)
        assert isinstance(link.channel.receive(30), LinkOpened)
        return link

    def _open(self, number: int, side: int) -> ProposalLink:
        with self._lock:
            pair = self._pairs.setdefault(number, socket.socketpair())
        return ProposalLink(number, Channel(pair[side], RANK_CODEC), None)


class SlowTarget:
    """A fake target that takes random times."""

    def __init__(self, workers: FakeWorkers, rng: random.Random) -> None:
        self._workers = workers
        self._rng = rng

    def verify(self, plan: StepPlan, ticket: Ticket) -> Verdict:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.random() * DELAY_S)
        return self._workers.verify(plan, ticket)


class LateStep(NamedTuple):
    """A step whose outcome is known some time after it was enqueued."""

    found: Verdict
    due_s: float

    @property
    def is_done(self) -> bool:
        return time.monotonic() >= self.due_s

    def outcome(self) -> PackedOutcome:
        while not self.is_done:
            time.sleep(1e-4)
        return PackedOutcome.of(self.found)

    def verdict(self) -> Verdict:
        return self.found


class LateTarget:
    """A fake of a target on a GPU: steps end in order, while the next are enqueued."""

    ring_shape = None

    def __init__(self, workers: FakeWorkers, rng: random.Random) -> None:
        self._workers = workers
        self._rng = rng
        self._free_s = 0.0

    def connect(self, rings: LinkRings | None) -> None: ...

    def begin(self, plan: StepPlan) -> Ticket:
        return Ticket(plan.step)

    def verify(self, plan: StepPlan, own: Ticket, drafted: ReceivedRound) -> LateStep:
        verdict = self._workers.verify(plan, Ticket(plan.step, drafted.proposals(plan)))
        begun_s = max(self._free_s, time.monotonic())
        self._free_s = begun_s + self._rng.random() * DELAY_S
        return LateStep(verdict, self._free_s)

    def observe(self, verdict: Verdict) -> None: ...


class RankThread(threading.Thread):
    """A rank's loop, as `run_rank` has it, in a thread."""

    def __init__(self, role: Role) -> None:
        super().__init__(daemon=True)
        near, far = socket.socketpair()
        self.channel = Channel(far, RANK_CODEC, peer="the engine")
        self.inbox = RankInbox(self.channel)
        self.error: Exception | None = None
        self.rank: TargetRank | DraftRank | None = None
        own = Channel(near, RANK_CODEC, peer=f"{role} rank 0")
        arrival = Arrival(Hello(role, 0, 1, 1, "here"), own)
        self.group = RankGroup(role, role, [arrival], lambda line: None, 30.0)
        self.hang = threading.Event()

    def run(self) -> None:
        assert self.rank is not None
        try:
            while not isinstance(message := self.inbox.receive(), StopRank):
                while self.hang.is_set() and not self.channel.is_closed:
                    time.sleep(0.01)
                self.rank.handle(message)
        except (LinkError, ProposalLinkError):
            pass  # its engine is gone, or the other end of its proposal link
        except Exception as error:
            self.error = error
        finally:
            self.channel.close()


@dataclass
class Exchange(Simulation):
    """A simulation whose plans go to ranks."""

    seed: int = 0
    acceptance: float = 0.7
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        Simulation.__init__(self, lag=1, max_num_seqs=NUM_ROWS, num_blocks=200, draft_blocks=200)
        self.scheduler.control.ahead = AheadControl(AHEAD_ON)
        self.scheduler.control.ahead.set_max_branches(8)
        self.links = SocketLinks()
        self.target = RankThread(Role.TARGET)
        self.target.rank = TargetRank(
            *(self.target.channel, self.target.inbox, SingleRankGroup()),
            self.links,  # type: ignore[arg-type]
            self._make_target(random.Random(self.seed + 1)),
            vocab_size=2**31,
        )
        self.target.start()
        self.drafts: list[RankThread] = []
        self.remote_draft = RemoteDraft(self._lose, STALL_S)
        remote_target = RemoteTarget(self.target.group, self.remote_draft, 60.0)
        self.loop = StepLoop(self.scheduler, self.remote_draft, remote_target)
        self.start_draft()

    def _make_target(self, rng: random.Random) -> HostTarget | LateTarget:
        if rng.random() < 0.5:
            return LateTarget(self.workers, rng)
        return HostTarget(SlowTarget(self.workers, rng), Proposers({}))

    def start_draft(self) -> None:
        number = len(self.drafts) + 1
        thread = RankThread(Role.DRAFT)
        rng = random.Random(self.seed + 10 * number)
        draft = FakeDraft(self.workers.model, NUM_ROWS, rng, self.acceptance, DELAY_S)
        thread.rank = DraftRank(
            *(thread.channel, thread.inbox, SingleRankGroup()),
            self.links,  # type: ignore[arg-type]
            HostDraft(draft),
        )
        self.drafts.append(thread)
        thread.start()
        for group in (self.target.group, thread.group):
            group.send(Join(number))
        assert isinstance(thread.group.answer(30.0), DraftGroupJoined)
        self.remote_draft.join(thread.group, number)

    def disturb(self, what: str) -> None:
        draft = self.drafts[-1]
        assert isinstance(draft.rank, DraftRank)
        link = draft.rank._mailbox._link
        if what == "kill":
            draft.channel.close()
            if link is not None:
                link.close()
        elif what == "cut" and link is not None:
            link.close()
        elif what == "hang":
            draft.hang.set()
        elif what == "replace":
            self.start_draft()

    def close(self) -> None:
        self.target.group.stop()
        for draft in self.drafts:
            draft.channel.close()
        for thread in (self.target, *self.drafts):
            thread.join(30)
            assert not thread.is_alive() and thread.error is None, thread.error

    def _lose(self, link: int, reason: str | None) -> None:
        self.target.group.send_to_first(ReleaseLink(link))
        if reason is not None:
            self.lost.append(reason)

    def _check_counters(self, request: Request) -> None:
        """The target counts KV as the scheduler does; the draft checks its own."""
        if request.state is RequestState.RUNNING and not request.in_flight:
            computed = self.workers.target_kv.computed
            assert computed.get(request.row, request.target.computed) == request.target.computed


@contextlib.contextmanager
def exchange(seed: int, **options: Any) -> Iterator[Exchange]:
    found = Exchange(seed=seed, **options)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_WAIT_S", 0.1)
    monkeypatch.setattr(rank_workers, "_FIRST_FACTOR", 1.0)
    monkeypatch.setattr(rank_workers, "_UNKNOWN_TOKEN_S", 0.0)


def run_schedule(seed: int) -> None:
    """Requests come and go while drafts are lost and come back; `drain` checks the texts."""
    rng = random.Random(seed)
    with exchange(seed, acceptance=rng.choice([0.0, 0.7, 1.0])) as sim:
        num_disturbed = 0
        for turn in range(rng.randint(20, 60)):
            if rng.random() < 0.25:
                prompt = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
                proposer = DRAFT if rng.random() < 0.9 else ""
                depth = rng.randint(1, 5) if proposer else 0
                request = make_request(
                    f"r{turn}", prompt, rng.randint(1, 20), proposer=proposer, depth=depth
                )
                sim.add(request)
            if sim.live and rng.random() < 0.05:
                sim.cancel(rng.choice(sorted(sim.live)))
            if rng.random() < 0.06 and num_disturbed < 3:
                sim.disturb(rng.choice(DISTURBANCES))
                num_disturbed += 1
            if sim.remote_draft.group is None and rng.random() < 0.3:
                sim.start_draft()
            sim.step()
        sim.drain()
        assert len(sim.lost) <= num_disturbed, sim.lost


@pytest.mark.parametrize("seed", SEEDS)
def test_texts_are_those_of_plain_decoding_whatever_happens_to_drafts(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(MANY_SEEDS.start, MANY_SEEDS.stop, 100))
def test_texts_are_those_of_plain_decoding_over_many_schedules(first: int) -> None:
    for seed in range(first, first + 100):
        run_schedule(seed)


def test_drafts_are_accepted_and_a_round_is_ahead_of_the_verdict_before_it() -> None:
    with exchange(1, acceptance=1.0) as sim:
        record = sim.add(make_request("a", [1, 2, 3], 60, proposer=DRAFT, depth=4))
        sim.drain()
        assert record.num_accepted > 30 and not sim.lost
        assert sim.remote_draft.num_rounds > 5


@pytest.mark.parametrize("what", ["kill", "cut", "hang"])
def test_a_lost_draft_costs_its_proposals_only(what: str) -> None:
    with exchange(2) as sim:
        sim.add(make_request("a", [1, 2, 3], 80, proposer=DRAFT, depth=3))
        for _ in range(8):
            sim.step()
        sim.disturb(what)
        while sim.remote_draft.group is not None and sim.scheduler.has_work:
            sim.step()
        assert len(sim.lost) == 1
        sim.start_draft()
        before = sim.records["a"].num_accepted
        sim.drain()
        assert sim.records["a"].num_accepted > before
