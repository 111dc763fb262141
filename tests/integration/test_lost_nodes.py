"""What a replica cannot go on without is lost or hangs: it is started anew where there is room, and
requests under way get the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import Kept, Loop, Nodes, Reader, kept_replica

from outrider import SamplingParams
from outrider.cluster.errors import ClusterError
from outrider.config import EngineConfig
from outrider.scheduler.types import RequestSpec

pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
]

PROMPT = (5, 9, 11, 40)
LENGTH = 400
PARAMS = SamplingParams(
    n=2,
    temperature=0.9,
    seed=11,
    frequency_penalty=0.2,
    logprobs=1,
    max_tokens=LENGTH,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()


def _config(pair: Any, nodes: Nodes, **options: Any) -> EngineConfig:
    defaults = {
        "deterministic": True,
        "kv_cache_gb": 0.02,
        "max_num_seqs": 4,
        "max_model_len": 1000,
        "num_threads": 1,
        "log_level": "error",
        "ray_address": nodes.address,
        "placement_timeout_s": 30,
    }
    return EngineConfig.from_kwargs(model=str(pair.target), **(defaults | options))


def _reader(kept: Kept, *, has_draft: bool) -> Reader:
    proposer, depth = ("draft", 2) if has_draft else ("", 0)
    max_len = len(PROMPT) + LENGTH
    spec = RequestSpec(PROMPT, PARAMS, seed=11, max_len=max_len, proposer=proposer, depth=depth)
    return Reader(kept, spec, PARAMS.n)


def _written(
    loop: Loop, kept: Kept, disturb: Callable[[], None], *, has_draft: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """What an undisturbed run writes, and what one does that is disturbed under way."""

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        undisturbed = await _reader(kept, has_draft=has_draft).run()
        reader = _reader(kept, has_draft=has_draft)
        reading = asyncio.create_task(reader.run())
        while reader.num_tokens < 50:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(disturb)
        return undisturbed, await reading

    return loop.run(run(), 240.0)


def test_a_target_across_two_nodes_is_placed_anew_on_what_is_left(
    loop: Loop, nodes: Nodes, pair: Any
) -> None:
    # Without our kernels the ranks do not meet in memory, which these nodes have in common.
    config = _config(pair, nodes, tensor_parallel_size=2, cpu_kernels="torch")
    with nodes.some(one=1, other=1), kept_replica(loop, config) as kept:
        assert sorted(kept.nodes_of("target", nodes)) == ["one", "other"]
        nodes.add("third", 1)
        undisturbed, found = _written(loop, kept, lambda: nodes.lose("one"), has_draft=False)
        assert found == undisturbed
        assert sorted(kept.nodes_of("target", nodes)) == ["other", "third"]
        assert kept.num_lives == 2


def test_a_replica_that_loses_the_node_of_all_goes_on_at_another(
    loop: Loop, nodes: Nodes, pair: Any
) -> None:
    config = _config(pair, nodes, draft_model=str(pair.draft), speculation_policy="fixed")
    with nodes.some(one=2), kept_replica(loop, config) as kept:
        nodes.add("other", 2)
        undisturbed, found = _written(loop, kept, lambda: nodes.lose("one"), has_draft=True)
        assert found == undisturbed
        assert kept.nodes_of("target", nodes) == kept.nodes_of("draft", nodes) == ["other"]


@pytest.fixture(scope="module")
def kept(loop: Loop, nodes: Nodes, pair: Any) -> Iterator[Kept]:
    config = _config(
        pair, nodes, draft_model=str(pair.draft), speculation_policy="fixed", stall_timeout_s=3
    )
    with nodes.some(first=2), kept_replica(loop, config) as kept:
        yield kept


@pytest.mark.parametrize("who", ["target", "engine"])
def test_who_hangs_is_replaced(loop: Loop, kept: Kept, who: str) -> None:
    replica, num_lives = loop.run(kept.ready()), kept.num_lives
    [process] = [each for each in replica.processes(0) if each.role == who]
    pid = process.place.pid
    undisturbed, found = _written(loop, kept, lambda: os.kill(pid, signal.SIGSTOP), has_draft=True)
    assert found == undisturbed
    assert kept.num_lives == num_lives + 1
    assert "hang" in kept.reasons[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_draft_that_does_not_load_brings_the_one_before_back(
    loop: Loop, kept: Kept, pair: Any, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"  # its weights are another model's, which loading finds out
    shutil.copytree(pair.draft, damaged)
    shape = json.loads((damaged / "config.json").read_text())
    shape["intermediate_size"] *= 2
    (damaged / "config.json").write_text(json.dumps(shape))
    draft = dataclasses.replace(kept.config.draft, model=str(damaged))
    replica = loop.run(kept.ready())
    before = replica.pids
    with pytest.raises(ClusterError, match=r"do not belong together.*the previous one is back\.$"):
        loop.run(replica.change_draft(dataclasses.replace(kept.config, draft=draft)), 200.0)
    assert replica.pids["target"] == before["target"]
    assert replica.pids["draft"] != before["draft"]
    status = replica.status
    assert status is not None
    assert [each.state for each in status.ranks if each.role == "draft"] == ["ready"]


def test_a_checkpoint_that_is_missing_on_a_node_names_it(
    loop: Loop, nodes: Nodes, pair: Any
) -> None:
    settings = _config(pair, nodes).to_settings() | {"target.model": "/no/such/model"}
    told = r"target rank 0 failed: on node \S+: model '/no/such/model'"
    with (
        nodes.some(lonely=1),
        pytest.raises(ClusterError, match=told),
        kept_replica(loop, EngineConfig.from_settings(settings)),
    ):
        pass
