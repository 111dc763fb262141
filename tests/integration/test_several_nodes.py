"""A replica on several Ray nodes: who is placed where, what is written, and what a lost node or
another draft costs, which is no token."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import shorten
from ray_nodes import Kept, Loop, Nodes, Reader, kept_replica

from outrider import LLM, SamplingParams
from outrider.cluster.errors import ClusterError, PlacementError
from outrider.cluster.ray.node_assignment import Need
from outrider.cluster.ray.placement import place
from outrider.config import EngineConfig
from outrider.scheduler.types import RequestSpec

pytestmark = [pytest.mark.ray, pytest.mark.model]

PROMPT = (5, 9, 11, 40)
LENGTH = 700


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """One with room for two ranks, and two for drafts."""
    nodes = Nodes()
    try:
        nodes.add("large", 2)
        nodes.add("small", 1, pool="drafts")
        nodes.add("spare", 1, pool="drafts")
        yield nodes
    finally:
        nodes.close()


def _config(pair: Any, nodes: Nodes, **options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(
        model=str(pair.target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        deterministic=True,
        kv_cache_gb=0.02,
        max_num_seqs=4,
        max_model_len=1000,
        num_threads=1,
        log_level="error",
        ray_address=nodes.address,
        placement_timeout_s=30,
        **options,
    )


@pytest.fixture(scope="module")
def kept(loop: Loop, nodes: Nodes, pair: Any) -> Iterator[Kept]:
    config = _config(pair, nodes, tensor_parallel_size=2, draft_labels=("pool=drafts",))
    with kept_replica(loop, config) as kept:
        yield kept


def _reader(kept: Kept, num_tokens: int, **params: Any) -> Reader:
    asked = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)
    spec = RequestSpec(
        PROMPT, asked, seed=11, max_len=len(PROMPT) + num_tokens, proposer="draft", depth=2
    )
    return Reader(kept, spec, params.get("n", 1))


def _with_draft(kept: Kept, model: Path) -> EngineConfig:
    draft = dataclasses.replace(kept.config.draft, model=str(model))
    return dataclasses.replace(kept.config, draft=draft)


RICH = {"n": 2, "temperature": 0.9, "seed": 11, "frequency_penalty": 0.2, "logprobs": 1}


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def test_each_role_is_on_the_nodes_its_labels_and_size_allow(kept: Kept, nodes: Nodes) -> None:
    assert kept.nodes_of("target", nodes) == ["large", "large"]
    assert kept.nodes_of("draft", nodes)[0] in ("small", "spare")
    assert kept.replica is not None and kept.replica.endpoint is not None
    assert kept.replica.endpoint.tcp is not None


def test_what_is_written_on_several_nodes_is_what_one_process_writes(
    loop: Loop, kept: Kept, engine: Any
) -> None:
    llm: LLM = engine()
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    [expected] = llm.generate([list(PROMPT)], params, use_tqdm=False)
    found = loop.run(_reader(kept, 60, temperature=0.0).run())
    assert found == [list(expected.outputs[0].token_ids)]


def test_no_room_is_told_by_node_and_label(loop: Loop, kept: Kept) -> None:
    need = Need("draft", 2, {"CPU": 1.0}, {"pool": "drafts"})
    with pytest.raises(PlacementError) as told:
        loop.run(place([need], 2.0, can_grow=True))
    assert "draft: 2 ranks need 1 CPU each, 2 CPUs in all on nodes labelled pool=drafts" in (
        str(told.value)
    )
    assert "but they have 2 CPUs (1 free)" in str(told.value)
    assert "after 2 s; lower draft.tensor_parallel" in str(told.value)


@pytest.mark.slow
def test_another_draft_takes_over_while_the_target_goes_on(
    loop: Loop, kept: Kept, pair: Any, tokenizer: Any, tmp_path: Path
) -> None:
    shorten(pair.reference, 1).save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        undisturbed = await _reader(kept, LENGTH, **RICH).run()
        replica = await kept.ready()
        before = replica.pids
        reader = _reader(kept, LENGTH, **RICH)
        reading = asyncio.create_task(reader.run())
        await _until(lambda: reader.num_tokens > 50)
        broken, other = (_with_draft(kept, tmp_path / name) for name in ("nowhere", "short"))
        with pytest.raises(Exception, match="nowhere"):
            await replica.change_draft(broken)
        assert replica.pids == before
        await replica.change_draft(other)
        assert replica.pids["target"] == before["target"]
        assert replica.pids["draft"] != before["draft"]
        found = await reading
        late = _reader(kept, 20, temperature=0.0)
        await late.run()
        assert late.facts is not None
        assert late.facts.settings["draft.model"] == str(tmp_path / "short")
        return undisturbed, found

    undisturbed, found = loop.run(run())
    assert found == undisturbed
    assert kept.num_lives == 1


def test_more_than_the_draft_cannot_be_changed_so(loop: Loop, kept: Kept) -> None:
    replica = loop.run(kept.ready())
    target = dataclasses.replace(kept.config.target, max_model_len=900)
    with pytest.raises(ClusterError, match="more than the draft would change"):
        loop.run(replica.change_draft(dataclasses.replace(kept.config, target=target)))


def test_a_draft_whose_node_is_lost_comes_back_on_another(
    loop: Loop, kept: Kept, nodes: Nodes
) -> None:
    [lost] = kept.nodes_of("draft", nodes)

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        undisturbed = await _reader(kept, LENGTH, **RICH).run()
        reader = _reader(kept, LENGTH, **RICH)
        reading = asyncio.create_task(reader.run())
        await _until(lambda: reader.num_tokens > 50)
        await asyncio.to_thread(nodes.lose, lost)
        found = await reading
        replica = await kept.ready()
        await _until(lambda: "draft back after" in kept.lines)
        assert replica.draft_restarts > 0
        return undisturbed, found

    undisturbed, found = loop.run(run())
    assert found == undisturbed
    assert kept.num_lives == 1
    assert [lost, *kept.nodes_of("draft", nodes)] in (["small", "spare"], ["spare", "small"])
