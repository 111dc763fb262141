"""Builds a plan from the options of `outrider bench serve`; reports all mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.loadtest.arms import read_arms
from outrider.loadtest.clients.shifts import LoadSpec, RequestOptions
from outrider.loadtest.loads import (
    PromptSets,
    closed_loads,
    open_loads,
    read_texts,
    spread,
    trace_loads,
)
from outrider.loadtest.plan import ArmSpec, RunPlan, Timing
from outrider.loadtest.results.measures import Slo
from outrider.loadtest.results.thresholds import Threshold
from outrider.loadtest.search import Search
from outrider.loadtest.servers.chaos_file import PlannedEvent, read_chaos
from outrider.loadtest.servers.server import Idle
from outrider.loadtest.targets.base import TargetSpec
from outrider.loadtest.targets.registry import make_target
from outrider.loadtest.units import numbers_of, seconds_of

_LENGTHS = ("own", "fixed", "trace")
_LEAST = {
    "max_tokens": 1,
    "turns": 1,
    "blocks": 1,
    "client_processes": 1,
    "max_in_flight": 1,
    "requests": 1,
    "limit": 1,
    "retries": 0,
}
_DEFAULT_PROMPTS = ("spec-bench",)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Options of the evaluation of a result."""

    slo: Slo | None
    thresholds: tuple[Threshold, ...]
    baseline: str | None
    search: Search | None
    chaos: list[PlannedEvent] | None
    seed: int


def result_options(given: Mapping[str, Any]) -> ResultOptions:
    slo = Slo.parse(given["slo"]) if given["slo"] else None
    return ResultOptions(
        slo=slo,
        thresholds=tuple(map(Threshold.parse, given["fail_if_not"] or ())),
        baseline=given["baseline"],
        search=Search.parse(given["find"], slo) if given["find"] else None,
        chaos=read_chaos(given["chaos"]) if given["chaos"] else None,
        seed=given["seed"],
    )


def make_plan(given: Mapping[str, Any]) -> RunPlan:
    if given["output"] not in _LENGTHS:
        raise ConfigError(f"--output is {given['output']!r}; choose from {', '.join(_LENGTHS)}.")
    for name, least in _LEAST.items():
        if given[name] is not None and given[name] < least:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {given[name]}; it must be at least {least}.")
    timing = _timing(given)
    texts, loads = _loads(given, timing)
    return RunPlan(
        arms=tuple(_arms(given)),
        loads=tuple(loads),
        pool=texts.pool,
        prompts=texts.names,
        is_natural=texts.is_natural,
        remarks=texts.remarks,
        request_options=RequestOptions(
            max_tokens=given["max_tokens"],
            length="trace" if given["trace"] and given["output"] == "own" else given["output"],
            seed=given["seed"],
            max_turns=given["turns"],
        ),
        timing=timing,
        blocks=given["blocks"],
        is_disjoint=given["disjoint"],
        repeats_order=given["chaos"] is not None,
        keeps_answers=given["compare_answers"] or given["chaos"] is not None,
        client_processes=given["client_processes"],
        max_in_flight=given["max_in_flight"],
    )


def _timing(given: Mapping[str, Any]) -> Timing:
    measured_s = seconds_of(given["duration"], "--duration")
    timeout_s = seconds_of(given["timeout"], "--timeout")
    for option, seconds in (("--duration", measured_s), ("--timeout", timeout_s)):
        if seconds == 0:
            raise ConfigError(f"{option} is 0; it must be longer.")
    if given["requests"] is not None:
        # A number of requests is unbounded in time but for this.
        measured_s = max(measured_s, 3600.0)
    return Timing(
        measured_s=measured_s,
        warm_up_s=0.0 if given["requests"] else seconds_of(given["warm_up"], "--warm-up"),
        cool_down_s=0.0 if given["requests"] else seconds_of(given["cool_down"], "--cool-down"),
        timeout_s=timeout_s,
        drain_s=timeout_s,
        max_requests=given["requests"],
    )


def _arms(given: Mapping[str, Any]) -> list[ArmSpec]:
    idle = given["idle"]
    if idle is not None and idle not in list(Idle):
        raise ConfigError(f"--idle is {idle!r}; choose from {', '.join(Idle)}.")
    common = TargetSpec(
        url="",
        model=given["model"],
        headers=dict(_header(text) for text in given["header"] or ()),
        api_key=given["api_key"],
        insecure=given["insecure"],
        tokenizer=given["tokenizer"],
        # A conversation's next turn quotes the answer before it.
        keeps_text=given["compare_answers"] or given["turns"] > 1 or given["chaos"] is not None,
        retries=given["retries"],
    )
    file: Path | None = given["arms_file"]
    arms = read_arms(
        given["arm"] or (), given["server"] or (), file, common, Idle(idle) if idle else None
    )
    for arm in arms:
        make_target(
            arm.target.at(arm.target.url.replace("{port}", "1"))
        )  # raises for a bad address
    baseline = given["baseline"]
    if baseline is not None and baseline not in [arm.name for arm in arms]:
        names = ", ".join(arm.name for arm in arms)
        raise ConfigError(f"--baseline is {baseline!r}; choose from {names}.")
    return arms


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition(":")
    if not separator or not name.strip():
        raise ConfigError(f"--header is {text!r}; write 'Name: value'.")
    return name.strip(), value.strip()


def _loads(given: Mapping[str, Any], timing: Timing) -> tuple[PromptSets, Sequence[LoadSpec]]:
    kinds = [name for name in ("rate", "clients", "trace") if given[name]]
    has_own_rates = given["arrivals"].startswith(("ramp", "spike"))
    if has_own_rates and kinds:
        raise ConfigError(
            f"--arrivals {given['arrivals']} has rates of its own; leave --{kinds[0]} out."
        )
    if len(kinds) != 1 and not (has_own_rates and not kinds):
        wrong = " and ".join(f"--{kind}" for kind in kinds) or "no load"
        raise ConfigError(f"{wrong} given; give one of --rate, --clients and --trace.")
    think_s = seconds_of(given["think_time"], "--think-time")
    if given["trace"]:
        return _trace(given, timing)
    texts = read_texts(
        given["prompts"] or _DEFAULT_PROMPTS,
        tokenizer=given["tokenizer"],
        limit=given["limit"],
        max_prompt_tokens=given["max_prompt_tokens"],
        seed=given["seed"],
    )
    if given["clients"]:
        numbers = numbers_of(given["clients"], "--clients")
        if any(number != int(number) for number in numbers):
            raise ConfigError(f"--clients is {given['clients']!r}; write whole numbers.")
        loads = closed_loads([int(number) for number in numbers], think_s)
    else:
        rates = numbers_of(given["rate"], "--rate") if given["rate"] else []
        loads = open_loads(rates, given["arrivals"], _sending_s(timing))
    return texts, spread(loads, texts, _temperatures(given), think_s)


def _trace(given: Mapping[str, Any], timing: Timing) -> tuple[PromptSets, Sequence[LoadSpec]]:
    name, _, factors = given["trace"].rpartition(":")
    if not name or not factors[:1].isdigit():  # a path may have a colon of its own
        name, factors = given["trace"], "1"
    scales = numbers_of(factors, "--trace")
    texts, loads = trace_loads(
        name,
        scales,
        duration_s=_sending_s(timing),
        length_scale=given["length_scale"],
        tokenizer=given["tokenizer"],
        max_prompt_tokens=given["max_prompt_tokens"],
        seed=given["seed"],
    )
    if len(_temperatures(given)) > 1:
        raise ConfigError("--temperature has several values; a trace takes one.")
    return texts, loads


def _temperatures(given: Mapping[str, Any]) -> list[float]:
    temperatures = numbers_of(given["temperature"], "--temperature")
    if min(temperatures) < 0:
        raise ConfigError(f"--temperature is {given['temperature']}; it must be at least 0.")
    return temperatures


def check_result_options(plan: RunPlan, wishes: ResultOptions) -> None:
    """Check the options against the plan, before hours are spent on it."""
    arms = [arm.name for arm in plan.arms]
    cells = [load.name for load in plan.loads]
    for threshold in wishes.thresholds:
        for name in (threshold.arm, threshold.baseline):
            if name is not None and name not in arms:
                raise ConfigError(
                    f"--fail-if-not {threshold.text!r} names the arm {name!r}; choose from "
                    f"{', '.join(arms)}."
                )
        if threshold.cell is not None and wishes.search is None and threshold.cell not in cells:
            raise ConfigError(
                f"--fail-if-not {threshold.text!r} names the load {threshold.cell!r}; choose from "
                f"{', '.join(cells)}."
            )
    if wishes.search is not None:
        _check_search(plan, wishes.search)


def _check_search(plan: RunPlan, search: Search) -> None:
    if len({(load.text, load.temperature) for load in plan.loads}) > 1:
        raise ConfigError("--find takes one set of --prompts and one --temperature.")
    kinds = {load.kind for load in plan.loads}
    if search.kind == "knee" and kinds != {"clients"}:
        raise ConfigError("--find knee needs --clients, the number to begin with.")
    if search.kind == "slo" and (kinds != {"rate"} or len(plan.loads) < 2):  # noqa: PLR2004
        raise ConfigError("--find slo needs --rate with the lowest and the highest, as 0.5,16.")


def _sending_s(timing: Timing) -> float:
    return timing.warm_up_s + timing.measured_s + timing.cool_down_s
