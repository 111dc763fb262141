"""A head in a rank of the target."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, save_checkpoint
from head_checkpoints import save_head
from rank_threads import RANK_SETTINGS
from rendezvous import SECRET, OpenRendezvous

from outrider.kernels.ops import select_ops
from outrider.links.channel import Channel
from outrider.links.codec import RANK_CODEC
from outrider.links.rank_messages import StepPlans, VerifyResult
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.types import NO_PROPOSER, RowInit, RowPlan, SampleId, StepPlan
from outrider.workers.groups.collective import SingleRankGroup
from outrider.workers.heads.loader import load_head
from outrider.workers.heads.runner import HeadRunner
from outrider.workers.models.kv import KVCache
from outrider.workers.ranks.host_target import HostTarget
from outrider.workers.ranks.inbox import RankInbox
from outrider.workers.ranks.proposal_link import LinkOpener
from outrider.workers.ranks.target import TargetRank
from outrider.workers.runner import Runner
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
BLOCK_SIZE = RANK_SETTINGS.block_size
OPS = select_ops(CPU, torch.float32, deterministic=True)
PROMPT = (5, 9, 17, 3, 44, 8)


def _head_runner(folder: Path) -> HeadRunner:
    target = save_checkpoint(folder / "target", num_hidden_layers=4)
    save_head("eagle3", folder / "head", target)
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "ops": OPS}
    decoder = load_model(folder / "target", **options)
    kv = KVCache(decoder.spec, 8, BLOCK_SIZE, torch.float32, CPU)
    runner = Runner(decoder, kv, 1, 32, VOCAB_SIZE)
    head = load_head(folder / "head", decoder.spec, folder / "target", **options)
    return HeadRunner(head, runner)


def test_a_verdict_is_told_before_the_head_goes_over_its_pass(tmp_path: Path) -> None:
    head = _head_runner(tmp_path)
    near, far = socket.socketpair()
    with (
        OpenRendezvous() as board,
        Channel(near, RANK_CODEC) as channel,
        Channel(far, RANK_CODEC) as engine,
    ):
        links = LinkOpener(board.store(), SECRET, CPU, 10.0)
        worker = HostTarget.build(head.target, head, OPS, RANK_SETTINGS)
        rank = TargetRank(
            *(channel, RankInbox(channel), SingleRankGroup()), links, worker, head.target.vocab_size
        )
        known_when_told: list[bool] = []
        send = channel.send

        def watched(message: object) -> None:
            known_when_told.append(bool(head.states.any()))
            send(message)

        channel.send = watched  # type: ignore[method-assign]
        init = RowInit(
            *(0, 1, SampleId(0, 0), PROMPT, len(PROMPT), SamplingParams(temperature=0), 3),
            proposer="eagle3",
        )
        row = RowPlan(0, 1, len(PROMPT), 0, 0, True, NO_PROPOSER, 0, (0, 1), 0, (), 0)
        rank.handle(StepPlans(0, (StepPlan(1, 1, (row,), (init,)),)))
        judged = engine.receive(10)
    assert isinstance(judged, VerifyResult) and len(judged.verdict.rows[0].tokens) == 1
    assert known_when_told == [False]
    assert head.states.any()
