"""Unmodified models: tokens per round over batches, speed of one request at a time."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.acceptance_tables import length_group, params_at_depth, tables, upper_end
from outrider.benchmarks.proposers.contenders import ProposerVariant
from outrider.benchmarks.proposers.prompts import LENGTHS, BenchPrompt
from outrider.benchmarks.proposers.results_file import ResultsFile
from outrider.engine.llm import LLM
from outrider.scheduler.params import SamplingParams

KV_GB = {"cpu": 1.0, "cuda": 4.0}  # of each engine; requests queue when it is full
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ProposerBenchSettings:
    target: str
    device: str
    tokens: int
    context: int
    batch: int
    temperature: float | None
    ignore_eos: bool
    deterministic: bool

    @property
    def temperatures(self) -> dict[str, float]:
        sampled = {} if self.temperature is None else {"sampled": self.temperature}
        return {"greedy": 0.0, **sampled}


@dataclass(slots=True)
class Timed:
    """Sums over sequential requests. Decoding is from a request's first token to its last."""

    tokens: int = 0
    whole_s: float = 0.0
    decoded: int = 0
    decoding_s: float = 0.0
    rounds: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def __add__(self, other: Timed) -> Timed:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Timed(*(own + others for own, others in pairs))

    def as_json(self) -> dict[str, Any]:
        busy_s, rounds = self.draft_s + self.verify_s, max(self.rounds, 1)
        return {
            "decoding_tokens_per_s": round(self.decoded / max(self.decoding_s, 1e-9), 2),
            "whole_tokens_per_s": round(self.tokens / max(self.whole_s, 1e-9), 2),
            "tokens_a_round": round(self.decoded / rounds, 4),
            "round_ms": round(self.decoding_s / rounds * 1e3, 4),
            "draft_ms": round(self.draft_s / rounds * 1e3, 4),
            "verify_ms": round(self.verify_s / rounds * 1e3, 4),
            "draft_share": round(self.draft_s / max(busy_s, 1e-9), 4),
        }


class SmallRun:
    """One engine for each variant, open until the end, so that variants can be interleaved."""

    def __init__(
        self,
        settings: ProposerBenchSettings,
        variants: Sequence[ProposerVariant],
        results: ResultsFile,
    ) -> None:
        self._settings = settings
        self._variants = variants
        self._results = results
        self._engines: dict[Any, LLM] = {}
        self._ids = itertools.count()
        self.differing: list[str] = []  # a sentence for each variant whose texts differ

    def close(self) -> None:
        for llm in self._engines.values():
            llm.close()
        self._engines.clear()

    # -- tokens a round ------------------------------------------------------------------------

    def rounds(self, prompts: Sequence[BenchPrompt]) -> None:
        self._results.begin_part("rounds", **prompt_facts(prompts))
        plain: dict[str, list[list[int]]] = {}
        for variant in self._variants:
            record = variant.key
            for name, temperature in self._settings.temperatures.items():
                found, texts = self._tokens_a_round(variant, prompts, temperature)
                plain.setdefault(name, texts)
                same = self._compare("rounds", variant, name, texts, plain[name])
                record[name] = {**found, "same_texts": same, "texts": len(texts)}
                self._results.log(
                    f"{variant.name}, {name}: {found['all']['tokens_a_round']:.3f} tokens a round, "
                    f"acceptance {found['all']['acceptance']:.3f}, {same} of {len(texts)} texts "
                    "equal"
                )
            self._results.add_record("rounds", record)

    def _tokens_a_round(
        self, variant: ProposerVariant, prompts: Sequence[BenchPrompt], temperature: float
    ) -> tuple[dict[str, Any], list[list[int]]]:
        params = params_at_depth(
            len(prompts),
            variant.depth,
            self._settings.tokens,
            temperature,
            ignore_eos=self._settings.ignore_eos,
        )
        inputs: list[Any] = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts]
        outputs = self._engine(variant).generate(inputs, params, use_tqdm=False)
        groups, lengths = (
            [prompt.group for prompt in prompts],
            [len(prompt.ids) for prompt in prompts],
        )
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        return tables(outputs, groups, lengths, LENGTHS), texts

    # -- speed ---------------------------------------------------------------------------------

    def speed(self, prompts: Sequence[BenchPrompt]) -> None:
        """Variants are interleaved prompt by prompt, so that drift affects all of them."""
        self._results.begin_part("speed", **prompt_facts(prompts))
        for variant in self._variants:
            self._time(variant, prompts[0], min(WARM_UP_TOKENS, self._settings.tokens), 0.0, 0)
        records = [variant.key for variant in self._variants]
        for name, temperature in self._settings.temperatures.items():
            times: list[list[Timed]] = [[] for _ in self._variants]
            texts: list[list[list[int]]] = [[] for _ in self._variants]
            for seed, prompt in enumerate(prompts):
                for place, variant in enumerate(self._variants):
                    timed, text = self._time(
                        variant, prompt, self._settings.tokens, temperature, seed
                    )
                    times[place].append(timed)
                    texts[place].append(text)
                self._results.log(f"speed, {name}: {seed + 1} of {len(prompts)} prompts")
            for variant, record, own, written in zip(
                self._variants, records, times, texts, strict=True
            ):
                same = self._compare("speed", variant, name, written, texts[0])
                record[name] = {
                    **timed_tables(prompts, own),
                    "same_texts": same,
                    "texts": len(written),
                }
                found = record[name]["all"]
                self._results.log(
                    f"{variant.name}, {name}: {found['decoding_tokens_per_s']:.1f} tokens/s "
                    f"decoding, {found['whole_tokens_per_s']:.1f} in all, drafting "
                    f"{found['draft_share']:.1%} of a round, {same} of {len(written)} texts equal"
                )
        for record in records:
            self._results.add_record("speed", record)

    def _time(
        self,
        variant: ProposerVariant,
        prompt: BenchPrompt,
        tokens: int,
        temperature: float,
        seed: int,
    ) -> tuple[Timed, list[int]]:
        [params] = params_at_depth(
            1, variant.depth, tokens, temperature, ignore_eos=self._settings.ignore_eos
        )
        params = dataclasses.replace(params, seed=seed)
        return time_request(self._engine(variant), str(next(self._ids)), prompt, params)

    # -- engines and texts ---------------------------------------------------------------------

    def _engine(self, variant: ProposerVariant) -> LLM:
        """On a CPU a request sets its depth; on a GPU the engine's CUDA graphs have one."""
        settings = self._settings
        is_cpu = settings.device == "cpu"
        key = variant.contender if is_cpu else variant
        if key not in self._engines:
            depth = {} if is_cpu else {"num_speculative_tokens": max(variant.depth, 1)}
            self._engines[key] = LLM(
                settings.target,
                device=settings.device,
                dtype=DTYPES[settings.device],
                max_model_len=settings.context,
                max_num_seqs=settings.batch,
                kv_cache_gb=KV_GB[settings.device],
                enable_prefix_caching=False,
                deterministic=settings.deterministic,
                log_level="warning",
                **depth,
                **variant.contender.options,
            )
        return self._engines[key]

    def _compare(
        self,
        part: str,
        variant: ProposerVariant,
        name: str,
        texts: Sequence[Sequence[int]],
        plain: Sequence[Sequence[int]],
    ) -> int:
        same = num_same(texts, plain)
        if same < len(plain):
            self.differing.append(
                f"{part}, {name}: {len(plain) - same} of {len(plain)} texts of {variant.name} "
                "differ from plain decoding"
            )
        return same


def time_request(
    llm: LLM,
    request_id: str,
    prompt: BenchPrompt,
    params: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timed, list[int]]:
    """Run one request alone; returns its times and its text."""
    engine = llm.engine
    loop = engine.built.loop
    start_s = clock()
    token_prompt: Any = {"prompt_token_ids": list(prompt.ids)}
    output = engine.add(request_id, token_prompt, params)
    first: tuple[float, int, int, float, float] | None = None
    end_s = start_s
    while engine.has_work:
        deltas = engine.step()
        if not any(delta.token_ids for delta in deltas):
            continue
        end_s = clock()
        if first is None:
            done = output.outputs[0]
            counted = len(done.token_ids), done.speculation.rounds
            first = end_s, *counted, loop.draft_s, loop.verify_s
    output.raise_if_failed()
    done = output.outputs[0]
    first_s, tokens, rounds, draft_s, verify_s = first or (end_s, 0, 0, loop.draft_s, loop.verify_s)
    timed = Timed(
        tokens=len(done.token_ids),
        whole_s=end_s - start_s,
        decoded=len(done.token_ids) - tokens,
        decoding_s=end_s - first_s,
        rounds=done.speculation.rounds - rounds,
        draft_s=loop.draft_s - draft_s,
        verify_s=loop.verify_s - verify_s,
    )
    return timed, list(done.token_ids)


def timed_tables(prompts: Sequence[BenchPrompt], times: Sequence[Timed]) -> dict[str, Any]:
    """In all, by group, and by prompt length."""
    by_group: dict[str, Timed] = {}
    by_length: dict[str, Timed] = {}
    for prompt, timed in zip(prompts, times, strict=True):
        length = length_group(len(prompt.ids), LENGTHS)
        by_group[prompt.group] = by_group.get(prompt.group, Timed()) + timed
        by_length[length] = by_length.get(length, Timed()) + timed
    return {
        "all": sum(times, Timed()).as_json(),
        "by_category": {name: by_group[name].as_json() for name in sorted(by_group)},
        "by_prompt_length": {
            name: by_length[name].as_json() for name in sorted(by_length, key=upper_end)
        },
    }


def prompt_facts(prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    lengths = [len(prompt.ids) for prompt in prompts]
    return {
        "prompts": len(prompts),
        "groups": sorted({prompt.group for prompt in prompts}),
        "mean_prompt_tokens": round(sum(lengths) / max(len(lengths), 1), 1),
    }


def num_same(texts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(texts, plain, strict=True))
