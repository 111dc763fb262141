"""Compiles the C kernels once per machine and keeps the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.kernels.cpu.compiling import FLAGS, Compiler, OnProgress
from outrider.kernels.errors import KernelUnavailableError
from outrider.kernels.trust import distrust, trusted_folder

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent
_LOCK_WAIT_S = 120.0  # then it is compiled here, too
_LOCK_POLL_S = 0.05
_ABANDONED_S = 600.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_loaded: dict[tuple[int, int], Path] = {}  # by device and inode


def _silent(text: str) -> None:
    """Discard progress messages."""


def find_compiler() -> Compiler:
    """Raises `KernelUnavailableError` if there is none."""
    program = shutil.which("cc") or shutil.which("gcc")
    if program is None:
        raise KernelUnavailableError("no C compiler (cc or gcc) was found on PATH")
    return Compiler(program)


def library_path(on_progress: OnProgress = _silent, compiler: Compiler | None = None) -> Path:
    """The compiled kernels for this machine, compiled now if the cache has none or a damaged
    one. `on_progress` gets progress messages, from any thread.

    Raises `KernelUnavailableError` if there is no compiler or it fails.
    """
    compiler = compiler or find_compiler()
    path = _folder() / f"cpu-{_fingerprint(compiler)}.so"
    if not _is_there(path):
        with _only_here(path.with_suffix(".lock"), on_progress):
            if not _is_there(path):  # another process may have compiled it meanwhile
                _compile(compiler, path, on_progress)
    return path


def load_library(on_progress: OnProgress = _silent) -> Path:
    """`library_path`, checked to load in this process. The name refers to the file that was
    checked, even if the cache entry is replaced later."""
    try:
        return _load(library_path(on_progress))
    except (OSError, ValueError) as error:  # intact, but built for another machine
        logger.warning("the CPU kernels are compiled again: %s", error)
    try:
        library_path().unlink(missing_ok=True)
        return _load(library_path(on_progress))
    except (OSError, ValueError) as error:
        raise KernelUnavailableError(f"the compiled kernels do not load: {error}") from error


def _is_there(path: Path) -> bool:
    """Whether the library may be loaded; an invalid one is removed."""
    try:
        os.close(_open(path))
        return True
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        logger.warning("the CPU kernels are compiled again: %s: %s", path, error)
        with suppress(OSError):
            path.unlink()
        return False


@contextmanager
def _only_here(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """One process at a time, where files can be locked; waits for another no longer than
    `_LOCK_WAIT_S`."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # a folder that cannot be written to is reported by the compilation
        yield
        return
    try:
        _await_lock(handle, on_progress)
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _await_lock(handle: int, on_progress: OnProgress) -> None:
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            on_progress("waiting for another process to compile the CPU kernels")
            time.sleep(_LOCK_POLL_S)
        except OSError:  # the file system has no locks
            return


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
    """Raises `ValueError` for a file of another user and for a damaged one: loading it would kill
    the process by a signal."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
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


def _fingerprint(compiler: Compiler) -> str:
    digest = hashlib.sha256()
    for part in (*FLAGS, compiler.version(), _cpu_model()):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCE_DIR.glob("*.[ch]")):
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


def _compile(compiler: Compiler, path: Path, on_progress: OnProgress) -> None:
    """Compiles to a temporary name and renames, so that no process ever loads half a library. Its
    digest is appended to it."""
    sources = sorted(_SOURCE_DIR.glob("*.c"))
    try:
        for left in path.parent.glob(f".{path.stem}.*"):  # by processes that were killed
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as folder:
            library = Path(folder) / path.name
            compiler.build(Path(folder), sources, library, on_progress)
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
