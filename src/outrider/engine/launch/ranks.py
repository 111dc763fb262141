"""Launchers of an engine's ranks: as children of this process, or externally.

Workers, links and step loop are the same either way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from outrider.engine.rank_group import RankError, Report
from outrider.links.rank_messages import Role
from outrider.links.secret import SECRET_VARIABLE
from outrider.logs import last_lines, open_log
from outrider.restarts import Restarts, draft_lost

logger = logging.getLogger(__name__)

_WATCH_S = 0.2
_STOP_TIMEOUT_S = 5.0


_GPU_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")


def _may_have_gpus() -> bool:
    """Whether to ask torch, whose import takes longer than the rest of the engine's start."""
    return any(map(os.path.exists, _GPU_DRIVERS))


class RankLauncher(Protocol):
    """Starts the ranks for an engine that waits for them."""

    def start(self, report: Report) -> None:
        """`report` also gets lost drafts."""

    def raise_if_dead(self, cause: Exception | None = None) -> None:
        """Raise with the last log lines of a rank that is known to have ended."""

    def restart_drafts(self) -> None:
        """Restart lost drafts from now on; before, while the engine starts, they are errors."""

    def replace_draft(self, reason: str) -> None:
        """The engine has given up its draft: start another."""

    def close(self) -> None: ...


class ExternalRanks:
    """Ranks that another process starts and restarts."""

    def start(self, report: Report) -> None:
        """Nothing to do: they connect once they run."""

    def raise_if_dead(self, cause: Exception | None = None) -> None:
        """Unknown here: another process watches them."""

    def restart_drafts(self) -> None:
        """Nothing to do: another process restarts them."""

    def replace_draft(self, reason: str) -> None:
        logger.warning("the draft is lost and must be restarted: %s", reason)

    def close(self) -> None:
        """Nothing to do: ranks end when the engine closes their links."""


@contextlib.contextmanager
def blame_ranks(ranks: RankLauncher) -> Iterator[None]:
    """Prefer a dead rank's last log lines over the engine's own `RankError`."""
    try:
        yield
    except RankError as error:
        ranks.raise_if_dead(error)
        raise


class SpawnedRanks:
    """Starts every rank as a child of this process, on this host, without Ray. Restarts a draft
    group that died; ends all of them on `close`."""

    command = (sys.executable, "-m", "outrider.workers")

    def __init__(
        self,
        sizes: Mapping[str, int],
        device: str,
        secret: str | None = None,
        parent: Path | None = None,
    ) -> None:
        """Creates a secret unless one is given, and a folder below `parent`."""
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-", dir=parent))
        self.address = f"unix:{self._folder}/engine.sock"
        self.secret = secret or secrets.token_hex(32)
        self._sizes = sizes
        self._device = device
        self._lock = threading.Lock()
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._is_closed = threading.Event()
        self._have_ended = threading.Event()
        self._may_restart = threading.Event()
        self._give_up_reason = ""  # why the engine gave up the present draft group

    def start(self, report: Report) -> None:
        """Children are killed when the thread that started them ends, so one dedicated thread
        starts all, and lasts until they have ended."""
        threading.Thread(target=self._run, args=(report,), name="rank watch", daemon=True).start()

    def _run(self, report: Report) -> None:
        for role in self._sizes:
            self._start_group(role)
        self._keep_draft(report)
        self._have_ended.wait()

    def restart_drafts(self) -> None:
        self._may_restart.set()

    def replace_draft(self, reason: str) -> None:
        with self._lock:
            self._give_up_reason = reason
            for process in self._processes.get(Role.DRAFT, ()):
                process.kill()

    def raise_if_dead(self, cause: Exception | None = None) -> None:
        with self._lock:
            for role, processes in self._processes.items():
                for rank, process in enumerate(processes):
                    if process.poll() is not None:
                        raise RankError(
                            f"{role} rank {rank} ended with exit code {process.returncode}:\n"
                            + self._last_lines(role, rank)
                        ) from cause

    def close(self) -> None:
        """Ranks end once the engine closes their links; those that do not are killed."""
        self._is_closed.set()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        with self._lock:
            for process in (each for group in self._processes.values() for each in group):
                try:
                    process.wait(max(deadline_s - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._have_ended.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_group(self, role: str) -> None:
        with self._lock:
            if not self._is_closed.is_set():
                ranks = range(self._sizes[role])
                self._processes[role] = [self._start_rank(role, rank) for rank in ranks]
            if role == Role.DRAFT:
                self._give_up_reason = ""

    def _start_rank(self, role: str, rank: int) -> subprocess.Popen[bytes]:
        command = [*self.command, "--engine", self.address]
        command += ["--role", role, "--rank", str(rank), "--size", str(self._sizes[role])]
        with open_log(self._log_path(role, rank)) as log:
            return subprocess.Popen(
                [*command, "--with-parent", str(os.getpid())],
                env=os.environ | {SECRET_VARIABLE: self.secret} | self._gpu_variables(role, rank),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _gpu_variables(self, role: str, rank: int) -> dict[str, str]:
        """One GPU per rank, the target's first; with too few GPUs, ranks share them.

        NCCL refuses two ranks of one host on one GPU, so sharing ranks pretend to be on different
        hosts: slow, but the same code path.
        """
        if not self._device.startswith(("auto", "cuda")) or not _may_have_gpus():
            return {}
        import torch  # not needed by an engine whose ranks are elsewhere

        if not torch.cuda.is_available():
            return {}
        index = rank if role == Role.TARGET else self._sizes[Role.TARGET] + rank
        available = torch.cuda.device_count()
        variables = {"CUDA_VISIBLE_DEVICES": str(index % available)}
        if sum(self._sizes.values()) > available:
            variables |= {"NCCL_HOSTID": f"{role}-{rank}", "NCCL_NET": "Socket"}
            variables |= {"NCCL_SOCKET_IFNAME": "lo"}
        return variables

    def _keep_draft(self, report: Report) -> None:
        """Runs until `close`, even without a draft: the ranks end with this thread.

        A group is restarted as a whole: when one rank ends, the others are killed.
        """
        restarts = Restarts()
        restarts.runs()
        while not self._is_closed.wait(_WATCH_S):
            if not self._may_restart.is_set() or (reason := self._draft_loss()) is None:
                continue
            pause_s = restarts.lost()
            report(draft_lost(reason, pause_s))
            if self._is_closed.wait(pause_s):
                return
            self._start_group(Role.DRAFT)
            restarts.runs()

    def _draft_loss(self) -> str | None:
        """Why the draft must be restarted, None if it runs. Kills what is left of the group."""
        with self._lock:
            processes = self._processes.get(Role.DRAFT, [])
            ended = [rank for rank, each in enumerate(processes) if each.poll() is not None]
            if not ended:
                return None
            code = processes[ended[0]].returncode
            reason = self._give_up_reason or f"draft rank {ended[0]} ended with exit code {code}"
            for process in processes:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_S)
        return reason

    def _log_path(self, role: str, rank: int) -> Path:
        return self._folder / f"{role}-{rank}.log"

    def _last_lines(self, role: str, rank: int) -> str:
        return "\n".join(last_lines(self._log_path(role, rank)))
