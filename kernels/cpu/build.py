"""Compiles the C kernels once per machine and keeps the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.kernels.types import KernelUnavailableError

_SOURCE_DIR = Path(__file__).parent
# Contraction is named because results must not depend on a compiler's default; -ffast-math is
# absent because it would reorder sums. Scheduling before register allocation makes the widest loops
# spill.
_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-schedule-insns", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden"),
)
_TIMEOUT_S = 120


def library_path() -> Path:
    """The compiled kernels for this machine, compiled now if they are not in the cache.

    Raises `KernelUnavailableError` if there is no compiler or it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise KernelUnavailableError("no C compiler (cc or gcc) was found on PATH")
    sources = sorted(_SOURCE_DIR.glob("*.[ch]"))
    path = _cache_dir() / f"cpu-{_fingerprint(compiler, sources)}.so"
    if not path.exists():
        _compile(compiler, [s for s in sources if s.suffix == ".c"], path)
    return path


def load_library() -> Path:
    """`library_path`, checked to load in this process."""
    path = library_path()
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailableError(f"the compiled kernels do not load: {error}") from error
    return path


def _cache_dir() -> Path:
    root = os.environ.get("OUTRIDER_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "outrider") / "kernels"


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
    """Compiles to a temporary name and renames, so that no process ever loads half a library."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
            library.replace(path)
    except OSError as error:
        raise KernelUnavailableError(
            f"the kernels cannot be written to {path.parent}: {error}"
        ) from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailableError(f"{command[0]} took over {_TIMEOUT_S} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise KernelUnavailableError(f"{command[0]} failed: {reason}")
    return done.stdout
