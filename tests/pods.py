"""Pods in namespaces, without kubelet: what a container runtime does of a pod's spec.

A pod has a network, a host name and IPC of its own; each of its containers has mounts and, unless
`shareProcessNamespace`, processes of its own, a memory cgroup, the user and rights of its security
context, and a read-only root. `kubelet.py` decides when containers start and end, and
`pod_cluster.py` which pods there are.

Nothing stays, however a test ends: everything runs below one PID namespace that ends when the pipe
to the tests breaks, and mounts and networks go with their processes. Folders and cgroups of
processes that were killed are removed by the next `Machine`.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pod_image import IMAGE_ENV, UID, Mount, image_mounts, write_etc
from pod_memory import Memory, size_of
from switch import SYSTEM_PATH, Switch, children, end, run, start, wait

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("ip", "unshare", "nsenter", "mount", "pivot_root", "setpriv")
_FOLDER = "outrider-pods-"
# boot CGROUP ROOT UID GID MOUNTS COMMAND...: the first process of a container.
_BOOT = r"""
set -eu
cgroup=$1 root=$2 uid=$3 gid=$4 mounts=$5
shift 5
[ -z "$cgroup" ] || echo 0 > "$cgroup/cgroup.procs"
ulimit -n 1048576 2>/dev/null || true
mount -t tmpfs -o mode=755,size=16m tmpfs "$root"
cd "$root"
mkdir -p proc sys dev/pts home/outrider etc opt var/cache/outrider run mnt
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755,size=64k tmpfs dev
mkdir dev/shm
for each in null zero full random urandom tty; do
  : > "dev/$each"
  mount --bind "/dev/$each" "dev/$each"
done
ln -s /proc/self/fd dev/fd
for each in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${each%:*}" "dev/${each#*:}"; done
for each in /bin /lib /lib32 /lib64 /sbin; do [ ! -L "$each" ] || cp -a "$each" .; done
while read -r mode source place; do
  if [ "$mode" = tmpfs ]; then
    mkdir -p ".$place" && mount -t tmpfs -o "mode=1777,size=$source" tmpfs ".$place"
    continue
  fi
  if [ -d "$source" ]; then mkdir -p ".$place"; else mkdir -p ".${place%/*}" && : > ".$place"; fi
  mount -o "bind,$mode" "$source" ".$place"
done < "$mounts"
mount -o remount,ro "$root"
pivot_root . .
umount -l .
cd /home/outrider
exec setpriv --reuid "$uid" --regid "$gid" --groups "$gid" --bounding-set -all --inh-caps -all \
  --ambient-caps -all --no-new-privs -- "$@"
"""
_PAUSE = 'hostname "$1"; echo up; cat; :'  # bash waits for orphans too, as pause does


class Machine:
    """Where pods are: a network, a PID namespace and a folder; leaving the context ends them."""

    def __init__(self) -> None:
        _sweep()
        self._num_pods = 0
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.memory = stack.enter_context(Memory(self.folder.name))
            for name in ("root", "logs", "pods"):
                (self.folder / name).mkdir()
            write_etc(self.folder / "etc")
            own = ["--pid", "--mount", "--fork", "--kill-child"]
            self.switch = Switch(stack, own)
            owners = ("self", self.switch.pid)
            self.mounts = {os.readlink(f"/proc/{each}/ns/mnt") for each in owners}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, *command: str) -> None:
        """Where volumes are mounted."""
        run(["nsenter", "-t", str(self.switch.pid), "-m", "--", *command])

    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.switch.pid), "-p", "-m", "--"]

    def sandbox(self, name: str) -> Sandbox:
        """A pod without containers."""
        self._num_pods += 1
        ip, port = f"{self.switch.subnet}.{self._num_pods % 240 + 10}", f"pod{self._num_pods}"
        folder = self.folder / "pods" / name
        folder.mkdir()
        own = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        stack = ExitStack()
        process = start([*self.enter(), *own, "bash", "-c", _PAUSE, "pause", name], stack)
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise RuntimeError(f"pod {name} has no sandbox")
        ((pause,),) = (children(each) for each in children(process.pid))
        self.switch.connect(pause, ip, port)
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        (folder / "resolv.conf").write_text("")
        (folder / "hostname").write_text(f"{name}\n")
        return Sandbox(self, name, ip, pause, folder, process)


@dataclass
class Sandbox:
    """What the containers of a pod share."""

    machine: Machine
    name: str
    ip: str
    pid: int
    folder: Path
    process: subprocess.Popen[str]
    _mounted: list[Path] = field(default_factory=list)

    def write_hosts(self, text: str) -> None:
        """In one piece, as it is mounted and read meanwhile."""
        padded = text.encode().ljust(16384, b"\n")
        handle = os.open(self.folder / "hosts", os.O_WRONLY)
        try:
            os.pwrite(handle, padded, 0)
        finally:
            os.close(handle)

    def empty_dir(self, name: str, volume: Mapping[str, Any], warm: Path | None) -> Path:
        """A new folder; one on top of `warm` has its files, whatever becomes of them there."""
        folder = self.folder / "volumes" / name
        folder.mkdir(parents=True)
        options = None
        if volume.get("medium") == "Memory":
            size = size_of(volume.get("sizeLimit")) or 2**30
            options = ["tmpfs", "tmpfs", f"size={size}"]
        elif warm is not None:
            layers = self.folder / "layers" / name
            for each in ("upper", "work"):
                (layers / each).mkdir(parents=True)
            parts = f"lowerdir={warm},upperdir={layers}/upper,workdir={layers}/work"
            options = ["overlay", "overlay", parts]
        if options is not None:
            kind, source, parts = options
            self.machine.run("mount", "-t", kind, "-o", parts, source, str(folder))
            self._mounted.append(folder)
        for command in (["chown", f"0:{UID}"], ["chmod", "2777"]):
            self.machine.run(*command, str(folder))
        return folder

    def files(self, name: str, data: Mapping[str, bytes]) -> Path:
        """A volume of a ConfigMap or a Secret."""
        folder = self.folder / "volumes" / name
        folder.mkdir(parents=True)
        for each, content in data.items():
            (folder / each).write_bytes(content)
        return folder

    def processes(self) -> dict[int, str]:
        """Command lines of all its containers, by pids as the tests see them."""
        own = os.readlink(f"/proc/{self.pid}/ns/net")
        found = _processes("net", own)
        return {pid: line for pid, line in found if line and not _is_wrapper(line)}

    def remove(self) -> None:
        """With all that runs in it, at once."""
        end(self.process)
        for each in self._mounted:
            with suppress(RuntimeError):
                self.machine.run("umount", "-l", str(each))
        shutil.rmtree(self.folder, ignore_errors=True)


class Running:
    """A container's processes."""

    def __init__(
        self,
        sandbox: Sandbox,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        checkout: Path,
        *,
        user: tuple[int, int] = (UID, UID),
        memory_bytes: int | None = None,
        shares_processes: bool = False,
    ) -> None:
        machine = sandbox.machine
        self.log = machine.folder / "logs" / f"{sandbox.name}.{name}.log"
        self._environment = dict(environment)
        self._user = user
        self._sandbox = sandbox
        cgroup = machine.memory.group(f"{sandbox.name}.{name}", memory_bytes)
        listed = sandbox.folder / f"{name}.mounts"
        seen = None if cgroup is None else (cgroup, machine.memory.place)
        fixed = image_mounts(machine.folder, sandbox.folder, checkout, seen)
        given = {each.place for each in mounts}
        every = [*(each for each in fixed if each.place not in given), *mounts]
        listed.write_text("".join(f"{m.mode} {m.source} {m.place}\n" for m in every))
        target = ["nsenter", "-t", str(sandbox.pid), "-n", "-u", "-i"]
        self._depth = 1 if shares_processes else 2
        self._mounts = ""  # namespace of its mounts, once it has one
        if shares_processes:
            enter = [*target, "-p", f"--mount=/proc/{machine.switch.pid}/ns/mnt", "--"]
            enter += ["unshare", "--mount"]
        else:
            enter = [*machine.enter(), *target, "--", "unshare", "--mount", "--pid", "--fork"]
        boot = [str(cgroup or ""), str(machine.folder / "root"), *map(str, user), str(listed)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*enter, "bash", "-c", _BOOT, "boot", *boot, *command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait(self._has_begun, f"{sandbox.name}: container {name} did not start")

    def _has_begun(self) -> bool:
        """It has its mounts, and its user's rights: what boots it has neither."""
        if self.process.poll() is not None:
            return True
        with suppress(OSError):
            pid = self.pid
            status = Path(f"/proc/{pid}/status").read_text() if pid and self._mounts else ""
            return f"\nUid:\t{self._user[0]}\t" in status
        return False

    @property
    def pid(self) -> int | None:
        """Of its first process, as the tests see it: those above it only wait for it."""
        pid = self.process.pid
        try:
            for _ in range(self._depth):
                (pid,) = children(pid)
            mounts = os.readlink(f"/proc/{pid}/ns/mnt")
        except (OSError, ValueError):
            return None
        if mounts not in self._sandbox.machine.mounts:
            self._mounts = mounts
        return pid

    def exit_code(self) -> int | None:
        return self.process.poll()

    def signal(self, number: signal.Signals) -> None:
        """To its first process."""
        pid = self.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """All of its processes, which are those with its mounts, orphans included."""
        self.signal(signal.SIGKILL)
        for each, _ in list(_processes("mnt", self._mounts)) if self._mounts else ():
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Exit status and output of a command inside, as of its user."""
        uid, gid = map(str, self._user)
        pid = self.pid
        if pid is None:
            return 1, "the container has no process"
        rights = ["--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
        enter = ["nsenter", "-t", str(pid), "-m", "-p", "-n", "-u", "-i", "--"]
        become = ["setpriv", "--reuid", uid, "--regid", gid, "--groups", gid, *rights, "--"]
        try:
            done = subprocess.run(
                [*enter, *become, *command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return 124, "timed out"
        return done.returncode, done.stdout + done.stderr


def _processes(kind: str, own: str) -> Iterator[tuple[int, str]]:
    """Those in one namespace of this kind."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has ended
            if os.readlink(entry / "ns" / kind) == own:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(entry.name), line.decode(errors="replace").strip()


def _is_wrapper(line: str) -> bool:
    """One that makes namespaces and waits, or the pod's pause."""
    return line == "cat" or _PAUSE in line or Path(line.split()[0]).name in ("nsenter", "unshare")


def decoded(item: Mapping[str, Any]) -> dict[str, bytes]:
    """The data of a ConfigMap or a Secret."""
    data = item.get("data") or {}
    if item["kind"] == "Secret":
        text = {k: v.encode() for k, v in (item.get("stringData") or {}).items()}
        return {name: base64.b64decode(value) for name, value in data.items()} | text
    return {name: value.encode() for name, value in data.items()}


@cache
def skip_reason() -> str | None:
    """Why there can be no pods here, in a sentence; None if there can be."""
    if os.geteuid() != 0:
        return "pods of our own need root."
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"pods of our own need {', '.join(missing)}."
    try:
        with Machine() as machine:
            sandbox = machine.sandbox("trial")
            trial = Running(sandbox, "trial", ["true"], IMAGE_ENV, [], ROOT)
            wait(lambda: trial.exit_code() is not None, "a container did not end")
            if trial.exit_code() != 0:
                return f"this machine gives no pods of our own: {trial.log.read_text()}"
            sandbox.remove()
    except (subprocess.SubprocessError, RuntimeError, OSError) as error:
        return f"this machine gives no pods of our own: {error}"
    return None


def _sweep() -> None:
    """Folders and cgroups that tests left behind which were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            Memory(folder.name).remove()
            shutil.rmtree(folder, ignore_errors=True)
