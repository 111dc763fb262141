"""Commands that the harness starts: waited for, paused, and never left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waits import wait_until

from outrider.loadtest.servers import server as servers
from outrider.loadtest.servers.processes import listening_pid
from outrider.loadtest.servers.server import (
    Idle,
    ServerError,
    ServerSpec,
    ServerUnderTest,
    is_ready,
)
from outrider.loadtest.servers.watch import ServerWatch

# Answers /health, and has a helper that leaves its session and its parent, as daemons do.
TINY = """
import http.server, os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_metrics = self.path == "/metrics"
        self.send_response(200 if is_metrics or self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 3" if is_metrics else b"")
    def log_message(self, *_): pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
HARNESS = """
import asyncio, pathlib, sys
from outrider.loadtest.servers.server import ServerSpec, ServerUnderTest
async def main():
    spec = ServerSpec("tiny", "http://127.0.0.1:{port}", sys.argv[1])
    server = ServerUnderTest(spec, pathlib.Path(sys.argv[2]))
    await server.start()
    if "pause" in sys.argv:
        server.pause()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


class Marked:
    """Processes known by a mark in their environment, whoever their parent is."""

    def __init__(self) -> None:
        self.env = {"_BENCH_TEST": secrets.token_hex(8)}

    def pids(self) -> list[int]:
        return [pid for pid in _all_pids() if self._is_own(pid)]

    def _is_own(self, pid: int) -> bool:
        [(name, value)] = self.env.items()
        try:
            return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


@pytest.fixture
def marked() -> Iterator[Marked]:
    mark = Marked()
    yield mark
    for pid in mark.pids():
        os.kill(pid, signal.SIGKILL)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def _tiny_command() -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(TINY)} {{port}}"


def _states(pids: list[int]) -> set[str]:
    texts = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    return {text.rpartition(")")[2].split()[0] for text in texts}


def test_a_started_server_answers_rests_wakes_and_leaves_nothing(
    tmp_path: Path, marked: Marked
) -> None:
    spec = ServerSpec(
        "tiny", "http://127.0.0.1:{port}/v1", _tiny_command(), marked.env, idle=Idle.PAUSE
    )

    async def live() -> None:
        server = ServerUnderTest(spec, tmp_path)
        await server.start()
        pids = server.pids()
        assert len(pids) == 2 and set(pids) < set(marked.pids())
        assert listening_pid(server.url) in pids

        watch = ServerWatch(server)
        sample = await watch.sample("a")
        assert (sample.processes, sample.running, sample.arm) == (2, 3, "a")
        assert sample.memory_mb is not None and sample.memory_mb > 1
        assert sample.handles is not None and sample.handles >= 6
        assert sample.threads == 2 and sample.cpu_s is not None

        await server.rest()
        wait_until(lambda: _states(pids) == {"T"})
        resting = await watch.sample()
        assert (resting.processes, resting.running) == (2, None)
        await server.wake()
        assert "T" not in _states(pids)
        assert await is_ready(server.url, {})

        server.pause()
        await server.stop()
        assert server.pids() == [] and (await watch.sample()).memory_mb is None
        await server.start()  # at the same address
        assert await is_ready(server.url, {})
        await server.stop()
        await watch.close()

    asyncio.run(live())
    assert marked.pids() == []
    assert (tmp_path / "server-tiny.log").read_text() == "listening\n" * 2


@pytest.mark.parametrize("state", ["running", "pause"])
def test_a_killed_harness_leaves_no_server(tmp_path: Path, marked: Marked, state: str) -> None:
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, _tiny_command(), str(tmp_path), state],
        env=os.environ | marked.env,
        stdout=subprocess.PIPE,
    )
    assert harness.stdout is not None
    with harness, harness.stdout:
        assert harness.stdout.readline() == b"ready\n"
        assert len(marked.pids()) == 4  # harness, keeper, server, daemon
        harness.kill()
    wait_until(lambda: marked.pids() == [])


def test_a_command_that_ends_early_is_told_with_the_end_of_its_log(
    tmp_path: Path, marked: Marked
) -> None:
    script = "print(*range(40), sep=chr(10)); raise SystemExit(3)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    server = ServerUnderTest(
        ServerSpec("hasty", "http://127.0.0.1:{port}", command, marked.env), tmp_path
    )
    with pytest.raises(ServerError, match="server hasty exited with code 3 before") as raised:
        asyncio.run(server.start())
    assert str(raised.value).splitlines()[1:] == [str(number) for number in range(25, 40)]
    assert marked.pids() == []


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path, marked: Marked) -> None:
    spec = ServerSpec("mute", "grpc://127.0.0.1:{port}", "sleep 600", marked.env, None, 0.5)
    with pytest.raises(ServerError, match=r"server mute does not answer .* within 0.5 s"):
        asyncio.run(ServerUnderTest(spec, tmp_path).start())
    assert marked.pids() == []


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_an_address_where_no_server_listens_is_refused_within_seconds(
    tmp_path: Path, scheme: str
) -> None:
    with socket.socket() as held:  # bound and not listening: nothing else can be there
        held.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{held.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(ServerError) as raised:
            asyncio.run(ServerUnderTest(ServerSpec("a", url), tmp_path).start())
    assert time.monotonic() - began_s < 15.0
    assert str(raised.value) == (
        f"server a does not answer at {url} within 5 s; start it, or correct the address."
    )


def test_a_command_that_ignores_being_told_is_killed_after_its_grace(
    tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GRACE_S", 0.3)
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{TINY}"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(deaf)} {{port}}"

    async def live() -> None:
        spec = ServerSpec("deaf", "http://127.0.0.1:{port}", command, marked.env)
        server = ServerUnderTest(spec, tmp_path)
        await server.start()
        assert len(server.pids()) == 2
        await server.stop()

    asyncio.run(live())
    assert marked.pids() == []


def test_a_command_that_cannot_be_found_says_so(tmp_path: Path) -> None:
    spec = ServerSpec("lost", "http://127.0.0.1:{port}", "no-such-command --port {port}")
    with pytest.raises(ServerError, match="exited with code 127") as raised:
        asyncio.run(ServerUnderTest(spec, tmp_path).start())
    assert "no-such-command: No such file or directory" in str(raised.value)
