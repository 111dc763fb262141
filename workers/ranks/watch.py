"""The end of a rank that hangs when its engine has hung up on it.

Whoever started a rank as a child or an actor kills it then. One that was started by hand would stay
for good, with its memory, and its service manager would never know.
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

GRACE_S = 10.0  # to notice and end in order


def end_with_link(link: socket.socket) -> None:
    """End this process if it is still there `GRACE_S` after the other side has closed the link.
    Returns at once."""
    own = socket.socket(fileno=os.dup(link.fileno()))  # a number that nobody else closes
    threading.Thread(target=_watch, args=(own,), name="link watch", daemon=True).start()


def _watch(link: socket.socket) -> None:
    poller = select.poll()
    poller.register(link, select.POLLRDHUP)
    poller.poll()
    time.sleep(GRACE_S)
    logger.error("the engine has ended the link, and this rank hangs: it is ended")
    drain_stderr()
    os._exit(1)
