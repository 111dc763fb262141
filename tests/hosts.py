"""Hosts of our own on one machine: each has a network, processes, mounts and a name of its own, and
an SSH server; nothing that runs on one is seen by another but over the network between them.

    with Hosts() as hosts:
        head, target, draft = (hosts.add(name) for name in ("head", "target", "draft"))
        hosts.ssh(target, "hostname")  # as anybody would; target.run("hostname") goes without SSH
        hosts.cut(target)              # nobody reaches it, nor does it reach anybody
        hosts.mend(target)
        hosts.part(target, draft)      # these two do not reach each other; all others reach both
        hosts.unite(target, draft)
        hosts.remove(draft)            # as if its power were cut
        head.processes()               # command lines, by pids as the tests see them

The tests reach every host at `host.ip`. A host sees the machine's files, read-only, so that the
environment of the tests serves all of them; `/tmp`, `/run`, `/dev/shm` and the home folder are its
own and in memory. Login shells there find the programs of the environment and this checkout.

`skip_reason()` says what is missing where this cannot be: root, programs or rights.

Nothing stays, however a test ends: namespaces, interfaces and mounts vanish with the processes in
them, and these end when the pipe breaks that leads to the tests. Only a folder of keys and logs
could stay, and the next `Hosts` removes those of processes that are gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

from switch import SYSTEM_PATH, Switch, children, end, has_own, run, start, wait

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("ip", "ssh", "ssh-keygen", "sshd", "rsync", "unshare", "nsenter", "mount")
SSH_OPTIONS = (
    *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
    *("-o", "LogLevel=ERROR", "-o", "ConnectTimeout=10", "-o", "BatchMode=yes"),
)
_PREFIX = "outrider-hosts-"
_RUN_S = 60.0
_SSH_PORT = 22
_SHARED = [str(ROOT), *sorted({sys.prefix, sys.base_prefix})]
# What the first process of a host does. Its input ends with the tests, and the host ends with it.
_BOOT = r"""
set -eu
hostname "$NAME"
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -m 1777 /mnt/tmp && mkdir -m 700 /mnt/home && mkdir -p /mnt/run/sshd /mnt/upper /mnt/work
for shared in $SHARED; do  # what the folders of its own would hide
  case "$shared" in
    /tmp/*) place=/mnt$shared ;;
    "$HOME"/*) place=/mnt/home${shared#"$HOME"} ;;
    *) continue ;;
  esac
  mkdir -p "$place"
  mount --bind "$shared" "$place"
  mount -o remount,bind,ro "$place"
done
mkdir -p /mnt/home/.ssh /mnt/home/.cache/outrider
if [ -d "$HOME/.cache/outrider" ]; then  # converted weights, which take a while
  mount -t overlay overlay /mnt/home/.cache/outrider \
    -o "lowerdir=$HOME/.cache/outrider,upperdir=/mnt/upper,workdir=/mnt/work" || true
fi
cp "$FOLDER/key.pub" /mnt/home/.ssh/authorized_keys
cp "$FOLDER/profile" /mnt/home/.bashrc
cp "$FOLDER/profile" /mnt/home/.bash_profile
cp "$FOLDER/host_key" "$FOLDER/sshd_config" /mnt/run/
mount -o remount,bind,ro /
mount --rbind /mnt/tmp /tmp
mount --rbind /mnt/run /run
mount --rbind /mnt/home "$HOME"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cd /
exec 3<&0
env -i PATH="$PATH" /usr/sbin/sshd -f /run/sshd_config -E /run/sshd.log </dev/null >/dev/null 3<&-
echo up
cat <&3 >/dev/null
"""
_SSHD = f"""
Port {_SSH_PORT}
HostKey /run/host_key
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
StrictModes no
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True, slots=True)
class Host:
    """One of `Hosts`."""

    name: str
    ip: str
    port: str  # of the switch
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """Of its first process, as the tests see it."""
        return children(self.process.pid)[0]

    def run(self, command: str, timeout_s: float = _RUN_S) -> str:
        """What a login shell on the host printed; raises if it failed."""
        enter = ["nsenter", "-t", str(self.pid), "-a", "--wd=/", "--"]
        return run([*enter, "bash", "--login", "-c", command], timeout_s)

    def processes(self) -> dict[int, str]:
        """Whatever runs there but for its first process, its SSH server and sessions of that."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            with suppress(OSError):  # it has ended
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if os.readlink(entry / "ns" / "pid") == own and line and not _is_host_itself(line):
                    found[int(entry.name)] = line
        return found


def _is_host_itself(line: str) -> bool:
    return line == "cat" or line.startswith("sshd:") or "sshd -f /run/sshd_config" in line


class Hosts:
    """Hosts on a network of their own; leaving the context ends them."""

    def __init__(self) -> None:
        _sweep()
        self._stack = ExitStack()
        self._hosts: dict[str, Host] = {}
        self._num_added = 0

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._write_files()
            self._switch = Switch(stack)
            self._stack = stack.pop_all()
        return self

    @property
    def key(self) -> Path:
        """The private key that every host lets in."""
        return self.folder / "key"

    def add(self, name: str) -> Host:
        """A host that is up and lets the key in as root."""
        assert name not in self._hosts, f"there is a host {name} already"
        self._num_added += 1
        ip, port = f"{self._switch.subnet}.{self._num_added + 10}", f"port{self._num_added}"
        environment = {"NAME": name, "FOLDER": str(self.folder), "SHARED": " ".join(_SHARED)}
        own = ["--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc"]
        command = ["unshare", *own, "--fork", "--kill-child", "bash", "-c", _BOOT]
        process = start(command, self._stack, environment, self.folder / f"{name}.log")
        wait(lambda: has_own(process.pid, "net"), f"host {name} did not start")
        self._switch.connect(process.pid, ip, port)
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise RuntimeError(f"host {name}: {(self.folder / f'{name}.log').read_text()}")
        host = self._hosts[name] = Host(name, ip, port, process)
        return host

    def ssh(self, host: Host, command: str, timeout_s: float = _RUN_S) -> str:
        options = [*SSH_OPTIONS, "-i", str(self.key), "-p", str(_SSH_PORT)]
        wrapped = f"bash --login -c {shlex.quote(command)}"
        return run(["ssh", *options, f"root@{host.ip}", wrapped], timeout_s)

    def cut(self, host: Host) -> None:
        """Pull its cable: what is sent to it is lost, and nobody is told."""
        self._switch.ip(f"link set {host.port} down")

    def mend(self, host: Host) -> None:
        self._switch.ip(f"link set {host.port} up")

    def part(self, one: Host, other: Host) -> None:
        """What these two send to each other is lost. All hosts parted at a time are in one set."""
        for host in (one, other):
            self._switch.ip(f"link set {host.port} type bridge_slave isolated on")

    def unite(self, one: Host, other: Host) -> None:
        for host in (one, other):
            self._switch.ip(f"link set {host.port} type bridge_slave isolated off")

    def remove(self, host: Host) -> None:
        """End it with all that runs there, at once."""
        end(host.process)
        del self._hosts[host.name]

    def _write_files(self) -> None:
        for name in ("key", "host_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            run(make)
        (self.folder / "sshd_config").write_text(_SSHD)
        programs = Path(sys.executable).parent
        lines = [
            f"export PATH={shlex.quote(str(programs))}:{SYSTEM_PATH}",
            f"export PYTHONPATH={shlex.quote(str(ROOT / 'src'))} HF_HUB_OFFLINE=1",
            "export PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES= PS1='$ '",
        ]
        (self.folder / "profile").write_text("\n".join(lines) + "\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


@cache
def skip_reason() -> str | None:
    """Why there can be no such hosts here, in a sentence; None if there can be."""
    if os.geteuid() != 0:
        return "hosts of our own need root."
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"hosts of our own need {', '.join(missing)}; `make hosts` installs them."
    try:
        with Hosts() as hosts:
            hosts.add("trial")
    except (subprocess.SubprocessError, RuntimeError, OSError, AssertionError) as error:
        return f"this machine gives no hosts of our own: {error}"
    return None


def _sweep() -> None:
    """What tests left behind that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
