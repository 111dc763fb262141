"""Watchdog: exits a rank that hangs after its engine has closed the link.

A rank that is a child process or an actor is killed by its parent. One that was started by hand
would stay forever, with its memory, and its service manager would not notice.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time

from outrider.log_stream import drain_stderr

logger = logging.getLogger(__name__)

GRACE_S = 10.0  # for an orderly exit


def end_with_link(link: socket.socket) -> None:
    """Exit this process if it still runs `GRACE_S` after the other side has closed the link.
    Returns at once."""
    own = socket.socket(fileno=os.dup(link.fileno()))  # a descriptor that no other code closes
    threading.Thread(target=_watch, args=(own,), name="link watch", daemon=True).start()


def _watch(link: socket.socket) -> None:
    poller = select.poll()
    poller.register(link, select.POLLRDHUP)
    poller.poll()
    time.sleep(GRACE_S)
    logger.error("the engine has closed the link and this rank hangs; exiting")
    drain_stderr()
    os._exit(1)
