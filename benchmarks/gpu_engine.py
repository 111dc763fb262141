"""Engines of enlarged models for the GPU benchmarks: real acceptance at the cost of real shapes."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.benchmarks.inflate import load_inflated
from outrider.benchmarks.inflate_heads import HeadShape, load_inflated_head
from outrider.benchmarks.inflate_recipes import SHAPES, Shape, fitted
from outrider.catalog.proposers import DRAFT
from outrider.checkpoints.resolve import BUNDLED_DRAFT
from outrider.config import EngineConfig
from outrider.engine.inline import place_models
from outrider.engine.sizing import PoolSizes, settle_for_device
from outrider.engine.step import StepLoop
from outrider.engine.wiring import wire
from outrider.kernels.ops import select_ops
from outrider.scheduler.params import SamplingParams
from outrider.scheduler.request import Request
from outrider.scheduler.types import IN_PROCESS, NO_PROPOSER, RequestSpec, SampleId
from outrider.workers.device import gpu_bytes
from outrider.workers.heads.base import Head
from outrider.workers.heads.loader import load_head
from outrider.workers.models.decoder import Decoder
from outrider.workers.weights.checkpoint import load_spec
from outrider.workers.weights.loader import load_model

BLOCK_SIZE = 16
MAX_LEN = 2048
MAX_POSITION = 16384


class EnlargedModels:
    """Enlarged models, each made once and kept on the device; unmodified without a shape."""

    def __init__(
        self,
        target: str,
        shape: str | Shape | None = "llama-3.1-8b",
        *,
        deterministic: bool = False,
        quantization: str | None = None,
        device: str = "cuda",
        head_shape: HeadShape | None = None,
    ) -> None:
        self._target = target
        self._shape = SHAPES[shape] if isinstance(shape, str) else shape
        self._head_shape = head_shape or (HeadShape(self._shape) if self._shape else None)
        self._quantization = quantization
        self.device = torch.device(device)
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.ops = select_ops(self.device, self.dtype, deterministic)
        self._decoders: dict[tuple[str, Shape | None], Decoder] = {}
        self._heads: dict[str, Head] = {}

    def target(self) -> Decoder:
        return self._load(self._target, self._shape, self._quantization)

    def draft(self, shape: str | None, model: str = BUNDLED_DRAFT) -> Decoder:
        """A draft in this shape; dimensions in which the model is larger stay."""
        fitting = None if shape is None else fitted(SHAPES[shape], load_spec(model))
        return self._load(model, fitting, None)

    def head(self, source: str) -> Head:
        """A head enlarged with the target."""
        if source not in self._heads:
            shape = self._head_shape
            self._heads[source] = (
                load_head(source, self.target().spec, self._target, **self._options)
                if shape is None
                else load_inflated_head(source, self._target, shape, **self._options)
            )
        return self._heads[source]

    def _load(self, model: str, shape: Shape | None, quantization: str | None) -> Decoder:
        key = model, shape
        if key not in self._decoders:
            options = {**self._options, "quantization": quantization}
            self._decoders[key] = (
                load_model(model, **options)
                if shape is None
                else load_inflated(model, shape, **options)
            )
        return self._decoders[key]

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "device": self.device,
            "ops": self.ops,
            "max_position": MAX_POSITION,
        }


class Proposing(NamedTuple):
    """The proposer of an engine, with its model."""

    name: str = NO_PROPOSER
    draft: Decoder | None = None
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class Decoding:
    """Tokens, rounds and times of some requests, without prefill."""

    tokens: int
    rounds: int
    wall_s: float
    device_s: float
    draft_s: float = 0.0  # of `device_s`; the rest is verification

    @property
    def draft_ms_per_round(self) -> float:
        return self.draft_s / self.rounds * 1e3

    @property
    def verify_ms_per_round(self) -> float:
        return (self.device_s - self.draft_s) / self.rounds * 1e3

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
        """Device idle time: what the host adds to the critical path."""
        return max(self.wall_s - self.device_s, 0.0) / self.rounds * 1e3


class BenchEngine:
    """An engine without text processing: token ids in, times out."""

    def __init__(
        self,
        models: EnlargedModels,
        draft_shape: str | None = None,
        depth: int = 0,
        batch: int = 1,
        max_len: int = MAX_LEN,
        budget: int = 2048,
        proposing: Proposing | None = None,
    ) -> None:
        """The proposer is `proposing`, or else a draft model of `draft_shape`."""
        if proposing is None:
            draft = models.draft(draft_shape) if draft_shape and depth else None
            proposing = Proposing(NO_PROPOSER if draft is None else DRAFT, draft)
        draft, head = proposing.draft, proposing.head
        of_head = {} if head is None else {"head_model": "bench", "head_method": head.spec.kind}
        config = EngineConfig.from_kwargs(
            model="bench",
            device=models.device.type,
            dtype=str(models.dtype).removeprefix("torch."),
            max_num_seqs=batch,
            max_num_batched_tokens=max(budget, batch * (depth + 1)),
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,
            num_speculative_tokens=max(depth, 1),
            **of_head,
        )
        self._proposer = proposing.name
        self._depth = depth
        self._max_len = max_len
        self._count = 0
        num_blocks = batch * -(-max_len // BLOCK_SIZE)
        placement = dataclasses.replace(place_models(config), ops=models.ops)
        config = settle_for_device(config, models.device.type, gpu_bytes(placement.device))
        pools = PoolSizes(num_blocks, num_blocks if draft else 0, max_len)
        self.loop: StepLoop = wire(config, placement, models.target(), draft, pools, head=head)

    def close(self) -> None:
        """Free the memory of KV caches and CUDA graphs."""
        del self.loop
        gc.collect()
        torch.cuda.empty_cache()

    def add(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> None:
        self._count += 1
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True
        )
        drafted = self._depth > 0 and self._proposer != NO_PROPOSER
        spec = RequestSpec(
            tuple(prompt),
            params,
            seed=seed,
            max_len=min(len(prompt) + num_tokens, self._max_len),
            proposer=self._proposer if drafted else NO_PROPOSER,
            depth=self._depth if drafted else 0,
            is_depth_fixed=drafted,
        )
        sample_id = SampleId(IN_PROCESS, self._count)
        self.loop.scheduler.add(Request(sample_id, spec, seed=seed, arrival_s=0.0))

    def drain(self) -> dict[SampleId, list[int]]:
        """Step until no request is left; the tokens of every request."""
        texts: dict[SampleId, list[int]] = {}
        while self.loop.scheduler.has_work:
            for update in self.loop.step(0.0):
                texts.setdefault(update.sample_id, []).extend(update.token_ids)
        return texts

    def decode(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float = 0.0
    ) -> tuple[Decoding, list[list[int]]]:
        """Run requests sequentially, each timed from its first token to its last."""
        tokens, rounds, wall_s, device_s, draft_s = 0, 0, 0.0, 0.0, 0.0
        texts = []
        for seed, prompt in enumerate(prompts):
            self.add(prompt, num_tokens, temperature, seed)
            text = self._until_first_token()
            stats = self.loop.scheduler.stats
            busy_s, steps, start_s = self._busy_s(), stats.steps, time.perf_counter()
            drafted_s = self.loop.draft_s
            more = [token for part in self.drain().values() for token in part]
            wall_s += time.perf_counter() - start_s
            device_s += self._busy_s() - busy_s
            draft_s += self.loop.draft_s - drafted_s
            # The last step was planned before the request ended, and commits nothing.
            rounds += stats.steps - steps
            tokens += len(more)
            texts.append([*text, *more])
        return Decoding(tokens, rounds, wall_s, device_s, draft_s), texts

    def throughput(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float = 0.0
    ) -> Decoding:
        """Run all requests at once, timed while every one of them is decoding."""
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
