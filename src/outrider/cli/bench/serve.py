"""`outrider bench serve`: measures one or several servers under load, in turns."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import typer

from outrider.cli.bench import flags


def serve(
    arm: flags.Arms = None,
    server: flags.Servers = None,
    arms_file: flags.ArmsFile = None,
    rate: flags.Rate = None,
    clients: flags.Clients = None,
    old_clients: flags.OldClients = None,
    trace: flags.Trace = None,
    arrivals: flags.ArrivalShape = "poisson",
    max_in_flight: flags.MaxInFlight = None,
    find: flags.Find = None,
    duration: flags.Duration = "30s",
    warm_up: flags.WarmUp = "3s",
    cool_down: flags.CoolDown = "2s",
    requests: flags.Requests = None,
    timeout: flags.Timeout = "120s",
    blocks: flags.Blocks = 1,
    prompts: flags.Prompts = None,
    limit: flags.Limit = None,
    max_prompt_tokens: flags.MaxPromptTokens = None,
    max_tokens: flags.MaxTokens = 64,
    output: flags.Output = "own",
    temperature: flags.Temperature = "0",
    turns: flags.Turns = 1,
    think_time: flags.ThinkTime = "0s",
    length_scale: flags.LengthScale = 1.0,
    disjoint: flags.Disjoint = False,
    compare_answers: flags.CompareAnswers = False,
    idle: flags.IdleArms = None,
    client_processes: flags.ClientProcesses = None,
    model: flags.Model = None,
    tokenizer: flags.Tokenizer = None,
    api_key: flags.ApiKey = None,
    header: flags.Header = None,
    insecure: flags.Insecure = False,
    retries: flags.Retries = 0,
    slo: flags.SloOption = None,
    fail_if_not: flags.FailIfNot = None,
    baseline: flags.Baseline = None,
    chaos: flags.Chaos = None,
    out: flags.Out = None,
    seed: flags.Seed = 0,
) -> None:
    """Measure servers under realistic load, and report.

    Several arms are measured in turns, block by block, so that drift of the machine favours none.
    Latency counts from when a request was due. Everything is kept in --out.
    """
    given = dict(locals())
    given["clients"] = flags.clients_of(clients, given.pop("old_clients"))
    flags.need_extra()
    from outrider.cli.bench.planning import check_result_options, make_plan, result_options
    from outrider.cli.bench.running import carry_out

    started = datetime.now(UTC)
    folder = out or Path("bench-runs") / started.strftime("%Y%m%d-%H%M%S")
    plan, wishes = make_plan(given), result_options(given)
    check_result_options(plan, wishes)
    raise typer.Exit(carry_out(plan, folder, wishes, started))
