"""The image that containers of the tests run: this machine's programs with the environment of the
tests at /opt/outrider, as the Dockerfiles have it, and a checkout beside it.

The engine's image has `ray[default]`; where the environment has only `ray`, `OUTRIDER_POD_PACKAGES`
may name a folder with what else that takes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

UID = 10001  # of the images
PREFIX = "/opt/outrider"
PACKAGES = os.environ.get("OUTRIDER_POD_PACKAGES", "")
_CHECKOUT, _PACKAGES = "/opt/checkout", "/opt/packages"
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


@dataclass(frozen=True, slots=True)
class Mount:
    """Of a container: `mode` is ro, rw or tmpfs, whose source is a number of bytes."""

    mode: str
    source: str
    place: str


def image_mounts(
    folder: Path, pod: Path, checkout: Path, cgroup: tuple[Path, Path] | None
) -> list[Mount]:
    """What a container has before its volumes. The folders are those of the machine and of the pod,
    the cgroup comes with its place."""
    system = [each for each in ("/bin", "/lib", "/lib32", "/lib64", "/sbin", "/usr")]
    mounts = [Mount("ro", each, each) for each in system if _is_folder(each)]
    mounts += [Mount("ro", str(each), f"/etc/{each.name}") for each in (folder / "etc").iterdir()]
    for name in ("hosts", "resolv.conf", "hostname"):
        mounts.append(Mount("ro", str(pod / name), f"/etc/{name}"))
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        mounts.append(Mount("ro", str(base), str(base)))
        if Path(sys.base_prefix) != base:
            mounts.append(Mount("ro", str(base), sys.base_prefix))
    mounts += [
        Mount("ro", str(Path(sys.prefix).resolve()), PREFIX),
        Mount("ro", str(_programs(folder, checkout)), f"{PREFIX}/bin"),
        Mount("ro", str(checkout), _CHECKOUT),
        Mount("tmpfs", str(_SHM_BYTES), "/dev/shm"),
    ]
    if PACKAGES:
        mounts.append(Mount("ro", PACKAGES, _PACKAGES))
    if cgroup is not None:  # its own is the root of what it sees
        mounts.append(Mount("tmpfs", "65536", "/sys/fs/cgroup"))
        mounts.append(Mount("ro", *map(str, cgroup)))
    return mounts


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _programs(parent: Path, checkout: Path) -> Path:
    """The image's: those of the environment, run by its Python where it is mounted."""
    folder = parent / f"bin-{abs(hash(checkout))}"
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


def write_etc(folder: Path) -> None:
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
    (folder / "host.conf").write_text("multi on\n")  # all addresses of a name
    (folder / "profile").write_text(f"export PATH={IMAGE_ENV['PATH']}\n")
