"""`python -m outrider.bench.front`: tokens a gateway process delivers, and what each costs it."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.links.secret import SECRET_VARIABLE

START_TIMEOUT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `tokens_per_core_s` is by the processor time of the gateway."""

    protocol: str
    streams: int
    offered_per_s: float
    tokens_per_s: float
    tokens_per_core_s: float
    tokens_per_message: float
    first_p50_ms: float
    failures: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.front", description=__doc__)
    parser.add_argument("--protocol", choices=("grpc", "http", "both"), default="both")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the scripted engine")
    parser.add_argument("--tokens-per-step", type=int, default=1, help="of each stream")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--out", type=Path, help="append the results to this file of JSON lines")
    given = parser.parse_args()
    protocols = ("grpc", "http") if given.protocol == "both" else (given.protocol,)
    for protocol in protocols:
        result = measure(given, protocol)
        print(json.dumps(asdict(result)))
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")


def measure(given: argparse.Namespace, protocol: str) -> Result:
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="outrider-front-") as folder, ExitStack() as stack:
        address = f"unix:{folder}/engine.sock"
        engine = ["outrider.bench.front.engine", "--listen", address]
        engine += ["--step-ms", str(given.step_ms), "--tokens-per-step", str(given.tokens_per_step)]
        stack.enter_context(_process(engine, secret, r"listening on (\S+)"))
        gateway = ["outrider.gateway", "--engine", address, "--log-level", "warning"]
        gateway += ["--set", "server.port=0", "--set", "server.grpc_port=0"]
        pattern = r"listening on (\S+) \(HTTP\) and (\S+)"
        process, found = stack.enter_context(_process(gateway, secret, pattern))
        place = found.group(1 if protocol == "http" else 2)
        _warm_up(given, protocol, place)
        before_s, began_s = _cpu_s(process.pid), time.monotonic()
        counts = _clients(given, protocol, place, given.streams, given.seconds)
        wall_s, cpu_s = time.monotonic() - began_s, _cpu_s(process.pid) - before_s
    tokens = given.tokens * sum(count["streams"] for count in counts)
    first = [each for count in counts for each in count["first_s"]]
    return Result(
        protocol=protocol,
        streams=given.streams,
        offered_per_s=given.streams * given.tokens_per_step * 1000 / max(given.step_ms, 1e-3),
        tokens_per_s=round(tokens / wall_s, 1),
        tokens_per_core_s=round(tokens / cpu_s, 1),
        tokens_per_message=round(tokens / max(sum(count["messages"] for count in counts), 1), 3),
        first_p50_ms=round(statistics.median(first) * 1000, 2) if first else float("nan"),
        failures=sum(count["failures"] for count in counts),
    )


def _warm_up(given: argparse.Namespace, protocol: str, address: str) -> None:
    """Until it answers: a gateway listens before it has found its engine."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if sum(count["streams"] for count in _clients(given, protocol, address, 4, 0.5)):
            return
    raise SystemExit("the gateway has not answered")


def _clients(
    given: argparse.Namespace, protocol: str, address: str, streams: int, seconds: float
) -> list[dict[str, Any]]:
    num = min(given.clients, streams)
    running = []
    for number in range(num):
        share = streams // num + (number < streams % num)
        command = [sys.executable, "-m", "outrider.bench.front.clients", "--protocol", protocol]
        command += ["--address", address, "--streams", str(share)]
        command += ["--tokens", str(given.tokens), "--seconds", str(seconds)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=seconds + START_TIMEOUT_S)[0] for process in running]
    return [json.loads(text) for text in texts]


@contextmanager
def _process(
    command: list[str], secret: str, pattern: str
) -> Iterator[tuple[subprocess.Popen[str], re.Match[str]]]:
    """A module of ours as a process, once it has said where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | {SECRET_VARIABLE: secret},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(pattern, process.stdout.readline())
        if found is None:
            raise SystemExit(f"{command[0]} did not start")
        yield process, found
    finally:
        process.kill()
        process.wait(10)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


if __name__ == "__main__":
    main()
