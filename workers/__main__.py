"""`python -m outrider.workers`: one rank, started by hand or by a launcher, without Ray."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys

from outrider.errors import OutriderError
from outrider.links.rank_messages import Role
from outrider.links.secret import secret_from_environment
from outrider.logs import setup_logging
from outrider.workers.ranks.start import ROLES, RankPlace, run_rank
from outrider.workers.ranks.watch import end_with_link

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.workers", description=__doc__)
    parser.add_argument("--engine", required=True, help="unix:/path or tcp:host:port")
    parser.add_argument("--role", required=True, choices=ROLES)
    parser.add_argument("--rank", type=int, required=True, help="from 0 to size - 1")
    parser.add_argument("--size", type=int, required=True, help="ranks of this role")
    parser.add_argument(
        "--with-parent", type=int, metavar="PID", help="end when the process that starts it does"
    )
    args = parser.parse_args()
    setup_logging(role=args.role, rank=args.rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C
    if args.with_parent is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # and the terminal's hang-up
        end_with(args.with_parent)
    faulthandler.register(signal.SIGUSR1)  # dumps all stacks, for a rank that hangs
    try:
        run_rank(
            RankPlace(args.engine, Role(args.role), args.rank, args.size),
            secret_from_environment(),
            end_with_link,
        )
    except OutriderError as error:
        sys.exit(f"error: {error}")


def end_with(parent: int) -> None:
    """Kill this process when `parent` exits, or now if it has exited already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it exited before prctl
        sys.exit("error: the starting process has ended.")


if __name__ == "__main__":
    main()
