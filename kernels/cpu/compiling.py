"""Compiles the C kernels: files in parallel, system headers precompiled once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.kernels.errors import KernelUnavailableError

# Contraction is named because results must not depend on a compiler's default; -ffast-math is
# absent because it would reorder sums. Scheduling before register allocation makes the widest loops
# spill.
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-schedule-insns", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden"),
)
_HEADER = "system.h"
# They take longer than all others together, so they do not wait for the precompiled header.
_SLOWEST = ("quant_avx512.c", "quant_neon.c")
_TIMEOUT_S = 120

OnProgress = Callable[[str], None]


class Compiler:
    """One C compiler. `stop` may be called from any thread: it kills running compilations and
    prevents new ones."""

    def __init__(self, program: str) -> None:
        self.program = program
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def version(self) -> str:
        return self._run("--version")

    def build(
        self, folder: Path, sources: Sequence[Path], library: Path, on_progress: OnProgress
    ) -> None:
        """Compile the sources to `library`, with intermediate files in `folder`, which is empty."""
        headers, num_done, counting = folder / "headers", 0, threading.Lock()
        headers.mkdir()
        first = [source for source in sources if source.name in _SLOWEST]
        rest = [source for source in sources if source not in first]

        def compile_one(source: Path, *options: str) -> str:
            nonlocal num_done
            made = str(folder / f"{source.stem}.o")
            self._run(*FLAGS, *options, "-c", str(source), "-o", made)
            with counting:
                num_done += 1
                on_progress(f"compiling CPU kernels ({num_done} of {len(sources)})")
            return made

        on_progress(f"compiling CPU kernels (0 of {len(sources)})")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as side_by_side:
            begun = [side_by_side.submit(compile_one, source) for source in first]
            header = side_by_side.submit(self._read_once, sources[0].parent / _HEADER, headers)
            options = header.result()
            begun += [side_by_side.submit(compile_one, source, *options) for source in rest]
            try:
                objects = [each.result() for each in begun]
            except KernelUnavailableError:
                side_by_side.shutdown(wait=False, cancel_futures=True)
                raise
        self._run(*FLAGS, *objects, "-lm", "-o", str(library))

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                _end(process)

    def _read_once(self, header: Path, folder: Path) -> tuple[str, ...]:
        """Options to include the precompiled header; none if it does not compile: it only saves
        time."""
        copy = folder / header.name
        copy.write_bytes(header.read_bytes())
        with contextlib.suppress(KernelUnavailableError):
            made = f"{copy}.gch"
            self._run(*FLAGS, "-x", "c-header", str(copy), "-o", made)
            return "-include", str(copy)
        return ()

    def _run(self, *arguments: str) -> str:
        command = [self.program, *arguments]
        with self._lock:
            if self._is_stopped:
                raise KernelUnavailableError(f"{self.program} was stopped")
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # compilers have children, which end with them
            )
            self._running.add(process)
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            _end(process)
            process.communicate()
            raise KernelUnavailableError(f"{self.program} took over {_TIMEOUT_S} s") from error
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            reason = (errors.strip().splitlines() or ["no message"])[0]
            raise KernelUnavailableError(f"{self.program} failed: {reason}")
        return output


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)  # so that it removes its temporary files
