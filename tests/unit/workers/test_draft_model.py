"""The draft model of one process: when it computes what, and what it says of text it missed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, save_checkpoint
from rank_threads import RANK_SETTINGS, ThreadGroup, run_ranks, same_on_all
from rendezvous import SECRET, OpenRendezvous
from torch import Tensor

from outrider.catalog.proposers import DRAFT
from outrider.kernels.ops import select_ops
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.rank_messages import DraftGroupJoined, DraftReport, Join, StepPlans
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import (
    NO_PROPOSER,
    Agreement,
    Proposal,
    RowInit,
    RowPlan,
    RowVerdict,
    SampleId,
    StepPlan,
    Ticket,
    Verdict,
)
from outrider.workers.groups.collective import Collective, SingleRankGroup
from outrider.workers.models.kv import KVCache
from outrider.workers.models.shard import Shard
from outrider.workers.proposers.base import MAX_REPLAYED_TOKENS, Proposers
from outrider.workers.proposers.draft_model import DraftProposer
from outrider.workers.ranks.draft import DraftRank
from outrider.workers.ranks.host_draft import HostDraft
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.mailbox import TargetMailbox
from outrider.workers.ranks.proposal_link import LinkOpener
from outrider.workers.rows import RowTable
from outrider.workers.runner import RowChunk, Runner
from outrider.workers.sampling.verify import VerificationMode
from outrider.workers.target import LocalTarget
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
BLOCK = RANK_SETTINGS.block_size
OPS = select_ops(CPU, torch.float32, deterministic=True)
GREEDY = SamplingParams(temperature=0)
PROMPT = (5, 9, 17, 3, 44, 8)


class WatchedRunner(Runner):
    """Keeps the chunks of every pass."""

    passes: list[list[RowChunk]]

    def forward(self, chunks: Sequence[RowChunk], *, keep_features: bool = True) -> Tensor:
        self.passes.append(list(chunks))
        return super().forward(chunks, keep_features=keep_features)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    save_checkpoint(folder, "llama")
    return folder


def make_runner(folder: Path, group: Collective | None = None) -> WatchedRunner:
    shard = Shard() if group is None else Shard(group.rank, group.size, group.all_reduce)
    decoder = load_model(folder, dtype=torch.float32, device=CPU, ops=OPS, shard=shard)
    kv = KVCache(decoder.spec, 32, BLOCK, torch.float32, CPU, shard)
    runner = WatchedRunner(decoder, kv, 4, 64, VOCAB_SIZE, group)
    runner.passes = []
    return runner


def make_draft(
    folder: Path, mode: VerificationMode = "shared", group: Collective | None = None
) -> DraftProposer:
    return DraftProposer(RowTable(4), make_runner(folder, group), OPS, mode)


def init(row: int, tokens: Sequence[int], **fields: Any) -> RowInit:
    usual: dict[str, Any] = {
        "generation": 1,
        "prompt_len": len(PROMPT),
        "params": GREEDY,
        "seed": 3,
    }
    values = {**usual, **fields}
    return RowInit(row=row, sample_id=SampleId(0, row), token_ids=tuple(tokens), **values)


def behind(row: int, count: int, blocks: Sequence[int] = (), **fields: Any) -> RowPlan:
    """A row that only catches up."""
    start = fields.pop("draft_start", 0)
    generation = fields.pop("generation", 1)
    return RowPlan(row, generation, 1, 0, 0, True, NO_PROPOSER, 0, (), start, tuple(blocks), count)


def drafting(row: int, depth: int, count: int, blocks: Sequence[int] = ()) -> RowPlan:
    return RowPlan(row, 1, 1, depth, depth, True, DRAFT, 0, (), 0, tuple(blocks), count)


def run(draft: DraftProposer, plan: StepPlan) -> dict[int, Proposal]:
    draft.follow(plan)
    return dict(draft.propose(plan))


def committed(step: int, row: int, base_len: int, *tokens: int, accepted: int = 0) -> Verdict:
    return Verdict(1, step, (RowVerdict(row, 1, base_len, accepted, accepted, accepted, tokens),))


def drafts_after(folder: Path, text: Sequence[int], depth: int) -> Sequence[int]:
    """What the draft says after a text that it computes at once."""
    draft = make_draft(folder)
    plan = StepPlan(1, 1, (drafting(0, depth, len(text), range(10)),), (init(0, text),))
    return run(draft, plan)[0].tokens


def test_a_prompt_is_computed_once_the_outcome_of_its_plan_is_told(folder: Path) -> None:
    draft = make_draft(folder)
    runner: Any = draft.runner
    assert run(draft, StepPlan(1, 1, (behind(0, 6, [0, 1]),), (init(0, PROMPT),))) == {}
    assert runner.passes == []
    assert draft.computed[0] == 6
    draft.observe(committed(1, 0, 6, 30))
    assert runner.passes == []
    found = run(draft, StepPlan(1, 2, (drafting(0, 3, 1, [0, 1, 2]),)))
    assert runner.passes[0] == [RowChunk(0, 0, list(PROMPT))]
    assert found[0].tokens == drafts_after(folder, (*PROMPT, 30), 3)


def test_rows_that_draft_do_not_wait_for_rows_that_catch_up(folder: Path) -> None:
    draft = make_draft(folder)
    runner: Any = draft.runner
    admitted = (init(0, PROMPT), init(1, (*PROMPT, 7)))
    rows = (behind(0, 6, [0, 1]), drafting(1, 2, 7, [2, 3, 4]))
    found = run(draft, StepPlan(1, 1, rows, admitted))
    assert list(found) == [1]
    assert {chunk.row for chunks in runner.passes for chunk in chunks} == {1}


def test_what_a_row_left_in_the_prefix_cache_is_there_though_the_row_has_ended(
    folder: Path,
) -> None:
    """The scheduler counts it as computed with the plan's verdict, and may give it to others."""
    draft = make_draft(folder)
    run(draft, StepPlan(1, 1, (behind(0, 6, [0, 1]),), (init(0, PROMPT),)))
    draft.observe(committed(1, 0, 6, 30))
    text = (*PROMPT[:BLOCK], 1, 2)
    admitted = init(1, text, draft_cached=BLOCK)
    plan = StepPlan(1, 2, (drafting(1, 3, 2, [0, 5, 6]),), (admitted,), released=(0,))
    assert run(draft, plan)[1].tokens == drafts_after(folder, text, 3)


def test_a_plan_that_only_catches_up_may_come_before_the_verdict_of_a_round(folder: Path) -> None:
    draft = make_draft(folder)
    admitted = (init(0, PROMPT), init(1, PROMPT))
    drafts = run(draft, StepPlan(1, 1, (drafting(0, 3, 6, [0, 1, 2]),), admitted))[0].tokens
    run(draft, StepPlan(1, 2, (behind(1, 6, [4, 5]),)))
    draft.observe(committed(1, 0, 6, *drafts[:2], 30, accepted=2))
    assert draft.computed == {0: 8, 1: 6}


def test_adopting_rows_drops_what_was_put_off(folder: Path) -> None:
    draft = make_draft(folder)
    runner: Any = draft.runner
    run(draft, StepPlan(1, 1, (behind(0, 6, [0, 1]),), (init(0, PROMPT),)))
    draft.adopt(1, [init(0, PROMPT)])
    draft.catch_up()
    assert runner.passes == [] and draft.computed == {0: 0}


def test_its_seconds_count_in_the_step_in_which_they_are_spent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(folder)
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    forward = draft.runner.forward

    def slowly(chunks: Sequence[RowChunk]) -> Tensor:
        clock[0] += 2.0
        return forward(chunks)

    monkeypatch.setattr(draft.runner, "forward", slowly)
    proposers = Proposers({DRAFT: draft}, DRAFT)
    first = StepPlan(1, 1, (behind(0, 6, [0, 1]),), (init(0, PROMPT),))
    assert proposers.propose(first).draft_s == 0.0
    assert proposers.propose(StepPlan(1, 2, (behind(0, 0),))).draft_s == 2.0


# -- what it would have guessed -------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9)
OUTPUT = 12


def spoken(folder: Path, params: SamplingParams) -> list[int]:
    """Prompt and output of the draft model itself, but for some tokens it would not have said."""
    worker = LocalTarget(RowTable(4), make_runner(folder), OPS, "shared")
    text = list(PROMPT)
    row = RowPlan(0, 1, len(text), 0, 0, True, NO_PROPOSER, 0, tuple(range(8)), 0, (), 0)
    for step in range(1, OUTPUT + 1):
        told = init(0, text, params=params, generation=step)
        row = row._replace(num_tokens=len(text), generation=step)
        plan = StepPlan(1, step, (row,), (told,), released=() if step == 1 else (0,))
        [token] = worker.verify(plan, Ticket(step)).rows[0].tokens
        text.append(token if step % 4 else (token + 1) % VOCAB_SIZE)
    return text


def agreements(
    folder: Path,
    text: list[int],
    chunks: Sequence[int],
    mode: VerificationMode = "shared",
    group: Collective | None = None,
    **fields: Any,
) -> list[Agreement]:
    draft = make_draft(folder, mode, group)
    found: list[Agreement] = []
    told = (init(0, text, **fields),)
    blocks = range(-(-len(text) // BLOCK))
    for step, count in enumerate(chunks, 1):
        plan = StepPlan(1, step, (behind(0, count, blocks),), told if step == 1 else ())
        run(draft, plan)
        draft.catch_up()
        found += draft.take_agreements()
    assert draft.computed[0] == sum(chunks)
    return found


HITS = tuple(step % 4 != 0 for step in range(1, OUTPUT + 1))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("chunks", [[18], [6, 12], [8, 1, 5, 4], [3, 15]])
def test_it_says_of_every_missed_output_token_whether_it_would_have_guessed_it(
    folder: Path, params: SamplingParams, chunks: list[int]
) -> None:
    text = spoken(folder, params)
    found = agreements(folder, text, chunks, params=params)
    hits = tuple(hit for each in found for hit in each.hits)
    # The pass over a whole prompt guesses nothing, so the token behind it is not known.
    assert hits == (HITS[1:] if chunks[0] == len(PROMPT) else HITS)
    assert {each[:2] for each in found} == {(0, 1)}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_ranks_that_share_a_vocabulary_say_the_same(folder: Path, params: SamplingParams) -> None:
    text = spoken(folder, params)

    def found(group: ThreadGroup) -> list[Agreement]:
        return agreements(folder, text, [8, 10], group=group, params=params)

    told = same_on_all(run_ranks(2, found))
    assert tuple(hit for each in told for hit in each.hits) == HITS


def test_prompt_tokens_say_nothing(folder: Path) -> None:
    assert agreements(folder, list(PROMPT), [6]) == []


def test_no_logits_are_computed_for_prompt_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Tensor:
        raise AssertionError("logits of a prompt")

    monkeypatch.setattr(WatchedRunner, "logits", fail)
    assert agreements(folder, list(PROMPT), [4, 2]) == []


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.2),
        SamplingParams(temperature=0, logit_bias={3: 1.0}),
        SamplingParams(temperature=0, min_tokens=3),
    ],
)
def test_rows_whose_logits_are_changed_say_nothing(folder: Path, params: SamplingParams) -> None:
    text = spoken(folder, GREEDY)
    assert agreements(folder, text, [18], params=params, stop_ids=(2,)) == []
    assert agreements(folder, text, [18], bad_word_ids=((7,),)) == []


def test_in_rejection_mode_only_greedy_rows_say_something(folder: Path) -> None:
    text = spoken(folder, GREEDY)
    assert agreements(folder, text, [18], "rejection", params=SAMPLED) == []
    [found] = agreements(folder, text, [18], "rejection")
    assert found.hits == HITS


def test_a_pass_guesses_no_more_than_the_last_tokens_of_a_row(folder: Path) -> None:
    text = spoken(folder, GREEDY)
    text += [7] * MAX_REPLAYED_TOKENS
    [found] = agreements(folder, text, [len(text)])
    assert len(found.hits) == MAX_REPLAYED_TOKENS


def test_a_verdict_carries_what_was_found(folder: Path) -> None:
    found = (Agreement(2, 5, (True, False)),)
    worker = LocalTarget(RowTable(4), make_runner(folder), OPS, "shared")
    row = RowPlan(0, 1, 6, 0, 0, True, NO_PROPOSER, 0, (0, 1), 0, (), 0)
    plan = StepPlan(1, 1, (row,), (init(0, PROMPT),))
    assert worker.verify(plan, Ticket(1, agreements=found)).agreements == found


# -- over ranks -----------------------------------------------------------------------------------


def test_a_draft_rank_sends_its_round_before_it_catches_up(folder: Path) -> None:
    runner = make_runner(folder)
    near, far = socket.socketpair()
    with (
        OpenRendezvous() as board,
        Channel(near, RANK_CODEC) as channel,
        Channel(far, RANK_CODEC) as engine,
    ):
        inbox, group = RankInbox(channel), SingleRankGroup()
        target = TargetMailbox(group, inbox, CPU, runner.vocab_size)
        own, others = (LinkOpener(board.store(), SECRET, CPU, 10.0) for _ in range(2))
        draft = HostDraft.build(runner, OPS, RANK_SETTINGS, None)
        rank: Any = DraftRank(channel, inbox, group, own, draft)
        met = threading.Thread(target=lambda: target.add(others.listen(1)))
        met.start()
        rank.handle(Join(1))
        met.join(30)
        assert engine.receive(10) == DraftGroupJoined("tcp")
        passes_told: list[int] = []
        send = channel.send

        def watched(message: object) -> None:
            passes_told.append(len(runner.passes))
            send(message)

        channel.send = watched  # type: ignore[method-assign]
        text = spoken(folder, GREEDY)
        admitted = (init(0, PROMPT), init(1, text))
        rows = (drafting(0, 2, 6, [0, 1]), behind(1, len(text), range(3, 8)))
        plan = StepPlan(1, 1, rows, admitted)
        post = rank._mailbox.post

        def posted(*args: Any) -> None:
            passes_told.append(len(runner.passes))
            post(*args)

        rank._mailbox.post = posted
        rank.handle(StepPlans(1, (plan,)))
        target.use(1)
        assert target.take(plan).proposals(plan)[0].tokens == text[6:8]
        report = engine.receive(10)
        target.use(0)
    assert isinstance(report, DraftReport) and report.step == 1
    assert report.caught_up_s > 0
    assert report.agreements == (Agreement(1, 1, HITS),)
    assert passes_told == [2, 3], "two passes of the round, then what was put off"


# -- selection ------------------------------------------------------------------------------------


def test_the_target_verifies_the_likeliest_drafts_and_says_how_many_there_were(
    folder: Path,
) -> None:
    text = spoken(folder, GREEDY)
    right = text[6:9]  # the model's own first three tokens
    worker = LocalTarget(RowTable(4), make_runner(folder), OPS, "shared")
    rows = tuple(
        RowPlan(row, 1, 6, 3, 3, True, DRAFT, 0, blocks, 0, (), 1)
        for row, blocks in enumerate([(0, 1, 2), (3, 4, 5)])
    )
    plan = StepPlan(1, 1, rows, (init(0, PROMPT), init(1, PROMPT)), num_selected=3)
    proposals = {
        0: Proposal(1, 6, right, [0.5, 0.9, 0.9]),
        1: Proposal(1, 6, right, [0.9, 0.8, 0.1]),
    }
    verdict = worker.verify(plan, Ticket(1, proposals))
    counts = [(row.num_drafted, row.num_verified, row.num_accepted) for row in verdict.rows]
    assert counts == [(3, 1, 1), (3, 2, 2)]
    assert [list(row.tokens) for row in verdict.rows] == [text[6:8], text[6:9]]
