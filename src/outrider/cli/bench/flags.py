"""The options of `outrider bench serve`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.errors import ConfigError
from outrider.requirements import need

logger = logging.getLogger(__name__)

_SERVERS, _LOAD, _PROMPTS = "Servers", "Load", "Prompts and answers"
_CLIENTS, _RESULT = "Clients", "Result"


def _option(panel: str, *names: str, help: str, show_default: bool = False) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=show_default)


def _shown(panel: str, *names: str, help: str) -> Any:
    return _option(panel, *names, help=help, show_default=True)


Arms = Annotated[
    list[str] | None,
    _option(
        _SERVERS,
        "--arm",
        "-a",
        help="NAME=ADDRESS[?field=value&...], or NAME=SERVER[?...] with a server of --server. "
        "Addresses: host:port or grpc://host:port for Outrider, http(s)://host:port for anything "
        "OpenAI-compatible, inprocess: for an engine in the client itself. Fields go into every "
        "request.",
    ),
]
Servers = Annotated[
    list[str] | None,
    _option(
        _SERVERS,
        "--server",
        help="NAME=COMMAND with {port}: started, waited for, and stopped in the end.",
    ),
]
ArmsFile = Annotated[
    Path | None, _option(_SERVERS, "--arms-file", help="YAML with `servers` and `arms`.")
]
IdleArms = Annotated[
    str | None,
    _option(
        _SERVERS,
        "--idle",
        help="Idle servers while others are measured: leave, pause or stop. Default: stop for "
        "ours, pause for others.",
    ),
]
Model = Annotated[
    str | None, _option(_SERVERS, "--model", help="Model to ask for; default: what is served.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="OUTRIDER_BENCH_API_KEY",
        help="Sent as a bearer token.",
        rich_help_panel=_SERVERS,
        show_default=False,
        show_envvar=True,
    ),
]
Header = Annotated[
    list[str] | None, _option(_SERVERS, "--header", help="'Name: value', sent with each request.")
]
Insecure = Annotated[
    bool, _option(_SERVERS, "--insecure", help="Do not check the servers' certificates.")
]
Chaos = Annotated[
    Path | None,
    _option(_SERVERS, "--chaos", help="YAML of processes to kill or stop, and when; see the docs."),
]

Rate = Annotated[
    str | None,
    _option(_LOAD, "--rate", "-r", help="Open loop: requests a second; several as 0.5,1,2,4."),
]
Clients = Annotated[
    str | None,
    _option(_LOAD, "--clients", help="Closed loop: clients at once; several as 1,8,64."),
]
OldClients = Annotated[str | None, typer.Option("-c", hidden=True, show_default=False)]
Trace = Annotated[
    str | None,
    _option(
        _LOAD,
        "--trace",
        help="Real traffic: azure-conv, azure-code, mooncake or a file, with factors of its "
        "speed as azure-conv:0.1,0.2.",
    ),
]
ArrivalShape = Annotated[
    str,
    _shown(
        _LOAD,
        "--arrivals",
        help="poisson, constant, gamma:0.3 (burstier below 1), ramp:1-10, spike:2-20@30s+10s.",
    ),
]
MaxInFlight = Annotated[
    int | None,
    _option(
        _LOAD,
        "--max-in-flight",
        help="Open loop: maximum concurrent requests; others wait in the client, which counts.",
    ),
]
Find = Annotated[
    str | None,
    _option(
        _LOAD,
        "--find",
        help="Search instead: 'slo' is the largest rate that meets --slo, between the lowest and "
        "highest --rate; 'knee' is the number of --clients beyond which throughput stops growing.",
    ),
]
Duration = Annotated[
    str, _shown(_LOAD, "--duration", "-d", help="Measured time of each load, as 30s, 5m or 8h.")
]
WarmUp = Annotated[str, _shown(_LOAD, "--warm-up", help="Before it, not counted.")]
CoolDown = Annotated[str, _shown(_LOAD, "--cool-down", help="After it, not counted.")]
Requests = Annotated[
    int | None,
    _option(_LOAD, "--requests", "-n", help="Number of requests for each load, run to completion."),
]
Timeout = Annotated[str, _shown(_LOAD, "--timeout", help="Of one request, from when it is due.")]
Blocks = Annotated[
    int, _shown(_LOAD, "--blocks", "-b", help="Turns of each arm; intervals need at least 3.")
]

Prompts = Annotated[
    list[str] | None,
    _option(
        _PROMPTS,
        "--prompts",
        "-p",
        help="spec-bench[:category], mt-bench, humaneval, gsm8k, mbpp, arena-hard, vicuna, oasst, "
        "sonnet:N, sharegpt:FILE, speed-bench:FILE, jsonl:FILE, random:LENGTH, "
        "shared-prefix:PREFIX+OWN. Repeated: each is a load of its own. Default: spec-bench.",
    ),
]
Limit = Annotated[
    int | None, _option(_PROMPTS, "--limit", help="Maximum number of prompts, evenly by category.")
]
MaxPromptTokens = Annotated[
    int | None,
    _option(_PROMPTS, "--max-prompt-tokens", help="Skip longer prompts; needs --tokenizer."),
]
MaxTokens = Annotated[int, _shown(_PROMPTS, "--max-tokens", "-o", help="Longest answer in tokens.")]
Output = Annotated[
    str,
    _shown(
        _PROMPTS,
        "--output",
        help="own: to the text's end; fixed: exactly --max-tokens; trace: as long as the trace or "
        "the prompt set says.",
    ),
]
Temperature = Annotated[
    str, _shown(_PROMPTS, "--temperature", "-t", help="Several as 0,0.7: each a load of its own.")
]
Turns = Annotated[int, _shown(_PROMPTS, "--turns", help="Maximum turns of a conversation.")]
ThinkTime = Annotated[
    str, _shown(_PROMPTS, "--think-time", help="Between an answer and the next turn or request.")
]
LengthScale = Annotated[
    float, _shown(_PROMPTS, "--length-scale", help="Factor of a trace's prompt and block lengths.")
]
Disjoint = Annotated[
    bool,
    _option(
        _PROMPTS,
        "--disjoint-prompts",
        help="No arm sends another's prompts: for arms that share a prefix cache.",
    ),
]
CompareAnswers = Annotated[
    bool,
    _option(
        _PROMPTS, "--compare-answers", help="Keep all answers and compare the arms' token by token."
    ),
]

ClientProcesses = Annotated[
    int | None,
    _option(
        _CLIENTS,
        "--client-processes",
        help="Default: one, and more as soon as one cannot keep up.",
    ),
]
Tokenizer = Annotated[
    str | None,
    _option(
        _CLIENTS,
        "--tokenizer",
        help="Folder or bundled model: counts tokens where a server reports none.",
    ),
]
Retries = Annotated[
    int, _shown(_CLIENTS, "--retries", help="Of requests refused with 429 or 503; counted.")
]

SloOption = Annotated[
    str | None,
    _option(_RESULT, "--slo", help="Definition of a good answer, as ttft=500ms,tpot=50ms,e2e=10s."),
]
FailIfNot = Annotated[
    list[str] | None,
    _option(
        _RESULT,
        "--fail-if-not",
        help="Exit with 3 unless it holds: 'ttft_p99<500ms', 'errors==0', "
        "'deep/off:tokens_s>=1.1', with @\"rate 2\" for one load; may be repeated.",
    ),
]
Baseline = Annotated[
    str | None,
    _option(_RESULT, "--baseline", help="The arm others are compared with. Default: the first."),
]
Out = Annotated[
    Path | None,
    _option(_RESULT, "--out", help="Folder of the result. Default: bench-runs/<time>."),
]
Seed = Annotated[
    int, _shown(_RESULT, "--seed", help="Of arrivals, the order of prompts, and sampling.")
]


def clients_of(clients: str | None, old: str | None) -> str | None:
    """`-c` means --config in every other command."""
    if old is None:
        return clients
    logger.warning("-c is deprecated here, as it is --config elsewhere; give --clients %s", old)
    if clients not in (None, old):
        raise ConfigError(f"--clients is {clients!r} and -c is {old!r}; give only --clients.")
    return old


def need_extra() -> None:
    """Raises unless the packages of the `bench` extra are installed."""
    need("scipy", "matplotlib")
