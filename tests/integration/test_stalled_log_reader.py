"""A gateway whose stderr is a full pipe serves on, says what it dropped, and ends when told to."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_engine import SECRET, FakeEngine, fake_facts

from outrider.client import Client
from outrider.links.secret import SECRET_VARIABLE
from outrider.log_stream import MAX_QUEUED_CHARS

PIPE_BYTES = 4096  # the least there is
PROMPT = [31999] * 3000  # a line of 16 KiB


@contextmanager
def gateway_with_unread_stderr(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    facts = dataclasses.replace(fake_facts(), max_model_len=2 * len(PROMPT))
    engine = FakeEngine(f"unix:{folder}/engine.sock", facts=facts).start()
    settings = ("server.port=0", "server.grpc_port=0", "server.log_prompts=true")
    command = [sys.executable, "-m", "outrider.gateway", "--engine", engine.address]
    process = subprocess.Popen(
        [*command, *(part for each in settings for part in ("--set", each))],
        env=os.environ | {SECRET_VARIABLE: SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        fcntl.fcntl(process.stderr.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        found = re.search(r"\(HTTP\) and (\S+)", process.stdout.readline())
        assert found is not None
        with Client(found[1]) as client:
            client.wait_ready(60)
            yield process, client
    finally:
        process.kill()
        process.communicate(timeout=60)
        engine.stop()


def test_requests_are_answered_while_nobody_reads_the_log(tmp_path: Path) -> None:
    with gateway_with_unread_stderr(tmp_path) as (process, client):
        num_requests = 2 * MAX_QUEUED_CHARS // 16_384
        for _ in range(num_requests):
            assert len(client.generate(PROMPT, max_tokens=1).token_ids) == 1
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "log lines dropped" in line:
                break
        found = re.search(r"WARNING gateway/0 - outrider.logs: (\d+) log lines dropped", lines[-1])
        assert found is not None
        written = [line for line in lines if " outrider.access: " in line]
        assert len(written) + int(found[1]) == num_requests
        assert all(line.endswith("\n") and "total_s=" in line for line in written), "none is cut"
        client.generate(PROMPT, max_tokens=1)
        assert " outrider.access: " in process.stderr.readline()


def test_an_unread_log_does_not_keep_a_gateway_from_ending(tmp_path: Path) -> None:
    with gateway_with_unread_stderr(tmp_path) as (process, client):
        client.generate(PROMPT, max_tokens=1)
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read(), "what the pipe held"


@pytest.mark.parametrize("num_lines", [1, 3])
def test_what_was_logged_last_is_written_before_the_end(num_lines: int) -> None:
    code = (
        "import logging\n"
        "from outrider.log_stream import guard_stderr\n"
        "from outrider.logs import setup_logging\n"
        "guard_stderr()\n"
        "setup_logging('info')\n"
        f"for i in range({num_lines}): logging.getLogger('outrider.x').info('line %d', i)\n"
        "raise ValueError('the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.count("outrider.x: line") == num_lines
    assert done.stderr.endswith("ValueError: the end\n")


def test_a_server_tells_how_it_fares_whoever_reads_it() -> None:
    code = (
        "import sys\n"
        "from outrider.cli.terminal import Terminal\n"
        "from outrider.cluster.events import Event, EventKind\n"
        "from outrider.config import EngineConfig\n"
        "from outrider.log_stream import guard_stderr\n"
        "guard_stderr()\n"
        "terminal = Terminal(EngineConfig())\n"
        "for _ in range(2000): terminal.say(Event(EventKind.TROUBLE, 'x' * 1000))\n"
        "print('said', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "said\n"
        _, err = process.communicate(timeout=60)
        assert "log lines dropped" in err
    finally:
        process.kill()
        process.communicate(timeout=60)
