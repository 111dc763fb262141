"""The benchmark's side of an engine's process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from outrider.benchmarks.peers.protocol import (
    Generation,
    Mode,
    Options,
    PeerError,
    PeerInfo,
    PeerRequest,
    Tokens,
    decode_generation,
    decode_info,
    encode,
)
from outrider.loadtest.servers import pausing
from outrider.loadtest.servers.cpu_clock import process_cpu_s
from outrider.loadtest.servers.keeper import descendants

SOURCE_ROOT = Path(__file__).absolute().parents[3]  # not resolved: the package consists of symlinks
LOG_LINES_SHOWN = 30  # a traceback and some context
CLOSE_TIMEOUT_S = 20


class PeerProcess:
    """An engine in a separate process, so that memory and threads do not interfere.

    Between requests it blocks in a read; its child processes may still run. Its output goes to a
    file, and is shown if it dies.
    """

    def __init__(
        self,
        engine: str,
        options: Options,
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [python, "-m", "outrider.benchmarks.peers.worker", engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(options.threads, env or {}),
            text=True,
            encoding="utf-8",
        )
        try:
            self.info: PeerInfo = decode_info(self._exchange(encode(options)))
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Tokens], max_tokens: int, mode: Mode | None = None
    ) -> Generation:
        """Generate for all prompts at once; `PeerError` if an output has another length."""
        request = PeerRequest([list(prompt) for prompt in prompts], max_tokens, mode or Mode())
        generation = decode_generation(self._exchange(encode(request)))
        lengths = [len(tokens) for tokens in generation.token_ids]
        if lengths != [max_tokens] * len(prompts):
            raise PeerError(
                f"{self.engine} returned {lengths} tokens instead of {max_tokens} for each of "
                f"{len(prompts)} prompts; its figures would not be comparable."
            )
        return generation

    def cpu_s(self) -> float | None:
        """Processor seconds of the process and its descendants so far; None without `/proc`."""
        own, *below = (process_cpu_s(pid, with_ended_children=True) for pid in self._pids())
        return None if own is None else own + sum(used_s or 0.0 for used_s in below)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Stop it and its descendants: an idle engine may still wake up a hundred times a second,
        which delays a peer whose threads wait for each other."""
        try:
            pausing.pause(self._pids)
            yield
        finally:
            pausing.resume(self._pids())

    def _pids(self) -> list[int]:
        """The process, and with `/proc` its descendants."""
        below = descendants(self._process.pid) if Path("/proc").exists() else []
        return [self._process.pid, *below]

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            code = self._process.wait()
            raise PeerError(f"the {self.engine} process ended with code {code}:\n{self._tail()}")
        return reply

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


def _environment(threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """OpenMP reads its variables once, so threads are set before any import."""
    paths = [str(SOURCE_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }
