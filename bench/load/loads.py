"""The loads of a run: every rate or number of clients, with every text and temperature."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from outrider.bench.load.arrivals import Replay, read_arrivals
from outrider.bench.load.asks import Prompt
from outrider.bench.load.clients.shifts import Load
from outrider.bench.load.prompts import TracePrompts, prompts_for_trace, read_prompts
from outrider.bench.load.traces import read_trace
from outrider.errors import ConfigError

MOST_CLIENTS = 100_000


@dataclass(frozen=True, slots=True)
class Texts:
    """All prompts of a run in one pool, and which part of it each set is."""

    pool: Sequence[Prompt]
    places: dict[str, tuple[int, int]]
    is_natural: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        return ", ".join(self.places)


def read_texts(
    specs: Sequence[str],
    *,
    tokenizer: str | None,
    limit: int | None,
    max_prompt_tokens: int | None,
    seed: int,
) -> Texts:
    """The sets named, one after the other."""
    pool: list[Prompt] = []
    places = {}
    loaded = _load(tokenizer)
    for spec in specs:
        prompts = read_prompts(
            spec,
            tokenizer=loaded,
            limit=limit,
            max_prompt_tokens=max_prompt_tokens,
            seed=seed,
        )
        places[spec] = (len(pool), len(pool) + len(prompts))
        pool += prompts
    return Texts(pool, places, is_natural=all(prompt.is_natural for prompt in pool))


def open_loads(rates: Sequence[float], shape: str, duration_s: float) -> list[Load]:
    """One for each rate; a shape that has rates of its own, as a ramp, is one load by itself."""
    if not rates:
        arrivals = read_arrivals(shape)
        mean = arrivals.expected(duration_s) / duration_s
        return [Load(name=shape, kind="rate", value=mean, arrivals=arrivals)]
    return [
        Load(name=f"rate {rate:g}", kind="rate", value=rate, arrivals=read_arrivals(shape, rate))
        for rate in rates
    ]


def closed_loads(clients: Sequence[int], think_s: float) -> list[Load]:
    for number in clients:
        if not 1 <= number <= MOST_CLIENTS:
            raise ConfigError(f"--clients is {number}; it must be from 1 to {MOST_CLIENTS}.")
    return [
        Load(
            name=f"clients {number}", kind="clients", value=number, clients=number, think_s=think_s
        )
        for number in clients
    ]


def spread(
    loads: Sequence[Load], texts: Texts, temperatures: Sequence[float], think_s: float
) -> list[Load]:
    """Each load with each text and temperature; they are named where there are several."""
    result = []
    for text, places in texts.places.items():
        for temperature in temperatures:
            for load in loads:
                name = load.name
                if len(texts.places) > 1:
                    name += f", {text}"
                if len(temperatures) > 1:
                    name += f", T {temperature:g}"
                result.append(
                    replace(
                        load,
                        name=name,
                        text=text if len(texts.places) > 1 else "",
                        temperature=temperature,
                        places=places,
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
) -> tuple[Texts, list[Load]]:
    """Real traffic, with prompts of the lengths it had: a load for each factor of its speed."""
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
        places = (start, start + len(prompts))
        parts.append(prompts)
        label = f"trace {name} x{scale:g}"
        loads.append(Load(name=label, kind="trace", value=scale, arrivals=arrivals, places=places))
    pool = Joined(parts)
    remarks = tuple(f"{part.name}: {part.describe()}" for part in parts)
    return Texts(pool, {name: (0, len(pool))}, remarks=remarks), loads


class Joined(Sequence[Prompt]):
    """Several sets of prompts as one, each prompt made only when it is asked for."""

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
