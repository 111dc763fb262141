"""Hosts of our own: apart from each other, reached over SSH, cut off at will, gone in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, Hosts, skip_reason
from waits import wait_until

# Has a host, says its pid, and waits to be killed.
HOLDER = """
import sys, time
from hosts import Hosts
with Hosts() as hosts:
    host = hosts.add("held")
    print(host.pid, hosts.folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = skip_reason()
    if reason is not None:
        pytest.skip(reason)
    with Hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def pair(hosts: Hosts) -> tuple[Host, Host]:
    return hosts.add("one"), hosts.add("other")


def reaches(hosts: Hosts, one: Host, other: Host) -> bool:
    knock = f"timeout 1 bash -c '</dev/tcp/{other.ip}/22' && echo yes || echo no"
    return one.run(knock).strip() == "yes"


def test_a_host_has_its_own_name_files_and_processes(hosts: Hosts, pair: tuple[Host, Host]) -> None:
    one, other = pair
    assert hosts.ssh(one, "hostname").strip() == "one"
    hosts.ssh(one, "touch /tmp/seen ~/seen; setsid sleep 50 </dev/null >/dev/null 2>&1 &")
    assert hosts.ssh(other, "ls ~ /tmp | grep seen || echo unseen").strip() == "unseen"
    assert [line for line in one.processes().values() if "sleep" in line] == ["sleep 50"]
    assert other.processes() == {}
    assert "Read-only" in one.run("touch /etc/seen 2>&1 || true")


def test_a_login_shell_there_runs_this_checkout(hosts: Hosts, pair: tuple[Host, Host]) -> None:
    told = hosts.ssh(pair[0], "python -c 'import outrider; print(outrider.__file__)'")
    assert Path(told.strip()).is_relative_to(Path(__file__).resolve().parents[2])


def test_a_host_that_is_cut_off_is_reached_by_nobody(hosts: Hosts, pair: tuple[Host, Host]) -> None:
    one, other = pair
    hosts.cut(other)
    assert not reaches(hosts, one, other)
    hosts.mend(other)
    wait_until(lambda: reaches(hosts, one, other), 20)


def test_hosts_that_are_parted_are_reached_by_others(hosts: Hosts, pair: tuple[Host, Host]) -> None:
    one, other = pair
    hosts.part(one, other)
    assert not reaches(hosts, one, other)
    assert hosts.ssh(one, "echo here") == hosts.ssh(other, "echo here") == "here\n"
    hosts.unite(one, other)
    wait_until(lambda: reaches(hosts, one, other), 20)


def test_nothing_stays_of_hosts_whose_tests_are_killed(hosts: Hosts) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        pid, folder = holder.stdout.readline().split()
        assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=10)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10)
    wait_until(lambda: not Path(f"/sys/class/net/orh{holder.pid}").exists(), 10)
    with Hosts():
        assert not Path(folder).exists()
        assert hosts.folder.exists()
