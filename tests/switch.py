"""A network of our own on this machine: a bridge in a namespace, with a cable to the tests.

`own` names further namespaces of the process that holds the bridge. All that runs in its PID
namespace ends with it, and it ends when the pipe breaks that leads to the tests.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # users often do without the folder of sshd
LIMIT_S = 60.0
_POLL_S = 0.02
_NUMBERS = itertools.count()  # of those made in this process


class Switch:
    """Up until the stack is closed."""

    def __init__(self, stack: ExitStack, own: Sequence[str] = ()) -> None:
        number = next(_NUMBERS)
        self.subnet = f"10.{77 + number % 100}.{os.getpid() % 254 + 1}"
        # Within the 15 letters a name may have, of which a cable needs one more.
        self._port = f"orh{os.getpid()}" + (f"-{number}" if number else "")
        process = start(["unshare", "--net", *own, "cat"], stack)
        self.pid = process.pid
        wait(lambda: has_own(self.pid, "net"), "the switch did not start")
        if "--fork" in own:
            wait(lambda: bool(children(process.pid)), "the switch did not start")
            self.pid = children(process.pid)[0]
        self.ip("link add name switch type bridge")
        self.ip("link set switch up")
        self._cable(self._port, "tests", None)
        stack.callback(run, ["ip", "link", "del", self._port])  # else it goes a moment later
        run(["ip", *f"addr add {self.subnet}.1/24 dev {self._port}".split()])
        run(["ip", *f"link set {self._port} up".split()])

    def connect(self, pid: int, ip: str, port: str) -> None:
        """Give the network namespace of `pid` an `eth0` with this address, at this port."""
        self._cable("eth0", port, pid)
        for line in (
            "link set lo up",
            f"addr add {ip}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.subnet}.1",
        ):
            run(["nsenter", "-t", str(pid), "-n", "ip", *line.split()])

    def ip(self, line: str) -> None:
        """`ip` where the bridge is."""
        run(["nsenter", "-t", str(self.pid), "-n", "ip", *line.split()])

    def _cable(self, name: str, port: str, pid: int | None) -> None:
        """From `port` of the bridge to a namespace; None is that of the tests."""
        made = f"{self._port}x"
        where = [] if pid is None else ["netns", str(pid)]
        run(["ip", *f"link add {made} type veth peer name {name}".split(), *where])
        run(["ip", *f"link set {made} netns {self.pid} name {port}".split()])
        self.ip(f"link set {port} master switch up")


def start(
    command: list[str],
    stack: ExitStack,
    environment: dict[str, str] | None = None,
    log: Path = Path(os.devnull),
) -> subprocess.Popen[str]:
    """A process with pipes to its input and output; it ends when the stack is closed."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env={"PATH": SYSTEM_PATH, "HOME": str(Path.home()), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then end it
        )
    stack.callback(end, process)
    return process


def end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_own(pid: int, kind: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


def wait(condition: Callable[[], bool], trouble: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{trouble} within {LIMIT_S:g} s")
        time.sleep(_POLL_S)


def run(command: list[str], timeout_s: float = LIMIT_S) -> str:
    """What it printed; raises if it failed."""
    done = subprocess.run(
        command,
        env={"PATH": SYSTEM_PATH, "HOME": str(Path.home()), "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
