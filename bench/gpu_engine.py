"""Engines of enlarged models for the GPU benchmarks: real acceptance at the cost of real shapes."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.bench.inflate import load_inflated
from outrider.bench.inflate_recipes import SHAPES
from outrider.config import EngineConfig
from outrider.engine.inline import place_models, wire
from outrider.engine.sizing import PoolSizes, settle_for_device
from outrider.engine.step import StepLoop
from outrider.kernels.gpu.ops import GpuOps
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.request import Request
from outrider.scheduler.types import IN_PROCESS, NOBODY, RequestSpec, SampleId
from outrider.workers.device import gpu_bytes
from outrider.workers.models.decoder import Decoder
from outrider.workers.proposers.base import DRAFT
from outrider.workers.weights.resolve import BUNDLED_DRAFT

BLOCK_SIZE = 16
MAX_LEN = 2048


class Models:
    """Each enlarged model is made once and stays on the device."""

    def __init__(
        self,
        target: str,
        shape: str = "llama-3.1-8b",
        *,
        deterministic: bool = False,
        quantization: str | None = None,
    ) -> None:
        self._target = target
        self._shape = shape
        self._quantization = quantization
        self.ops = GpuOps(deterministic)
        self._loaded: dict[str, Decoder] = {}

    def target(self) -> Decoder:
        return self._load(self._target, self._shape, self._quantization)

    def draft(self, shape: str) -> Decoder:
        return self._load(BUNDLED_DRAFT, shape, None)

    def _load(self, model: str, shape: str, quantization: str | None) -> Decoder:
        if shape not in self._loaded:
            self._loaded[shape] = load_inflated(
                model,
                SHAPES[shape],
                dtype=torch.bfloat16,
                device="cuda",
                ops=self.ops,
                max_position=16384,
                quantization=quantization,
            )
        return self._loaded[shape]


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a run of requests took, prompts not counted."""

    tokens: int
    rounds: int
    wall_s: float
    device_s: float

    @property
    def ms_per_token(self) -> float:
        return self.wall_s / self.tokens * 1e3

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def ms_per_round(self) -> float:
        return self.wall_s / self.rounds * 1e3

    @property
    def host_ms_per_round(self) -> float:
        """Time the device stood still: what the host added to the critical path."""
        return max(self.wall_s - self.device_s, 0.0) / self.rounds * 1e3


class BenchEngine:
    """An engine without front door: token ids in, times out."""

    def __init__(
        self,
        models: Models,
        draft_shape: str | None = None,
        depth: int = 0,
        batch: int = 1,
        max_len: int = MAX_LEN,
        budget: int = 2048,
    ) -> None:
        config = EngineConfig.from_kwargs(
            model="bench",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=batch,
            max_num_batched_tokens=max(budget, batch * (depth + 1)),
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,
            num_speculative_tokens=max(depth, 1),
        )
        self._depth = depth
        self._max_len = max_len
        self._count = 0
        draft = models.draft(draft_shape) if draft_shape and depth else None
        num_blocks = batch * -(-max_len // BLOCK_SIZE)
        placement = dataclasses.replace(place_models(config), ops=models.ops)
        config = settle_for_device(config, "cuda", gpu_bytes(placement.device))
        pools = PoolSizes(num_blocks, num_blocks if draft else 0, max_len)
        self.loop: StepLoop = wire(config, placement, models.target(), draft, pools)

    def close(self) -> None:
        """Give the memory of caches and recordings back."""
        del self.loop
        gc.collect()
        torch.cuda.empty_cache()

    def add(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> None:
        self._count += 1
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True
        )
        drafted = self._depth > 0
        spec = RequestSpec(
            tuple(prompt),
            params,
            seed=seed,
            max_len=min(len(prompt) + num_tokens, self._max_len),
            proposer=DRAFT if drafted else NOBODY,
            depth=self._depth,
            is_depth_fixed=drafted,
        )
        sample_id = SampleId(IN_PROCESS, self._count)
        self.loop.scheduler.add(Request(sample_id, spec, seed=seed, arrival_s=0.0))

    def drain(self) -> dict[SampleId, list[int]]:
        """Step until nothing is left; the tokens of every request."""
        texts: dict[SampleId, list[int]] = {}
        while self.loop.scheduler.has_work:
            for update in self.loop.step(0.0):
                texts.setdefault(update.sample_id, []).extend(update.token_ids)
        return texts

    def decode(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float = 0.0
    ) -> tuple[Decoding, list[list[int]]]:
        """Requests one after the other, each timed from its first token to its last."""
        tokens, rounds, wall_s, device_s = 0, 0, 0.0, 0.0
        texts = []
        for seed, prompt in enumerate(prompts):
            self.add(prompt, num_tokens, temperature, seed)
            text = self._until_first_token()
            stats = self.loop.scheduler.stats
            busy_s, steps, start_s = self._busy_s(), stats.steps, time.perf_counter()
            more = [token for part in self.drain().values() for token in part]
            wall_s += time.perf_counter() - start_s
            device_s += self._busy_s() - busy_s
            # The last step was planned before the end was known and decided nothing.
            rounds += stats.steps - steps
            tokens += len(more)
            texts.append([*text, *more])
        return Decoding(tokens, rounds, wall_s, device_s), texts

    def throughput(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float = 0.0
    ) -> Decoding:
        """All requests at once, over the time in which every one of them is decoding."""
        for seed, prompt in enumerate(prompts):
            self.add(prompt, num_tokens, temperature, seed)
        started: set[SampleId] = set()
        while len(started) < len(prompts):
            started |= {update.sample_id for update in self.loop.step(0.0) if update.token_ids}
        stats = self.loop.scheduler.stats
        tokens, steps = stats.committed_tokens, stats.steps
        busy_s, start_s = self._busy_s(), time.perf_counter()
        finished = stats.finished
        while stats.finished == finished:
            self.loop.step(0.0)
        wall_s = time.perf_counter() - start_s
        found = Decoding(
            stats.committed_tokens - tokens, stats.steps - steps, wall_s, self._busy_s() - busy_s
        )
        self.drain()
        return found

    def _until_first_token(self) -> list[int]:
        while True:
            for update in self.loop.step(0.0):
                if update.token_ids:
                    return list(update.token_ids)

    def _busy_s(self) -> float:
        return self.loop.draft_s + self.loop.verify_s
