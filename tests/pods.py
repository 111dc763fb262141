"""Pods in namespaces, without kubelet: what a container runtime does of a pod's spec.

A pod has a network, a host name and IPC of its own; each of its containers has mounts and, unless
`shareProcessNamespace`, processes of its own, a memory cgroup, the user and rights of its security
context, and a read-only root. `kubelet.py` decides when containers start and end, and
`pod_cluster.py` which pods there are.

The image is this machine's programs with the environment of the tests at /opt/outrider, as the
Dockerfiles have it, and a checkout beside it. The engine's image has `ray[default]`; where the
environment has only `ray`, `OUTRIDER_POD_PACKAGES` may name a folder with what else that takes.

Nothing stays, however a test ends: everything runs below one PID namespace that ends when the pipe
to the tests breaks, and mounts and networks go with their processes. Folders and cgroups of
processes that were killed are removed by the next `Machine`.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pod_memory import Memory, size_of
from switch import SYSTEM_PATH, Switch, children, end, run, start, wait

ROOT = Path(__file__).resolve().parents[1]
UID = 10001  # of the images
PROGRAMS = ("ip", "unshare", "nsenter", "mount", "pivot_root", "setpriv")
PREFIX = "/opt/outrider"
PACKAGES = os.environ.get("OUTRIDER_POD_PACKAGES", "")
_CHECKOUT, _PACKAGES = "/opt/checkout", "/opt/packages"
_FOLDER = "outrider-pods-"
_ETC = ("ssl", "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_SHM_BYTES = 64 * 2**20  # what a container has that mounts none
# What the images' Dockerfiles set; PYTHONPATH instead of an installed wheel.
IMAGE_ENV = {
    "PATH": f"{PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HF_HOME": "/var/cache/outrider/hub",
    "OUTRIDER_CACHE": "/var/cache/outrider",
    "OUTRIDER_SERVER_HOST": "0.0.0.0",
    "OUTRIDER_SERVER_ADMIN_PORT": "8081",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": f"{_CHECKOUT}/src" + (f":{_PACKAGES}" if PACKAGES else ""),
    "RAY_USAGE_STATS_ENABLED": "0",
    "TRITON_CACHE_DIR": "/var/cache/outrider/triton",
}
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


@dataclass(frozen=True, slots=True)
class Mount:
    """Of a container: `mode` is ro, rw or tmpfs, whose source is a number of bytes."""

    mode: str
    source: str
    place: str


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
            _write_etc(self.folder / "etc")
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
        fixed = _image_mounts(sandbox, checkout, cgroup)
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


def _image_mounts(sandbox: Sandbox, checkout: Path, cgroup: Path | None) -> list[Mount]:
    """What a container has before its volumes."""
    machine = sandbox.machine
    system = [each for each in ("/bin", "/lib", "/lib32", "/lib64", "/sbin", "/usr")]
    mounts = [Mount("ro", each, each) for each in system if _is_folder(each)]
    mounts += [
        Mount("ro", str(each), f"/etc/{each.name}") for each in (machine.folder / "etc").iterdir()
    ]
    for name in ("hosts", "resolv.conf", "hostname"):
        mounts.append(Mount("ro", str(sandbox.folder / name), f"/etc/{name}"))
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        mounts.append(Mount("ro", str(base), str(base)))
        if Path(sys.base_prefix) != base:
            mounts.append(Mount("ro", str(base), sys.base_prefix))
    mounts += [
        Mount("ro", str(Path(sys.prefix).resolve()), PREFIX),
        Mount("ro", str(_programs(machine, checkout)), f"{PREFIX}/bin"),
        Mount("ro", str(checkout), _CHECKOUT),
        Mount("tmpfs", str(_SHM_BYTES), "/dev/shm"),
    ]
    if PACKAGES:
        mounts.append(Mount("ro", PACKAGES, _PACKAGES))
    if cgroup is not None:  # its own is the root of what it sees
        mounts.append(Mount("tmpfs", "65536", "/sys/fs/cgroup"))
        mounts.append(Mount("ro", str(cgroup), str(machine.memory.place)))
    return mounts


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _programs(machine: Machine, checkout: Path) -> Path:
    """The image's: those of the environment, run by its Python where it is mounted."""
    folder = machine.folder / f"bin-{abs(hash(checkout))}"
    if folder.exists():
        return folder
    folder.mkdir()
    programs = Path(sys.prefix).resolve() / "bin"
    for name in ("ray", "outrider"):
        text = re.sub(r"\A#!.*", f"#!{PREFIX}/bin/python3", (programs / name).read_text())
        (folder / name).write_text(text)
    for name in ("entrypoint.sh", "healthcheck.sh"):
        shutil.copy(checkout / "docker" / name, folder)
    for each in folder.iterdir():
        each.chmod(0o755)
    interpreter = (programs / "python3").resolve()
    for name in ("python", "python3", interpreter.name):
        (folder / name).symlink_to(interpreter)
    return folder


def _write_etc(folder: Path) -> None:
    folder.mkdir()
    for name in _ETC:
        source = Path("/etc") / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, folder / name)
    (folder / "passwd").write_text(
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"outrider:x:{UID}:{UID}::/home/outrider:/bin/bash\n"
    )
    (folder / "group").write_text(f"root:x:0:\noutrider:x:{UID}:\n")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (folder / "profile").write_text(f"export PATH={IMAGE_ENV['PATH']}\n")


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
