"""The loads of a run: the product of rates or clients, datasets and temperatures."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from outrider.errors import ConfigError
from outrider.loadtest.arrivals import Replay, read_arrivals
from outrider.loadtest.clients.shifts import LoadSpec
from outrider.loadtest.prompts import TracePrompts, prompts_for_trace, read_prompts
from outrider.loadtest.requests import Prompt
from outrider.loadtest.traces import read_trace

MAX_CLIENTS = 100_000


@dataclass(frozen=True, slots=True)
class PromptSets:
    """All prompts of a run in one pool, with the range of each dataset."""

    pool: Sequence[Prompt]
    prompt_range: dict[str, tuple[int, int]]
    is_natural: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        return ", ".join(self.prompt_range)


def read_texts(
    specs: Sequence[str],
    *,
    tokenizer: str | None,
    limit: int | None,
    max_prompt_tokens: int | None,
    seed: int,
) -> PromptSets:
    """Reads the datasets into one pool."""
    pool: list[Prompt] = []
    prompt_range = {}
    loaded = _load(tokenizer)
    for spec in specs:
        prompts = read_prompts(
            spec,
            tokenizer=loaded,
            limit=limit,
            max_prompt_tokens=max_prompt_tokens,
            seed=seed,
        )
        prompt_range[spec] = (len(pool), len(pool) + len(prompts))
        pool += prompts
    return PromptSets(pool, prompt_range, is_natural=all(prompt.is_natural for prompt in pool))


def open_loads(rates: Sequence[float], shape: str, duration_s: float) -> list[LoadSpec]:
    """One load per rate; a shape with its own rates, such as a ramp, is a single load."""
    if not rates:
        arrivals = read_arrivals(shape)
        mean = arrivals.expected(duration_s) / duration_s
        return [LoadSpec(name=shape, kind="rate", value=mean, arrivals=arrivals)]
    return [
        LoadSpec(
            name=f"rate {rate:g}", kind="rate", value=rate, arrivals=read_arrivals(shape, rate)
        )
        for rate in rates
    ]


def closed_loads(clients: Sequence[int], think_s: float) -> list[LoadSpec]:
    for number in clients:
        if not 1 <= number <= MAX_CLIENTS:
            raise ConfigError(f"--clients is {number}; it must be from 1 to {MAX_CLIENTS}.")
    return [
        LoadSpec(
            name=f"clients {number}", kind="clients", value=number, clients=number, think_s=think_s
        )
        for number in clients
    ]


def spread(
    loads: Sequence[LoadSpec], texts: PromptSets, temperatures: Sequence[float], think_s: float
) -> list[LoadSpec]:
    """Each load with each dataset and temperature, which its name includes if there are several."""
    result = []
    for text, prompt_range in texts.prompt_range.items():
        for temperature in temperatures:
            for load in loads:
                name = load.name
                if len(texts.prompt_range) > 1:
                    name += f", {text}"
                if len(temperatures) > 1:
                    name += f", T {temperature:g}"
                result.append(
                    replace(
                        load,
                        name=name,
                        text=text if len(texts.prompt_range) > 1 else "",
                        temperature=temperature,
                        prompt_range=prompt_range,
                        think_s=think_s,
                    )
                )
    return result


def trace_loads(
    name: str,
    scales: Sequence[float],
    *,
    duration_s: float,
    length_scale: float,
    tokenizer: str | None,
    max_prompt_tokens: int | None,
    seed: int,
) -> tuple[PromptSets, list[LoadSpec]]:
    """Recorded traffic with prompts of the recorded lengths: one load per speed factor."""
    parts: list[TracePrompts] = []
    loads = []
    loaded = _load(tokenizer)
    for scale in scales:
        rows = read_trace(name, scale=scale, duration_s=duration_s * scale)
        prompts = prompts_for_trace(
            rows,
            tokenizer=loaded,
            length_scale=length_scale,
            max_prompt_tokens=max_prompt_tokens,
            seed=seed,
            name=name,
        )
        arrivals = Replay(tuple(row.at_s for row in rows))
        start = sum(map(len, parts))
        prompt_range = (start, start + len(prompts))
        parts.append(prompts)
        label = f"trace {name} x{scale:g}"
        loads.append(
            LoadSpec(
                name=label, kind="trace", value=scale, arrivals=arrivals, prompt_range=prompt_range
            )
        )
    pool = ConcatenatedPrompts(parts)
    remarks = tuple(f"{part.name}: {part.describe()}" for part in parts)
    return PromptSets(pool, {name: (0, len(pool))}, remarks=remarks), loads


class ConcatenatedPrompts(Sequence[Prompt]):
    """Several datasets as one sequence; prompts are built on access."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        at = range(len(self))[index]
        part = bisect_right(self._ends, at)
        return self._parts[part][at - (self._ends[part - 1] if part else 0)]


def _load(tokenizer: str | None) -> Any:
    if tokenizer is None:
        return None
    from outrider.text.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer)
