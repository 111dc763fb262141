"""Who starts the ranks of an engine: this process, as children of its own, or somebody else.

The same workers, links and step loop either way.
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

from outrider.engine.launch.restarts import Restarts, draft_lost
from outrider.engine.rank_group import RankError, Report
from outrider.links.rank_messages import Role
from outrider.links.secret import SECRET_VARIABLE
from outrider.logs import last_lines, open_log

logger = logging.getLogger(__name__)

_RANK_COMMAND = (sys.executable, "-m", "outrider.workers")
_WATCH_S = 0.2
_STOP_TIMEOUT_S = 5.0


_GPU_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")


def _may_have_gpus() -> bool:
    """Whether it is worth asking torch, whose import takes longer than the rest of an engine."""
    return any(map(os.path.exists, _GPU_DRIVERS))


class Ranks(Protocol):
    """Those who start the ranks, as the engine that waits for them deals with them."""

    def start(self, report: Report) -> None:
        """`report` is told of drafts that are lost, too."""

    def raise_if_dead(self, cause: Exception | None = None) -> None:
        """A rank that is known to have ended says why, in its own last lines."""

    def restart_drafts(self) -> None:
        """From now on; a draft that dies while the engine starts is an error to be told."""

    def replace_draft(self, reason: str) -> None:
        """The engine has given its draft up."""

    def close(self) -> None: ...


class AwaitedRanks:
    """Ranks that somebody else starts, and starts anew."""

    def start(self, report: Report) -> None:
        """They dial in when they are there."""

    def raise_if_dead(self, cause: Exception | None = None) -> None:
        """Whoever has started them knows."""

    def restart_drafts(self) -> None:
        """So does whoever has started this one."""

    def replace_draft(self, reason: str) -> None:
        logger.warning("the draft is lost and must be started anew: %s", reason)

    def close(self) -> None:
        """They end when the engine hangs up."""


@contextlib.contextmanager
def ranks_blamed(ranks: Ranks) -> Iterator[None]:
    """A rank's own last lines say more than that the engine misses it."""
    try:
        yield
    except RankError as error:
        ranks.raise_if_dead(error)
        raise


class SpawnedRanks:
    """Starts every rank as a child of this process, all on this host without Ray; starts a draft
    group that died anew, and leaves nothing behind."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        device: str,
        secret: str | None = None,
        parent: Path | None = None,
    ) -> None:
        """With a new secret, and a folder of their own below `parent`."""
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-", dir=parent))
        self.address = f"unix:{self._folder}/engine.sock"
        self.secret = secret or secrets.token_hex(32)
        self._sizes = sizes
        self._device = device
        self._lock = threading.Lock()
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._is_closed = threading.Event()
        self._may_restart = threading.Event()
        self._given_up = ""  # why the engine has, the present draft group

    def start(self, report: Report) -> None:
        """Processes end with the thread that started them, so one of our own starts them all."""
        threading.Thread(target=self._run, args=(report,), name="rank watch", daemon=True).start()

    def _run(self, report: Report) -> None:
        for role in self._sizes:
            self._start_group(role)
        self._keep_draft(report)

    def restart_drafts(self) -> None:
        self._may_restart.set()

    def replace_draft(self, reason: str) -> None:
        with self._lock:
            self._given_up = reason
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
        """Ranks end by themselves once the engine has hung up; who does not is killed."""
        self._is_closed.set()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        with self._lock:
            for process in (each for group in self._processes.values() for each in group):
                try:
                    process.wait(max(deadline_s - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_group(self, role: str) -> None:
        with self._lock:
            if not self._is_closed.is_set():
                ranks = range(self._sizes[role])
                self._processes[role] = [self._start_rank(role, rank) for rank in ranks]
            if role == Role.DRAFT:
                self._given_up = ""

    def _start_rank(self, role: str, rank: int) -> subprocess.Popen[bytes]:
        command = [*_RANK_COMMAND, "--engine", self.address]
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
        """One GPU a rank, the target's first; with too few of them, ranks share.

        NCCL refuses two ranks of one host on one GPU, so sharers pretend to be on hosts of their
        own: slow, but the same code path.
        """
        if not self._device.startswith(("auto", "cuda")) or not _may_have_gpus():
            return {}
        import torch  # an engine whose ranks are elsewhere needs none

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
        """Until `close`, whether there is one or not: the thread's end would be that of the ranks.

        A group is started anew whole, so all of it ends when one rank has.
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
        """Why the draft has to be started anew, if it has to. None of it is left then."""
        with self._lock:
            processes = self._processes.get(Role.DRAFT, [])
            ended = [rank for rank, each in enumerate(processes) if each.poll() is not None]
            if not ended:
                return None
            code = processes[ended[0]].returncode
            reason = self._given_up or f"draft rank {ended[0]} ended with exit code {code}"
            for process in processes:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_S)
        return reason

    def _log_path(self, role: str, rank: int) -> Path:
        return self._folder / f"{role}-{rank}.log"

    def _last_lines(self, role: str, rank: int) -> str:
        return "\n".join(last_lines(self._log_path(role, rank)))
