"""Tensor-parallel groups in shared memory: how ranks meet, what they exchange, how they part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import make_ops, skip_without_compiler
from checkpoints import RaggedRun, random_prompt, save_checkpoint
from rendezvous import SECRET, OpenRendezvous

from outrider import LLM, SamplingParams
from outrider.kernels.cpu.ops import CpuOps
from outrider.workers.device import Placement
from outrider.workers.groups import shared_memory
from outrider.workers.groups.collective import SingleRankGroup
from outrider.workers.groups.process_group import (
    TensorParallelGroup,
    shard_of,
    tensor_parallel_group,
)
from outrider.workers.groups.shared_memory import SharedMemoryGroup, meet_in_memory
from outrider.workers.weights.loader import load_model

SIZE = 3
CPU = torch.device("cpu")
MEMORY = "/memfd:outrider-tensor-parallel"

# One rank: says what it exchanged, then waits for a rank that will not come.
RANK = """
import json, sys, time, torch
from outrider.workers.groups.link_store import LinkStore
from outrider.workers.groups.process_group import tensor_parallel_group
from outrider.workers.device import place
store = LinkStore(sys.argv[1], sys.argv[2], 60.0)
rank, size = int(sys.argv[3]), int(sys.argv[4])
placement = place("cpu", "float32", "auto", False, "target")
group = tensor_parallel_group(store, "ranks", rank, size, placement, False)
scores = torch.tensor([[0.1 + rank, -1e300], [2**53 - rank, 3]], dtype=torch.float64)
ids = torch.tensor([10 * rank, 2**62 + rank])
rows = torch.zeros(2, 3, dtype=torch.int64).t() + rank
group.broadcast(rows, 2)
said = {
    "kind": type(group).__name__,
    "gathered": group.all_gather(scores).tolist(),
    "transposed": group.all_gather(torch.arange(6).view(2, 3).t() + rank).tolist(),
    "bools": group.all_gather(torch.tensor([rank == 1])).tolist(),
    "empty": list(group.all_gather(torch.empty(0, 4)).shape),
    "rows": rows.tolist(),
    "float32": group.all_reduce(torch.full((2, 2), 0.1 * (rank + 1))).tolist(),
    "int64": group.all_reduce(ids).tolist(),
    "bfloat16": group.all_reduce(torch.full((2,), 1.5 + rank, dtype=torch.bfloat16)).tolist(),
}
print(json.dumps(said), flush=True)
if rank == size - 1:
    time.sleep(60)
try:
    group.all_reduce(torch.ones(4))
except RuntimeError as error:
    print(json.dumps(str(error)), flush=True)
"""


class Ranks:
    """Rank processes; what each said, and what it said once the last one was killed."""

    def __init__(self) -> None:
        with OpenRendezvous() as board:
            self._run(board.address)

    def _run(self, address: str) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, address, SECRET, str(rank), str(SIZE)],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(SIZE)
        ]
        try:
            self.said: list[dict[str, Any]] = [self._line(rank) for rank in range(SIZE)]
            self.maps = Path(f"/proc/{self._processes[0].pid}/maps").read_text()
            start_s = time.monotonic()
            self._processes[-1].send_signal(signal.SIGKILL)
            self.last_words: list[str] = [self._line(rank) for rank in range(SIZE - 1)]
            self.notice_s = time.monotonic() - start_s
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    def _line(self, rank: int) -> Any:
        output = self._processes[rank].stdout
        assert output is not None
        return json.loads(output.readline())


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    skip_without_compiler()
    return Ranks()


def test_ranks_of_one_host_meet_in_shared_memory(ranks: Ranks) -> None:
    assert [said["kind"] for said in ranks.said] == ["SharedMemoryGroup"] * SIZE


def test_every_dtype_is_gathered_in_rank_order(ranks: Ranks) -> None:
    for said in ranks.said:
        assert said["gathered"] == [[[0.1 + r, -1e300], [2**53 - r, 3]] for r in range(SIZE)]
        assert said["transposed"] == [
            [[r, 3 + r], [1 + r, 4 + r], [2 + r, 5 + r]] for r in range(3)
        ]
        assert said["bools"] == [[False], [True], [False]]
        assert said["empty"] == [SIZE, 0, 4]


def test_a_broadcast_fills_tensors_that_are_not_dense(ranks: Ranks) -> None:
    assert [said["rows"] for said in ranks.said] == [[[2, 2]] * 3] * SIZE


def test_every_dtype_is_summed(ranks: Ranks) -> None:
    tenths = [torch.tensor(0.1 * (rank + 1)) for rank in range(SIZE)]
    total = float(tenths[0] + tenths[1] + tenths[2])
    for said in ranks.said:
        assert said["float32"] == [[total] * 2] * 2
        assert said["int64"] == [30, torch.tensor([2**62 + r for r in range(SIZE)]).sum().item()]
        assert said["bfloat16"] == [7.5, 7.5]


def test_the_memory_has_no_name_that_could_be_left_behind(ranks: Ranks) -> None:
    assert f"{MEMORY} (deleted)" in ranks.maps


def test_a_killed_rank_is_an_error_for_the_others_at_once(ranks: Ranks) -> None:
    for words in ranks.last_words:
        assert words == "all-reduce: Another rank of the tensor-parallel group has exited."
    assert ranks.notice_s < 20


class FakeBoard:
    """A store for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=30)
            return self._values[key].encode()


def c_ops() -> CpuOps:
    ops = make_ops("c")
    assert isinstance(ops, CpuOps)
    return ops


def met(all_ops: list[CpuOps | None]) -> list[SharedMemoryGroup | None]:
    """What threads get as ranks, given the kernels each has."""
    board, size = FakeBoard(), len(all_ops)
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(lambda rank: meet_in_memory(board, rank, size, all_ops[rank], 30), range(size))
        )


@pytest.mark.parametrize("without", [0, 1, 2])
def test_one_rank_without_kernels_keeps_all_of_them_from_sharing(without: int) -> None:
    every = [None if rank == without else c_ops() for rank in range(SIZE)]
    assert met(every) == [None] * SIZE


@pytest.mark.parametrize("difference", ["_host", "_identity"])
def test_ranks_that_see_different_memory_do_not_share(
    difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(range(100))
    monkeypatch.setattr(shared_memory, difference, lambda *_: next(answers))
    assert met([c_ops(), c_ops()]) == [None, None]


def offered(descriptor: int, **changes: Any) -> dict[str, Any]:
    """An offer of this process."""
    return shared_memory._offer(descriptor) | changes


@pytest.mark.parametrize("kind", ["a file", "memory of another name", "memory open to others"])
def test_nothing_but_private_memory_made_for_this_is_mapped(tmp_path: Path, kind: str) -> None:
    num_bytes = 4096
    name = "outrider-tensor-parallel"
    if kind == "a file":
        descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    else:
        descriptor = os.memfd_create("other" if kind == "memory of another name" else name)
        os.fchmod(descriptor, 0o666 if kind == "memory open to others" else 0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
        assert shared_memory._map_offer(offered(descriptor), num_bytes) is None
    finally:
        os.close(descriptor)


def test_memory_is_mapped_only_in_the_size_the_ranks_expect() -> None:
    descriptor = shared_memory._allocate(4096)
    assert descriptor is not None
    try:
        assert shared_memory._map_offer(offered(descriptor), 8192) is None
        mapped = shared_memory._map_offer(offered(descriptor), 4096)
        assert mapped is not None and len(mapped) == 4096
        mapped.close()
    finally:
        os.close(descriptor)


def test_a_path_in_an_offer_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError)):
        shared_memory._map_offer(
            {"host": shared_memory._host(), "process": f"../{tmp_path}", "descriptor": 0}, 4096
        )


def test_a_system_that_offers_no_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert met([c_ops(), c_ops()]) == [None, None]


def test_ranks_without_c_kernels_sum_through_gloo() -> None:
    placement = Placement(CPU, torch.float32, make_ops("torch"))

    def work(rank: int) -> tuple[type, list[float]]:
        group = tensor_parallel_group(board.store(), "ranks", rank, 2, placement, False)
        return type(group), group.all_reduce(torch.full((2,), float(rank + 1))).tolist()

    with OpenRendezvous() as board, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [(TensorParallelGroup, [3.0, 3.0])] * 2


def test_a_rank_alone_holds_the_whole_model() -> None:
    shard = shard_of(SingleRankGroup())
    assert (shard.rank, shard.size, shard.is_repeatable) == (0, 1, False)


@pytest.mark.model
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_passes_with_sums_in_them_are_repeated_bit_for_bit(variant: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant)
    prompts = [random_prompt(24), random_prompt(17)]

    def logits(group: SharedMemoryGroup, ops: CpuOps, repeats: bool) -> tuple[list[Any], int]:
        if not repeats:
            ops.captured = lambda run: run  # type: ignore[method-assign]
        shard = shard_of(group)
        decoder = load_model(tmp_path, dtype=torch.float32, device=CPU, ops=ops, shard=shard)
        run_layers, plain_passes = decoder._run_layers, []

        def counted(*arguments: Any) -> torch.Tensor:
            plain_passes.append(1)
            return run_layers(*arguments)

        vars(decoder)["_run_layers"] = counted
        with torch.inference_mode():
            return RaggedRun(decoder, prompts).run(chunk=1), len(plain_passes)

    def both(repeats: bool) -> list[tuple[list[Any], int]]:
        all_ops = [c_ops(), c_ops()]
        joined = [group for group in met(list(all_ops)) if group is not None]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(logits, joined, all_ops, [repeats] * 2))

    repeated, plain = both(True), both(False)
    for (again, few), (once, many) in zip(repeated, plain, strict=True):
        assert all(map(torch.equal, again, once))
        assert many == 24  # passes of two tokens, then of one
        assert few == 4, "each number of tokens is recorded at once: two passes of each"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LLM]:
    llm = LLM("smollm2-135m-draft", tensor_parallel_size=2, kv_cache_gb=0.1, log_level="error")
    yield llm
    llm.close()


@pytest.mark.model
def test_two_ranks_in_shared_memory_write_the_text_of_one(two_ranks: LLM) -> None:
    skip_without_compiler()
    prompts = ["The capital of France is", "Once upon a time"]
    params = [
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=12, seed=5, temperature=0.8, top_p=0.9),
    ]
    alone = LLM("smollm2-135m-draft", kv_cache_gb=0.1, log_level="error", workers="inline")
    expected = alone.generate(prompts, params, use_tqdm=False)
    outputs = two_ranks.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    status = two_ranks.engine.built.status()
    for rank in status.ranks:
        assert MEMORY in Path(f"/proc/{rank.pid}/maps").read_text()


@pytest.mark.model
def test_ranks_that_share_memory_listen_on_nothing(two_ranks: LLM) -> None:
    skip_without_compiler()
    status = two_ranks.engine.built.status()
    for rank in status.ranks:
        assert listening_sockets(rank.pid) == []


def listening_sockets(pid: int) -> list[str]:
    """Local addresses of TCP, as the system writes them."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    rows = [
        row.split()
        for kind in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
