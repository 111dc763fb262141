"""The build steps of the images without Docker: what they install runs as a container runs it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import MODEL, SECRET, FakeEngine
from waits import wait_until
from wheel_tools import DOCKER, Built, clean_environment, install, only_packages, run

from outrider.client import Client

pytestmark = pytest.mark.alone

START_S = 300.0
STOP_S = 40.0
QUESTION = {"role": "user", "content": "Who are you?"}


class Started:
    """A command that writes to a log, and ends with the test."""

    def __init__(self, log: Path, *command: str | Path, **variables: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                list(map(str, command)),
                env=clean_environment() | {"OMP_NUM_THREADS": "1"} | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def find(self, pattern: str) -> str:
        """What the pattern's group matches in the log, waited for."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.log)

        wait_until(lambda: found() is not None or self.process.poll() is not None, START_S)
        match = found()
        assert match is not None, f"no {pattern!r} in:\n{self.log}"
        return match[1]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


@contextmanager
def started(log: Path, *command: str | Path, **variables: str) -> Iterator[Started]:
    running = Started(log, *command, **variables)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


# -- the first process of a container ---------------------------------------------------------


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def namespace() -> list[str]:
    """Runs what follows as the first process of a namespace, all of which ends with `unshare`."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        pytest.skip("only root may make a PID namespace")
    try:
        done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode:
        pytest.skip(f"no PID namespace can be made here: {done.stderr.strip()}")
    return command


def first_process(running: Started) -> int:
    wait_until(lambda: bool(children(running.process.pid)), START_S)
    return children(running.process.pid)[0]


@pytest.mark.model
def test_the_engines_environment_serves_as_the_first_process_and_ends_in_order(
    engine_programs: Path, namespace: list[str], tmp_path: Path
) -> None:
    programs = engine_programs
    command = (programs / "entrypoint.sh", programs / "outrider", "serve", "--no-ray")
    ports = ("--port", "0", "--grpc-port", "0", "--admin-port", "0")
    model = ("--model", MODEL, "--draft-model", MODEL, "--set", "cache.kv_cache_gb=0.05")
    with started(tmp_path / "log", *namespace, *command, *ports, *model) as running:
        url = running.find(r"listening on (http://\S+)")
        admin = running.find(r"for probes on http://\S+:(\d+)")
        first = first_process(running)
        answer = ask(f"{url}/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4
        run(programs / "healthcheck.sh", OUTRIDER_SERVER_ADMIN_PORT=admin)

        os.kill(first, signal.SIGTERM)
        assert running.process.wait(STOP_S) == 0, running.log
    assert not Path(f"/proc/{first}").exists()


ORPHANS = """
import os, time
if os.fork() == 0:  # whose children are left behind
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(0.1)
            os._exit(0)
    os._exit(0)
os.wait()
time.sleep(60)
"""


def test_the_first_process_reaps_what_was_left_behind(namespace: list[str], tmp_path: Path) -> None:
    command = (DOCKER / "entrypoint.sh", sys.executable, "-c", ORPHANS)
    with started(tmp_path / "log", *namespace, *command) as running:
        first = first_process(running)
        wait_until(lambda: len(children(first)) == 6, START_S)
        wait_until(lambda: len(children(first)) == 1, START_S)
        assert not is_zombie(children(first)[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_signal_to_end_reaches_the_command_as_sigterm_and_its_status_is_kept(
    namespace: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    script = 'trap "echo told; exit 7" TERM; echo up; while :; do sleep 0.05; done'
    # A shell cannot trap what was ignored when it began, as it is in tests that run under nohup.
    heard = ("env", "--default-signal=INT,HUP")
    command = (*heard, DOCKER / "entrypoint.sh", "sh", "-c", script)
    with started(tmp_path / "log", *namespace, *command) as running:
        running.find("(up)")
        os.kill(first_process(running), number)
        assert running.process.wait(STOP_S) == 7
        assert running.log == "up\ntold\n"


@pytest.mark.parametrize("status", [0, 3])
def test_the_first_process_ends_as_its_command_ends(status: int) -> None:
    done = subprocess.run(
        [DOCKER / "entrypoint.sh", "sh", "-c", f"cat; exit {status}"],
        input=b"what came in",
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (status, b"what came in")


# -- the gateway without torch and Ray --------------------------------------------------------


@pytest.fixture(scope="module")
def gateway_programs(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the gateway's requirements, and nothing else."""
    folder = tmp_path_factory.mktemp("slim")
    lines = (DOCKER / "gateway-requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if not line.startswith("#")]
    packages = only_packages(wanted, folder / "packages")
    return install("gateway", built.wheel, folder / "prefix", packages)


def test_the_gateways_image_has_neither_torch_nor_ray(gateway_programs: Path) -> None:
    names = ("torch", "ray", "grpc", "jinja2")
    script = f"from importlib.util import find_spec; print(*filter(find_spec, {names}))"
    assert run(gateway_programs / "python", "-c", script) == "grpc jinja2\n"


def test_the_gateways_image_serves_both_protocols_chat_and_metrics(
    gateway_programs: Path, tmp_path: Path
) -> None:
    engine = FakeEngine(f"unix:{tmp_path}/e-{secrets.token_hex(3)}").start()
    command = (gateway_programs / "python", "-m", "outrider.gateway", "--engine", engine.address)
    ports = ("--set", "server.port=0", "--set", "server.grpc_port=0")
    try:
        with started(tmp_path / "log", *command, *ports, OUTRIDER_SECRET=SECRET) as running:
            url = "http://" + running.find(r"listening on (\S+) \(HTTP\)")
            with Client(running.find(r"\(HTTP\) and ([^\s;]+)")) as client:
                client.wait_ready(START_S)
                assert client.generate("Hello", max_tokens=3).usage.completion_tokens == 3
            body = {"model": MODEL, "messages": [QUESTION], "max_tokens": 3}
            answer = ask(f"{url}/v1/chat/completions", body)
            assert answer["usage"]["completion_tokens"] == 3
            with urllib.request.urlopen(f"{url}/metrics", timeout=30) as metrics:
                assert b"outrider:request_success_total" in metrics.read()
            with urllib.request.urlopen(f"{url}/", timeout=30) as page:
                assert b"<html" in page.read()
            running.process.terminate()
            assert running.process.wait(STOP_S) == 0, running.log
    finally:
        engine.stop()
