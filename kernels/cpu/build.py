"""Compiles the C kernels once per machine and keeps the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.kernels.trust import distrust, trusted_folder
from outrider.kernels.types import KernelUnavailableError

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent
# Contraction is named because results must not depend on a compiler's default; -ffast-math is
# absent because it would reorder sums. Scheduling before register allocation makes the widest loops
# spill.
_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-schedule-insns", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden"),
)
_TIMEOUT_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size
_loaded: dict[tuple[int, int], Path] = {}  # by device and inode


def library_path() -> Path:
    """The compiled kernels for this machine, compiled now if they are not in the cache, or damaged
    there.

    Raises `KernelUnavailableError` if there is no compiler or it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise KernelUnavailableError("no C compiler (cc or gcc) was found on PATH")
    sources = sorted(_SOURCE_DIR.glob("*.[ch]"))
    path = _folder() / f"cpu-{_fingerprint(compiler, sources)}.so"
    try:
        os.close(_open(path))
    except FileNotFoundError:
        _compile(compiler, [s for s in sources if s.suffix == ".c"], path)
    except (OSError, ValueError) as error:
        logger.warning("the CPU kernels are compiled again: %s: %s", path, error)
        _compile(compiler, [s for s in sources if s.suffix == ".c"], path)
    return path


def load_library() -> Path:
    """`library_path`, checked to load in this process. The name stands for the very file that was
    checked, whatever takes its place in the cache."""
    try:
        return _load(library_path())
    except (OSError, ValueError) as error:  # whole, and yet made for another machine
        logger.warning("the CPU kernels are compiled again: %s", error)
    try:
        library_path().unlink(missing_ok=True)
        return _load(library_path())
    except (OSError, ValueError) as error:
        raise KernelUnavailableError(f"the compiled kernels do not load: {error}") from error


def _load(path: Path) -> Path:
    handle = _open(path)
    found = os.fstat(handle)
    loaded = _loaded.get((found.st_dev, found.st_ino))
    if loaded is not None:
        os.close(handle)
        return loaded
    name = Path(f"/proc/self/fd/{handle}")  # stays open: the loader knows libraries by name
    try:
        ctypes.CDLL(str(name))
    except OSError:
        os.close(handle)
        raise
    return _loaded.setdefault((found.st_dev, found.st_ino), name)


def _open(path: Path) -> int:
    """Raises `ValueError` for a file of another user, and for one that is not as it was written:
    the loader would end the process by a signal."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file")
        if (reason := distrust(found)) is not None:
            raise ValueError(reason)
        with open(handle, "rb", closefd=False) as file:
            contents = file.read()
        library, digest = contents[:-_DIGEST_BYTES], contents[-_DIGEST_BYTES:]
        if hashlib.sha256(library).digest() != digest:
            raise ValueError("it is damaged")
    except BaseException:
        os.close(handle)
        raise
    return handle


def _folder() -> Path:
    try:
        return trusted_folder(_cache_dir(), "kernels")
    except OSError as error:
        raise _unwritable(_cache_dir(), error) from error


def _cache_dir() -> Path:
    root = os.environ.get("OUTRIDER_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "outrider") / "kernels"


def _fingerprint(compiler: str, sources: list[Path]) -> str:
    digest = hashlib.sha256()
    for part in (*_FLAGS, _run([compiler, "--version"]), _cpu_model()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _cpu_model() -> str:
    """What -march=native depends on; a cache folder may be shared between machines."""
    prefixes = ("model name", "cpu part", "cpu implementer", "flags", "features")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described = sorted({line for line in lines if line.lower().startswith(prefixes)})
    return "\n".join([platform.machine(), platform.processor(), *described])


def _compile(compiler: str, sources: list[Path], path: Path) -> None:
    """Compiles to a temporary name and renames, so that no process ever loads half a library. Its
    digest is appended to it."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            library = Path(folder) / path.name
            objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
            commands = [
                [compiler, *_FLAGS, "-c", str(source), "-o", made]
                for source, made in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(os.cpu_count()) as side_by_side:
                for _ in side_by_side.map(_run, commands):
                    pass
            _run([compiler, *_FLAGS, *objects, "-lm", "-o", str(library)])
            seal(library)
            library.replace(path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def seal(library: Path) -> None:
    """Append the digest that `_open` looks for; the loader ignores it."""
    digest = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(digest)
    library.chmod(0o755)


def _unwritable(folder: Path, error: OSError) -> KernelUnavailableError:
    return KernelUnavailableError(f"the kernels cannot be written to {folder}: {error}")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailableError(f"{command[0]} took over {_TIMEOUT_S} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise KernelUnavailableError(f"{command[0]} failed: {reason}")
    return done.stdout
