"""Runs fake servers until SIGTERM or SIGINT.

python -m outrider.loadtest.fake --http 0 --ttft 50ms --gap 10ms --updates 16 --faults 429=0.1
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, OutriderError
from outrider.loadtest.fake.http_server import FakeOpenAiServer
from outrider.loadtest.fake.script import Fault, Jitter, Script
from outrider.loadtest.units import seconds_of


def main() -> None:
    options = _parser().parse_args()
    try:
        script = _script_of(options)
    except OutriderError as error:
        sys.exit(f"error: {error}")
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(options, script))
    else:
        uvloop.run(_serve(options, script))


async def _serve(options: argparse.Namespace, script: Script) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    servers: list[Any] = []
    if options.http is not None:
        servers.append(FakeOpenAiServer(script, options.host, options.http))
    if options.grpc is not None:
        from outrider.loadtest.fake.grpc_server import FakeGrpcServer

        servers.append(FakeGrpcServer(script, options.host, options.grpc))
    for server in servers:
        await server.start()
    print("listening", *(server.url for server in servers), flush=True)
    await stopping.wait()
    for server in servers:
        await server.stop()
        if options.books is not None:
            server.actor.write(options.books.with_suffix(f".{server.url.partition(':')[0]}.jsonl"))


def _script_of(options: argparse.Namespace) -> Script:
    return Script(
        ttft_s=options.ttft,
        gap_s=options.gap,
        updates=options.updates or None,
        tokens_per_update=options.tokens_per_update,
        jitter=options.jitter,
        spread=options.spread,
        stall=tuple(options.stall) if options.stall else None,
        faults=dict(options.faults),
        retry_after_s=options.retry_after,
        has_usage=not options.no_usage,
        has_ids=options.ids,
        word=options.word,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m outrider.loadtest.fake", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http", type=int, help="port of the OpenAI server; 0 takes a free one")
    parser.add_argument("--grpc", type=int, help="port of the gRPC server; 0 takes a free one")
    parser.add_argument("--ttft", type=_seconds, default=0.0, help="as 50ms or 0.05")
    parser.add_argument("--gap", type=_seconds, default=0.0)
    parser.add_argument("--updates", type=int, default=8, help="0: by the request's max_tokens")
    parser.add_argument("--tokens-per-update", type=int, default=1)
    parser.add_argument("--jitter", type=Jitter, choices=list(Jitter), default=Jitter.NONE)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--stall", type=_seconds, nargs=2, metavar=("AT", "FOR"))
    parser.add_argument("--faults", type=_fault, nargs="*", default=[], metavar="FAULT=SHARE")
    parser.add_argument("--retry-after", type=_seconds)
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--ids", action="store_true")
    parser.add_argument("--word", default=" word", help="each token as text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--books", type=Path, help="where to write the request log at the end")
    return parser


def _seconds(text: str) -> float:
    try:
        return seconds_of(text, "the time")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fault(text: str) -> tuple[Fault, float]:
    name, _, share = text.partition("=")
    return Fault(name), float(share)


if __name__ == "__main__":
    main()
